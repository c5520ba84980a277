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
pub struct Rows {
    vocabulary: usize,
    desks: Vec<Desk>,                                         // One for each worker.
    outcomes: Vec<Option<Result<TokenOutput, Unsampleable>>>, // In the places of `sampled`; empty between steps.
    /// One entry for each token of the batch whose logits are wanted, as [`Step::commit`](sterna_scheduler::Step::commit)
    /// takes them.
    pub sampled: Vec<Sampled>,
    /// What was drawn, in the same order; of a row whose drafts hold, several in turn.
    pub outputs: Vec<(SequenceId, Result<TokenOutput, Unsampleable>)>,
}

/// What one worker draws with.
struct Desk {
    logits: Vec<f32>,
    sampler: Sampler,
    history: Vec<TokenId>, // Of a row with drafts: what is known, then the drafts.
}

/// Rows that one worker draws from, and where it writes what it drew.
struct Share<'a> {
    rows: &'a [Row],
    first: usize, // The row of logits that is the first of them.
    sampled: &'a mut [Sampled],
    outcomes: &'a mut [Option<Result<TokenOutput, Unsampleable>>],
    desk: &'a mut Desk,
}

/// Where what is drawn from one row of logits goes.
type Place<'a> = (
    &'a mut Sampled,
    &'a mut Option<Result<TokenOutput, Unsampleable>>,
);

impl Rows {
    /// For rows of `vocabulary` logits.
    #[must_use]
    pub fn new(vocabulary: usize) -> Rows {
        Rows {
            vocabulary,
            desks: Vec::new(),
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
        let workers = logits.workers().min(entries);
        while self.desks.len() < workers {
            self.desks
                .push(Desk::new(logits.kernels(), self.vocabulary));
        }
        logits.share(self.shares(batch, workers), |share, copy_row| {
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

    /// Cuts the batch's rows into `workers` shares with about as many logits each.
    fn shares<'a>(
        &'a mut self,
        batch: &'a Batch,
        workers: usize,
    ) -> impl Iterator<Item = Share<'a>> {
        let (entries, mut first) = (batch.logits_count(), 0);
        let mut rows = batch.rows();
        let (mut sampled, mut outcomes) = (&mut self.sampled[..], &mut self.outcomes[..]);
        let desks = self.desks[..workers].iter_mut();
        (1..).zip(desks).map(move |(share, desk)| {
            // Whoever begins a row has all of it.
            let until = share * entries / workers;
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
                desk,
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
            self.desk
                .sample_row(&sequence, drafts, logits, sampled.zip(outcomes));
            at += entries;
        }
    }
}

impl Desk {
    fn new(kernels: Kernels, vocabulary: usize) -> Desk {
        Desk {
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
mod tests {
    use sterna_scheduler::{PAGE_TOKENS, Page};

    use super::*;

    const VOCABULARY: usize = 12;
    const STOP: TokenId = 3;
    /// No sequence is longer.
    const LONGEST: usize = 64;

    /// SplitMix64.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The logits of a step, each row a hash of all tokens up to it.
    struct Logits(Vec<Vec<f32>>);

    impl Logits {
        /// What a model would compute after `history`; NaN where `breaks_at` tokens precede.
        fn push(&mut self, history: &[TokenId], breaks_at: usize) {
            let mut state = 1;
            for &token in history {
                state = next(&mut state) ^ u64::from(token);
            }
            let mut logit = || (next(&mut state) % 64) as f32 / 16.0;
            let mut row: Vec<f32> = (0..VOCABULARY).map(|_| logit()).collect();
            if history.len() == breaks_at {
                row[5] = f32::NAN;
            }
            self.0.push(row);
        }
    }

    impl LogitRows for Logits {
        fn copy_row(&self, row: usize, logits: &mut [f32]) {
            logits.copy_from_slice(&self.0[row]);
        }
    }

    /// A token, the bits of its log-probability and of the most likely ones.
    type Answer = (TokenId, u32, Vec<(TokenId, u32)>);

    struct Sequence {
        terms: Terms,
        prompt_tokens: usize,
        tokens: Vec<TokenId>,
        breaks_at: usize,
        answer: Vec<Result<Answer, Unsampleable>>,
        accepted: usize,
        over: bool,
    }

    fn sequence(seed: u64) -> Sequence {
        let mut state = seed;
        let mut one_in = |n: u64| next(&mut state).is_multiple_of(n);
        let sampling = SamplingParams {
            temperature: if one_in(2) { 0.0 } else { 0.8 },
            top_k: if one_in(3) { 4 } else { 0 },
            top_p: if one_in(3) { 0.8 } else { 1.0 },
            min_p: if one_in(4) { 0.1 } else { 0.0 },
            seed,
            repetition_penalty: if one_in(3) { 1.4 } else { 1.0 },
            frequency_penalty: if one_in(3) { 0.6 } else { 0.0 },
            presence_penalty: if one_in(3) { 0.9 } else { 0.0 },
            logit_bias: if one_in(3) {
                vec![(STOP, 1.5), (7, f32::NEG_INFINITY), (2, 2.0)]
            } else {
                Vec::new()
            },
            logprobs: Some(2),
        };
        let terms = Terms {
            sampling,
            min_new_tokens: if one_in(2) { 9 } else { 0 },
            max_new_tokens: if one_in(2) { 40 } else { 11 },
            stop_tokens: if one_in(4) { Vec::new() } else { vec![STOP, 8] },
        };
        let breaks_at = if one_in(6) { 17 } else { usize::MAX };
        let prompt_tokens = 1 + (next(&mut state) % 14) as usize;
        let token = |_| (next(&mut state) % VOCABULARY as u64) as TokenId;
        let tokens = (0..prompt_tokens).map(token).collect();
        Sequence {
            terms,
            prompt_tokens,
            tokens,
            breaks_at,
            answer: Vec::new(),
            accepted: 0,
            over: false,
        }
    }

    /// Runs all sequences to their ends, side by side, with whatever `draft` proposes for each (by index).
    fn run(
        mut sequences: Vec<Sequence>,
        mut draft: impl FnMut(usize, &Sequence) -> Vec<TokenId>,
    ) -> Vec<Sequence> {
        let mut rows = Rows::new(VOCABULARY);
        let pages: Vec<Page> = (0..LONGEST as u32).map(Page::new).collect();
        let table = |end: usize| &pages[..end.div_ceil(PAGE_TOKENS)];
        let mut batch = Batch::new();
        while sequences.iter().any(|sequence| !sequence.over) {
            batch.clear();
            let mut logits = Logits(Vec::new());
            for (index, sequence) in sequences.iter().enumerate() {
                let start = sequence.tokens.len() - 1;
                // Beside each sequence a prompt that wants no logits.
                batch.push_row(SequenceId::new(99, 0), 0, &[1, 2, 3], table(3), 0);
                if !sequence.over {
                    let drafts = draft(index, sequence);
                    let mut history = sequence.tokens.clone();
                    logits.push(&history, sequence.breaks_at);
                    for &token in &drafts {
                        history.push(token);
                        logits.push(&history, sequence.breaks_at);
                    }
                    // The end of a prompt, and a decode, look the same but for the tokens before.
                    let start = if sequence.answer.is_empty() { 0 } else { start };
                    batch.push_row(
                        SequenceId::new(index as u32, 0),
                        start,
                        &history[start..],
                        table(history.len()),
                        1 + drafts.len(),
                    );
                }
            }
            rows.sample(&batch, &mut logits, |id| {
                let index = (0..sequences.len()).find(|&i| SequenceId::new(i as u32, 0) == id);
                let sequence = &sequences[index.expect("a row that wants logits")];
                Continued {
                    terms: &sequence.terms,
                    known: &sequence.tokens,
                    prompt_tokens: sequence.prompt_tokens,
                }
            });
            assert_eq!(rows.sampled.len(), batch.logits_count());
            take(&batch, &mut rows, &mut sequences);
        }
        sequences
    }

    /// What the scheduler does with a step's result: a row's entries count up to the first that was not drafted.
    fn take(batch: &Batch, rows: &mut Rows, sequences: &mut [Sequence]) {
        let mut sampled = rows.sampled.iter();
        let mut outputs = rows.outputs.drain(..);
        for row in batch.rows().iter().filter(|row| row.logits > 0) {
            let index = (0..).find(|&i| SequenceId::new(i, 0) == row.sequence);
            let sequence = &mut sequences[index.unwrap() as usize];
            let drafts = batch.tokens(row)[row.len() + 1 - row.logits as usize..].iter();
            let mut counts = true;
            for (place, draft) in drafts.map(Some).chain([None]).enumerate() {
                let entry = *sampled.next().unwrap();
                if !counts {
                    assert_eq!(entry, Sampled::Void);
                    continue;
                }
                let (id, outcome) = outputs.next().unwrap();
                assert_eq!(id, row.sequence);
                sequence.accepted += usize::from(place > 0);
                match entry {
                    Sampled::Void => panic!("an entry that counts was not drawn"),
                    Sampled::Failed => sequence.over = true,
                    Sampled::Token(token) => {
                        sequence.tokens.push(token);
                        let output = sequence.tokens.len() - sequence.prompt_tokens;
                        let stops = sequence.terms.stop_tokens.contains(&token)
                            && output >= sequence.terms.min_new_tokens;
                        sequence.over = stops || output == sequence.terms.max_new_tokens;
                        counts = !sequence.over && draft == Some(&token);
                    }
                }
                counts &= !sequence.over;
                sequence.answer.push(outcome.map(|output| {
                    let bits = |(token, logprob): &(TokenId, f32)| (*token, logprob.to_bits());
                    let top = output.top.iter().map(bits).collect();
                    (output.token, output.logprob.unwrap().to_bits(), top)
                }));
            }
        }
        assert!(outputs.next().is_none(), "nothing else was drawn");
        assert!(sampled.next().is_none());
    }

    #[test]
    fn tokens_and_logprob_bits_are_equal_with_and_without_drafts() {
        let (mut accepted, mut refused, mut endings) = (0, 0, [0; 3]);
        for round in 0..60_u64 {
            let sequences = || (5 * round..5 * round + 5).map(sequence).collect();
            let plain = run(sequences(), |_, _| Vec::new());
            let mut state = round;
            // What will be said, now and then with a wrong token, and always with some beyond the end.
            let drafted = run(sequences(), |index, so_far| {
                let left = &plain[index].tokens[so_far.tokens.len()..];
                let mut drafts = left.to_vec();
                drafts.extend([STOP, 1, 2]);
                drafts.truncate((next(&mut state) % 7) as usize);
                if next(&mut state).is_multiple_of(3) && !drafts.is_empty() {
                    let place = next(&mut state) as usize % drafts.len();
                    drafts[place] = (next(&mut state) % VOCABULARY as u64) as TokenId;
                    refused += 1;
                }
                drafts
            });
            for (seed, (plain, drafted)) in (5 * round..).zip(plain.iter().zip(&drafted)) {
                assert_eq!(drafted.answer, plain.answer, "seed {seed}");
                accepted += drafted.accepted;
                let last = plain.answer.last().unwrap();
                let is_full = plain.answer.len() == plain.terms.max_new_tokens;
                endings[if last.is_err() {
                    0
                } else {
                    1 + usize::from(is_full)
                }] += 1;
            }
        }
        assert!(accepted > 1000 && refused > 100, "{accepted}, {refused}");
        assert!(endings.iter().all(|&count| count > 10), "{endings:?}");
    }

    /// A sequence with greedy logits whose largest are `tokens` in turn, with the same tokens as drafts: what is sampled.
    fn follow(tokens: &[TokenId], terms: &Terms) -> Vec<Sampled> {
        let logits = tokens.iter().map(|&token| {
            let mut row = vec![0.0; VOCABULARY];
            row[token as usize] = 9.0;
            row[1] += 5.0; // The runner-up.
            row
        });
        let mut logits = Logits(logits.collect());
        let mut batch = Batch::new();
        let row = [&[10, 11][..], &tokens[..tokens.len() - 1]].concat();
        batch.push_row(
            SequenceId::new(0, 0),
            0,
            &row,
            &[Page::new(0)],
            tokens.len(),
        );
        let mut rows = Rows::new(VOCABULARY);
        rows.sample(&batch, &mut logits, |_| Continued {
            terms,
            known: &[10, 11],
            prompt_tokens: 1,
        });
        rows.sampled
    }

    #[test]
    fn a_row_ends_at_a_stop_token_unless_the_output_is_too_short() {
        use Sampled::{Token, Void};
        let mut terms = Terms {
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            min_new_tokens: 0,
            max_new_tokens: 40,
            stop_tokens: vec![STOP],
        };
        assert_eq!(
            follow(&[6, STOP, 7, 8], &terms),
            [Token(6), Token(STOP), Void, Void]
        );
        // One token is known, so the stop token would be the third: it may not be drawn, and the runner-up is no draft.
        terms.min_new_tokens = 3;
        assert_eq!(
            follow(&[6, STOP, 7, 8], &terms),
            [Token(6), Token(1), Void, Void]
        );
        terms.min_new_tokens = 2;
        assert_eq!(
            follow(&[6, STOP, 7, 8], &terms),
            [Token(6), Token(STOP), Void, Void]
        );
        terms.max_new_tokens = 2;
        assert_eq!(follow(&[6, 7, 8], &terms), [Token(6), Void, Void]);
        terms.max_new_tokens = 4;
        assert_eq!(follow(&[6, 7, 8], &terms), [Token(6), Token(7), Token(8)]);
    }
}
