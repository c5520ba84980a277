//! Tests of `mod.rs`.

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
    let mut sampler = BatchSampler::new(VOCABULARY);
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
        sampler.sample(&batch, &mut logits, |id| {
            let index = (0..sequences.len()).find(|&i| SequenceId::new(i as u32, 0) == id);
            let sequence = &sequences[index.expect("a row that wants logits")];
            Continued {
                terms: &sequence.terms,
                known: &sequence.tokens,
                prompt_tokens: sequence.prompt_tokens,
            }
        });
        assert_eq!(sampler.sampled.len(), batch.logits_count());
        take(&batch, &mut sampler, &mut sequences);
    }
    sequences
}

/// What the scheduler does with a step's result: a row's entries count up to the first that was not drafted.
fn take(batch: &Batch, sampler: &mut BatchSampler, sequences: &mut [Sequence]) {
    let mut sampled = sampler.sampled.iter();
    let mut outputs = sampler.outputs.drain(..);
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
    let mut sampler = BatchSampler::new(VOCABULARY);
    sampler.sample(&batch, &mut logits, |_| Continued {
        terms,
        known: &[10, 11],
        prompt_tokens: 1,
    });
    sampler.sampled
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
