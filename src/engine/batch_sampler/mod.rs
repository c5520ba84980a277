//! From the logits of a step to its tokens: each row position by position, for as long as its drafts hold.
//!
//! Invariant: a sequence's tokens and log-probabilities are those that one token a step would have given it. A draft is only
//! compared with the token that is drawn in its place, and whatever is drawn after it counts it as drawn.

use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, Row, Sampled, SequenceId, TokenId};

use super::sampler::{Draw, Sampler, Unsampleable};
use super::{CopyRow, LogitRows, SamplingParams, TokenOutput};

/// What a request asks of its tokens.
#[derive(Clone, Debug)]
pub struct Terms {
    /// How they are drawn.
    pub sampling: SamplingParams,
    /// Stop tokens are not drawn before this many tokens exist.
    pub min_new_tokens: usize,
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Tokens that end the output.
    pub stop_tokens: Vec<TokenId>,
}

impl Terms {
    /// Whether `token`, drawn, is the last one of an output that is `output_tokens` long with it. While the output is too short
    /// no stop token is drawn.
    fn end_with(&self, token: TokenId, output_tokens: usize) -> bool {
        output_tokens >= self.max_new_tokens || self.stop_tokens.contains(&token)
    }
}

/// A sequence whose next tokens are to be drawn.
pub struct Continued<'a> {
    /// What its request asks.
    pub terms: &'a Terms,
    /// Prompt and output so far.
    pub known: &'a [TokenId],
    /// How many of them are the prompt.
    pub prompt_tokens: usize,
}

impl<'a> Continued<'a> {
    /// The draw of the token after `history`, which is what is known and the drafts that held.
    fn draw<'h>(&self, history: &'h [TokenId]) -> Draw<'h>
    where
        'a: 'h,
    {
        let is_short = history.len() - self.prompt_tokens < self.terms.min_new_tokens;
        Draw {
            params: &self.terms.sampling,
            history,
            prompt_tokens: self.prompt_tokens,
            forbidden: if is_short {
                &self.terms.stop_tokens
            } else {
                &[]
            },
        }
    }
}

/// The drawn tokens of one step, with memory that is used again for the next.
pub struct BatchSampler {
    vocabulary: usize,
    workers: Vec<SamplerWorker>, // One for each worker.
    outcomes: Vec<Option<Result<TokenOutput, Unsampleable>>>, // In the places of `sampled`; empty between steps.
    /// One entry for each token of the batch whose logits are wanted, as [`Step::commit`](sterna_scheduler::Step::commit)
    /// takes them.
    pub sampled: Vec<Sampled>,
    /// What was drawn, in the same order; of a row whose drafts hold, several in turn.
    pub outputs: Vec<(SequenceId, Result<TokenOutput, Unsampleable>)>,
}

/// What one worker draws with.
struct SamplerWorker {
    logits: Vec<f32>,
    sampler: Sampler,
    history: Vec<TokenId>, // Of a row with drafts: what is known, then the drafts.
}

/// BatchSampler that one worker draws from, and where it writes what it drew.
struct Share<'a> {
    rows: &'a [Row],
    first: usize, // The row of logits that is the first of them.
    sampled: &'a mut [Sampled],
    outcomes: &'a mut [Option<Result<TokenOutput, Unsampleable>>],
    worker: &'a mut SamplerWorker,
}

/// Where what is drawn from one row of logits goes.
type Place<'a> = (
    &'a mut Sampled,
    &'a mut Option<Result<TokenOutput, Unsampleable>>,
);

impl BatchSampler {
    /// For rows of `vocabulary` logits.
    #[must_use]
    pub fn new(vocabulary: usize) -> BatchSampler {
        BatchSampler {
            vocabulary,
            workers: Vec::new(),
            outcomes: Vec::new(),
            sampled: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// Draws tokens for the rows of `batch` that want logits, in their order. `continued` knows each row's sequence. The rows are
    /// shared among those who may work on the logits; no draw depends on whose share it is in.
    pub fn sample<'a>(
        &mut self,
        batch: &Batch,
        logits: &mut impl LogitRows,
        continued: impl Fn(SequenceId) -> Continued<'a> + Sync,
    ) {
        let entries = batch.logits_count();
        self.sampled.clear();
        self.sampled.resize(entries, Sampled::Void);
        self.outcomes.clear();
        self.outcomes.resize_with(entries, || None);
        let worker_count = logits.workers().min(entries);
        while self.workers.len() < worker_count {
            self.workers
                .push(SamplerWorker::new(logits.kernels(), self.vocabulary));
        }
        logits.share(self.shares(batch, worker_count), |share, copy_row| {
            share.sample(batch, copy_row, &continued);
        });
        self.outputs.clear();
        let mut outcomes = self.outcomes.drain(..);
        for row in batch.rows() {
            let of_row = outcomes.by_ref().take(row.logits as usize);
            let drawn = of_row.flatten().map(|outcome| (row.sequence, outcome));
            self.outputs.extend(drawn);
        }
    }

    /// Cuts the batch's rows into `worker_count` shares with about as many logits each.
    fn shares<'a>(
        &'a mut self,
        batch: &'a Batch,
        worker_count: usize,
    ) -> impl Iterator<Item = Share<'a>> {
        let (entries, mut first) = (batch.logits_count(), 0);
        let mut rows = batch.rows();
        let (mut sampled, mut outcomes) = (&mut self.sampled[..], &mut self.outcomes[..]);
        let workers = self.workers[..worker_count].iter_mut();
        (1..).zip(workers).map(move |(share, worker)| {
            // Whoever begins a row has all of it.
            let until = share * entries / worker_count;
            let (mut count, mut end) = (0, first);
            while end < until {
                end += rows[count].logits as usize;
                count += 1;
            }
            let share = Share {
                rows: rows
                    .split_off(..count)
                    .expect("rows up to the last with logits"),
                first,
                sampled: split_off(&mut sampled, end - first),
                outcomes: split_off(&mut outcomes, end - first),
                worker,
            };
            first = end;
            share
        })
    }
}

fn split_off<'a, T>(slice: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    slice
        .split_off_mut(..count)
        .expect("an entry for each row of logits")
}

impl Share<'_> {
    fn sample<'a>(
        self,
        batch: &Batch,
        copy_row: &CopyRow<'_>,
        continued: impl Fn(SequenceId) -> Continued<'a>,
    ) {
        let mut at = 0;
        for row in self.rows.iter().filter(|row| row.logits > 0) {
            // All tokens with logits but the first of them are drafts.
            let drafts = &batch.tokens(row)[row.len() + 1 - row.logits as usize..];
            let sequence = continued(row.sequence);
            debug_assert_eq!(
                sequence.known.len() + drafts.len(),
                row.end(),
                "known tokens, then drafts"
            );
            let logits = |place, logits: &mut [f32]| copy_row(self.first + at + place, logits);
            let entries = row.logits as usize;
            let sampled = self.sampled[at..][..entries].iter_mut();
            let outcomes = self.outcomes[at..][..entries].iter_mut();
            self.worker
                .sample_row(&sequence, drafts, logits, sampled.zip(outcomes));
            at += entries;
        }
    }
}

impl SamplerWorker {
    fn new(kernels: Kernels, vocabulary: usize) -> SamplerWorker {
        SamplerWorker {
            logits: vec![0.0; vocabulary],
            sampler: Sampler::new(kernels, vocabulary),
            history: Vec::new(),
        }
    }

    /// One row: the token after what is known, and after each draft for as long as the draft is what was drawn. Fills as many of
    /// `places` as it draws.
    fn sample_row<'p>(
        &mut self,
        sequence: &Continued<'_>,
        drafts: &[TokenId],
        copy_row: impl Fn(usize, &mut [f32]),
        places: impl Iterator<Item = Place<'p>>,
    ) {
        let known = sequence.known.len();
        let tokens = if drafts.is_empty() {
            sequence.known
        } else {
            self.history.clear();
            self.history.extend_from_slice(sequence.known);
            self.history.extend_from_slice(drafts);
            &self.history
        };
        for (place, (sampled, outcome)) in places.enumerate() {
            copy_row(place, &mut self.logits);
            let draw = sequence.draw(&tokens[..known + place]);
            let drawn = self.sampler.sample(&self.logits, &draw);
            let goes_on = match &drawn {
                Ok(TokenOutput { token, .. }) => {
                    *sampled = Sampled::Token(*token);
                    let output_tokens = known + place + 1 - sequence.prompt_tokens;
                    let is_over = sequence.terms.end_with(*token, output_tokens);
                    !is_over && drafts.get(place) == Some(token)
                }
                Err(_) => {
                    *sampled = Sampled::Failed;
                    false
                }
            };
            *outcome = Some(drawn);
            if !goes_on {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
