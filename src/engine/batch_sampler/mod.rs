//! Draws the tokens of a step from its logits.
//!
//! A batch row with draft tokens has several rows of logits. The sampler draws from them in turn,
//! as long as each drawn token equals the draft token in its place.
//!
//! Invariant: a sequence's tokens and log-probabilities are the same with and without draft
//! tokens. A draft token is only compared with the drawn token, and later draws see the drawn one.

use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, OutputRules, Row, Sampled, SequenceId, TokenId};

use super::forward::{CopyRow, LogitRows};
use super::sampler::{DrawContext, Sampler, Unsampleable};
use super::sampling_params::{SamplingParams, TokenOutput};
use crate::fault::{self, Place};

/// A sequence whose next tokens are drawn.
pub struct Continuation<'a> {
    /// How its tokens are drawn.
    pub params: &'a SamplingParams,
    /// When its output ends.
    pub rules: &'a OutputRules,
    /// Its prompt and output so far.
    pub known: &'a [TokenId],
    /// The length of its prompt.
    pub prompt_tokens: usize,
}

impl<'a> Continuation<'a> {
    /// Returns the context of the draw after `history`: the known tokens and the draft tokens
    /// that were accepted.
    fn context<'h>(&self, history: &'h [TokenId]) -> DrawContext<'h>
    where
        'a: 'h,
    {
        DrawContext {
            params: self.params,
            history,
            prompt_tokens: self.prompt_tokens,
            forbidden: (self.rules).forbidden_tokens(history.len() - self.prompt_tokens),
        }
    }
}

/// The draw from one row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The sequence that continues.
    pub sequence: SequenceId,
    /// The result.
    pub outcome: DrawOutcome,
}

/// The result of a draw.
#[derive(Clone, Debug, PartialEq)]
pub enum DrawOutcome {
    /// The sampler drew this token.
    Token(TokenOutput),
    /// No token can be drawn, so the request fails.
    Failed(Unsampleable),
    /// The sampler drew nothing: an earlier draw of the same batch row failed, ended the sequence
    /// or differs from the draft token.
    Void,
}

impl Draw {
    /// Returns what the scheduler commits.
    pub(super) fn sampled(&self) -> Sampled {
        match &self.outcome {
            DrawOutcome::Token(output) => Sampled::Token(output.token),
            DrawOutcome::Failed(_) => Sampled::Failed,
            DrawOutcome::Void => Sampled::Void,
        }
    }
}

/// Draws the tokens of a step on several threads, with memory that it reuses for the next step.
pub struct BatchSampler {
    vocabulary: usize,
    workers: Vec<SamplerWorker>, // One for each thread.
    draws: Vec<Draw>,
}

impl BatchSampler {
    /// Returns a sampler for rows of `vocabulary` logits.
    #[must_use]
    pub fn new(vocabulary: usize) -> BatchSampler {
        BatchSampler {
            vocabulary,
            workers: Vec::new(),
            draws: Vec::new(),
        }
    }

    /// Draws the tokens of `batch`. Returns one draw for each row of logits, in their order.
    /// `continuation` returns the state of a row's sequence.
    pub fn sample<'a>(
        &mut self,
        batch: &Batch,
        logits: &mut impl LogitRows,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> &[Draw] {
        self.draws.clear();
        for row in batch.rows() {
            let void = || Draw {
                sequence: row.sequence,
                outcome: DrawOutcome::Void,
            };
            let len = self.draws.len() + row.logits as usize;
            self.draws.resize_with(len, void);
        }
        // A panic loses the workers, so that nothing half done stays in their buffers. The next
        // step allocates new ones.
        let mut workers = std::mem::take(&mut self.workers);
        let worker_count = logits.workers().min(self.draws.len());
        while workers.len() < worker_count {
            workers.push(SamplerWorker::new(logits.kernels(), self.vocabulary));
        }
        let parts = split(batch, &mut workers[..worker_count], &mut self.draws);
        logits.share(parts, |part, copy_row| {
            part.sample(batch, copy_row, &continuation);
        });
        self.workers = workers;
        &self.draws
    }

    /// Returns the draws of the last call of `sample`, unless they were taken.
    pub(super) fn draws(&self) -> &[Draw] {
        &self.draws
    }

    /// Replaces the draws.
    pub(super) fn set_draws(&mut self, draws: Vec<Draw>) {
        self.draws = draws;
    }

    /// Takes the draws, and keeps their memory.
    pub(super) fn take_draws(&mut self) -> impl Iterator<Item = Draw> + '_ {
        self.draws.drain(..)
    }
}

/// Cuts the batch's rows into one part for each worker, with about as many draws each.
fn split<'a>(
    batch: &'a Batch,
    workers: &'a mut [SamplerWorker],
    mut draws: &'a mut [Draw],
) -> impl Iterator<Item = WorkerPart<'a>> {
    let (draw_count, worker_count, mut first) = (draws.len(), workers.len(), 0);
    let mut rows = batch.rows();
    (1..).zip(workers).map(move |(part, worker)| {
        // A row is never cut in two: its draws depend on each other.
        let target = part * draw_count / worker_count;
        let (mut count, mut end) = (0, first);
        while end < target {
            end += rows[count].logits as usize;
            count += 1;
        }
        let part = WorkerPart {
            rows: rows.split_off(..count).expect("the batch has as many rows"),
            first,
            draws: draws
                .split_off_mut(..end - first)
                .expect("each row of logits has a draw"),
            worker,
        };
        first = end;
        part
    })
}

/// A worker's part of the batch.
struct WorkerPart<'a> {
    rows: &'a [Row],
    first: usize, // The index of the part's first row of logits.
    draws: &'a mut [Draw],
    worker: &'a mut SamplerWorker,
}

impl WorkerPart<'_> {
    fn sample<'a>(
        self,
        batch: &Batch,
        copy_row: &CopyRow<'_>,
        continuation: impl Fn(SequenceId) -> Continuation<'a>,
    ) {
        fault::pass(Place::SamplingBegun);
        let mut at = 0;
        for row in self.rows.iter().filter(|row| row.logits > 0) {
            // All tokens with logits, except the first one, are draft tokens.
            let drafts = &batch.tokens(row)[row.len() + 1 - row.logits as usize..];
            let sequence = continuation(row.sequence);
            debug_assert_eq!(
                sequence.known.len() + drafts.len(),
                row.end(),
                "known tokens, then draft tokens"
            );
            let logits = |place, logits: &mut [f32]| {
                let row = self.first + at + place;
                copy_row(row, logits);
                fault::pass_row(Place::LogitsCopied, row, logits);
            };
            let draws = &mut self.draws[at..][..row.logits as usize];
            self.worker.sample_row(&sequence, drafts, logits, draws);
            at += draws.len();
        }
    }
}

/// The buffers of one thread.
struct SamplerWorker {
    logits: Vec<f32>,
    sampler: Sampler,
    history: Vec<TokenId>, // The known tokens of a row, then its draft tokens.
}

impl SamplerWorker {
    fn new(kernels: Kernels, vocabulary: usize) -> SamplerWorker {
        SamplerWorker {
            logits: vec![0.0; vocabulary],
            sampler: Sampler::new(kernels, vocabulary),
            history: Vec::new(),
        }
    }

    /// Draws the token after the known ones. If that token equals the draft token, draws the next
    /// one, and so on.
    fn sample_row(
        &mut self,
        sequence: &Continuation<'_>,
        drafts: &[TokenId],
        copy_row: impl Fn(usize, &mut [f32]),
        draws: &mut [Draw],
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
        for (place, draw) in draws.iter_mut().enumerate() {
            copy_row(place, &mut self.logits);
            let history = &tokens[..known + place];
            let drawn = self
                .sampler
                .sample(&self.logits, &sequence.context(history));
            let output = match drawn {
                Ok(output) => output,
                Err(error) => {
                    draw.outcome = DrawOutcome::Failed(error);
                    return;
                }
            };
            let token = output.token;
            draw.outcome = DrawOutcome::Token(output);
            let output_tokens = history.len() + 1 - sequence.prompt_tokens;
            if !(sequence.rules).accepts_draft(drafts.get(place), token, output_tokens) {
                return;
            }
            fault::pass(Place::DraftAccepted);
        }
    }
}

#[cfg(test)]
mod tests;
