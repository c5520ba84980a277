//! Tests of the batch sampler: draft tokens change no answer, and rows end where they must.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sterna_random::Random;
use sterna_scheduler::{PAGE_TOKENS, Page};

use super::*;
use crate::checkpoint::Pooling;
use crate::constraint::ThinkingBudget;
use crate::model::{Deciding, LogitChange, WantedLogits};

const VOCABULARY: usize = 12;
const STOP: TokenId = 3;
/// The maximum length of a sequence.
const MAX_TOKENS: usize = 64;

/// The logits of a step. Each row is a hash of all tokens up to it.
struct HashedLogits(Vec<Vec<f32>>);

impl HashedLogits {
    /// Adds the row after `history`. It has a NaN if the history has `breaks_at` tokens.
    fn push(&mut self, history: &[TokenId], breaks_at: usize) {
        let mut state = 1;
        for &token in history {
            state = Random::new(state).next_u64() ^ u64::from(token);
        }
        let mut random = Random::new(state);
        let mut logit = || random.below(64) as f32 / 16.0;
        let mut row: Vec<f32> = (0..VOCABULARY).map(|_| logit()).collect();
        if history.len() == breaks_at {
            row[5] = f32::NAN;
        }
        self.0.push(row);
    }
}

impl LogitRows for HashedLogits {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        logits.copy_from_slice(&self.0[row]);
    }
}

/// A token, the bits of its log-probability, and the same for the most likely tokens.
type Answer = (TokenId, u32, Vec<(TokenId, u32)>);

struct TestSequence {
    params: SamplingParams,
    rules: OutputRules,
    prompt_tokens: usize,
    tokens: Vec<TokenId>,
    breaks_at: usize,
    answer: Vec<Result<Answer, Unsampleable>>,
    accepted: usize,
    is_over: bool,
}

fn sequence(seed: u64) -> TestSequence {
    let mut random = Random::new(seed);
    let mut one_in = |n: u64| random.below(n) == 0;
    let tokens = (0..6).find(|_| one_in(4)).unwrap_or(6);
    let budget = ThinkingBudget::of_last_tokens(tokens, one_in(2), VOCABULARY as u32);
    let params = SamplingParams {
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
        grammar: None,
        thinking: Some(budget).filter(|_| one_in(3)),
        prompt_logprobs: None,
        unmasking: None,
        pooling: None,
    };
    let rules = OutputRules {
        min_new_tokens: if one_in(2) { 9 } else { 0 },
        max_new_tokens: if one_in(2) { 40 } else { 11 },
        stop_tokens: if one_in(4) { Vec::new() } else { vec![STOP, 8] },
    };
    let breaks_at = if one_in(6) { 17 } else { usize::MAX };
    let prompt_tokens = 1 + random.below(14) as usize;
    let token = |_| random.below(VOCABULARY as u64) as TokenId;
    TestSequence {
        params,
        rules,
        prompt_tokens,
        tokens: (0..prompt_tokens).map(token).collect(),
        breaks_at,
        answer: Vec::new(),
        accepted: 0,
        is_over: false,
    }
}

/// Runs all sequences to their ends, side by side. `draft` proposes the draft tokens of the
/// sequence with an index.
fn run(
    mut sequences: Vec<TestSequence>,
    mut draft: impl FnMut(usize, &TestSequence) -> Vec<TokenId>,
) -> Vec<TestSequence> {
    let mut sampler = BatchSampler::new(VOCABULARY);
    let pages: Vec<Page> = (0..MAX_TOKENS as u32).map(Page::new).collect();
    let table = |end: usize| &pages[..end.div_ceil(PAGE_TOKENS)];
    let mut batch = Batch::new();
    while sequences.iter().any(|sequence| !sequence.is_over) {
        batch.clear();
        let mut logits = HashedLogits(Vec::new());
        for (index, sequence) in sequences.iter().enumerate() {
            let start = sequence.tokens.len() - 1;
            // Beside each sequence, a prompt that wants no logits.
            batch.push_row(SequenceId::new(99, 0), 0, &[1, 2, 3], table(3), 0);
            if !sequence.is_over {
                let drafts = draft(index, sequence);
                let mut history = sequence.tokens.clone();
                logits.push(&history, sequence.breaks_at);
                for &token in &drafts {
                    history.push(token);
                    logits.push(&history, sequence.breaks_at);
                }
                // The end of a prompt looks like a decode, except for the tokens before it.
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
        let draws = sampler.sample(&batch, &mut logits, |id| {
            let index = (0..sequences.len()).find(|&i| SequenceId::new(i as u32, 0) == id);
            let sequence = &sequences[index.expect("a row that wants logits")];
            Continuation {
                params: &sequence.params,
                rules: &sequence.rules,
                known: &sequence.tokens,
                ahead: &[],
                prompt_tokens: sequence.prompt_tokens,
                masks: None,
            }
        });
        assert_eq!(draws.len(), batch.logits_count());
        commit(&batch, draws, &mut sequences);
    }
    sequences
}

/// Commits a step as the scheduler does: a row's draws count up to the first one that differs from
/// its draft token.
fn commit(batch: &Batch, draws: &[Draw], sequences: &mut [TestSequence]) {
    let mut draws = draws.iter();
    for row in batch.rows().iter().filter(|row| row.logits > 0) {
        let index = (0..).find(|&i| SequenceId::new(i, 0) == row.sequence);
        let sequence = &mut sequences[index.unwrap() as usize];
        let drafts = batch.tokens(row)[row.len() + 1 - row.logits as usize..].iter();
        let mut counts = true;
        for (place, draft) in drafts.map(Some).chain([None]).enumerate() {
            let draw = draws.next().unwrap();
            assert_eq!(draw.sequence, row.sequence);
            if !counts {
                assert_eq!(draw.outcome, DrawOutcome::Void);
                continue;
            }
            sequence.accepted += usize::from(place > 0);
            let answer = match &draw.outcome {
                DrawOutcome::Void
                | DrawOutcome::Deferred
                | DrawOutcome::Scored(_)
                | DrawOutcome::Unmasked { .. }
                | DrawOutcome::State { .. } => {
                    panic!("a draw is due")
                }
                DrawOutcome::Failed(error) => {
                    sequence.is_over = true;
                    Err(*error)
                }
                DrawOutcome::Token(output) => {
                    sequence.tokens.push(output.token);
                    let len = sequence.tokens.len() - sequence.prompt_tokens;
                    let stops = sequence.rules.stop_tokens.contains(&output.token)
                        && len >= sequence.rules.min_new_tokens;
                    sequence.is_over = stops || len == sequence.rules.max_new_tokens;
                    counts = draft == Some(&output.token);
                    let bits = |(token, logprob): &(TokenId, f32)| (*token, logprob.to_bits());
                    let top = output.top.iter().map(bits).collect();
                    Ok((output.token, output.logprob.unwrap().to_bits(), top))
                }
            };
            counts &= !sequence.is_over;
            sequence.answer.push(answer);
        }
    }
    assert!(draws.next().is_none(), "each row of logits has one draw");
}

#[test]
fn tokens_and_logprob_bits_are_equal_with_and_without_drafts() {
    let (mut accepted, mut wrong, mut endings) = (0, 0, [0; 3]);
    for round in 0..60_u64 {
        let sequences = || (5 * round..5 * round + 5).map(sequence).collect();
        let plain = run(sequences(), |_, _| Vec::new());
        let mut random = Random::new(round);
        // The right tokens, some beyond the end, and sometimes a wrong one.
        let drafted = run(sequences(), |index, so_far| {
            let left = &plain[index].tokens[so_far.tokens.len()..];
            let mut drafts = left.to_vec();
            drafts.extend([STOP, 1, 2]);
            drafts.truncate(random.below(7) as usize);
            if random.below(3) == 0 && !drafts.is_empty() {
                let place = random.index(drafts.len());
                drafts[place] = random.below(VOCABULARY as u64) as TokenId;
                wrong += 1;
            }
            drafts
        });
        for (seed, (plain, drafted)) in (5 * round..).zip(plain.iter().zip(&drafted)) {
            assert_eq!(drafted.answer, plain.answer, "seed {seed}");
            accepted += drafted.accepted;
            let last = plain.answer.last().unwrap();
            let is_full = plain.answer.len() == plain.rules.max_new_tokens;
            endings[if last.is_err() {
                0
            } else {
                1 + usize::from(is_full)
            }] += 1;
        }
    }
    assert!(accepted > 1000 && wrong > 100, "{accepted}, {wrong}");
    assert!(endings.iter().all(|&count| count > 10), "{endings:?}");
}

/// Returns what a greedy sequence samples if `tokens` have the largest logits in turn, and are its
/// draft tokens too.
fn sample_drafted(tokens: &[TokenId], rules: &OutputRules) -> Vec<Sampled> {
    let logits = tokens.iter().map(|&token| {
        let mut row = vec![0.0; VOCABULARY];
        row[token as usize] = 9.0;
        row[1] += 5.0; // The second most likely token.
        row
    });
    let mut logits = HashedLogits(logits.collect());
    let mut batch = Batch::new();
    let row = [&[10, 11][..], &tokens[..tokens.len() - 1]].concat();
    let pages = [Page::new(0)];
    batch.push_row(SequenceId::new(0, 0), 0, &row, &pages, tokens.len());
    let mut sampler = BatchSampler::new(VOCABULARY);
    let params = SamplingParams::greedy();
    let draws = sampler.sample(&batch, &mut logits, |_| Continuation {
        params: &params,
        rules,
        known: &[10, 11],
        ahead: &[],
        prompt_tokens: 1,
        masks: None,
    });
    draws.iter().map(Draw::sampled).collect()
}

#[test]
fn a_panic_while_tokens_are_counted_changes_no_later_draw() {
    let params = SamplingParams {
        frequency_penalty: 2.0,
        ..SamplingParams::greedy()
    };
    let rules = OutputRules {
        max_new_tokens: 40,
        ..OutputRules::default()
    };
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 3, &[5], &[Page::new(0)], 1);
    let draw = |sampler: &mut BatchSampler, known: &[TokenId]| {
        let mut row = vec![0.0; VOCABULARY];
        (row[5], row[6]) = (6.0, 9.0);
        let mut logits = HashedLogits(vec![row]);
        let draws = sampler.sample(&batch, &mut logits, |_| Continuation {
            params: &params,
            rules: &rules,
            known,
            ahead: &[],
            prompt_tokens: 1,
            masks: None,
        });
        draws.iter().map(Draw::sampled).collect::<Vec<_>>()
    };
    let mut sampler = BatchSampler::new(VOCABULARY);
    let unknown_token = VOCABULARY as TokenId;
    let panics = AssertUnwindSafe(|| draw(&mut sampler, &[1, 6, 6, unknown_token]));
    assert!(catch_unwind(panics).is_err(), "the token cannot be counted");
    assert_eq!(draw(&mut sampler, &[1, 2, 3, 6]), [Sampled::Token(6)]);
}

#[test]
fn a_row_ends_at_a_stop_token_unless_the_output_is_too_short() {
    use Sampled::{Token, Void};
    let mut rules = OutputRules {
        min_new_tokens: 0,
        max_new_tokens: 40,
        stop_tokens: vec![STOP],
    };
    assert_eq!(
        sample_drafted(&[6, STOP, 7, 8], &rules),
        [Token(6), Token(STOP), Void, Void]
    );
    // The output has one token already, so the stop token would be the third. It is forbidden, and
    // the second most likely token is not the draft token.
    rules.min_new_tokens = 3;
    assert_eq!(
        sample_drafted(&[6, STOP, 7, 8], &rules),
        [Token(6), Token(1), Void, Void]
    );
    rules.min_new_tokens = 2;
    assert_eq!(
        sample_drafted(&[6, STOP, 7, 8], &rules),
        [Token(6), Token(STOP), Void, Void]
    );
    rules.max_new_tokens = 2;
    assert_eq!(sample_drafted(&[6, 7, 8], &rules), [Token(6), Void, Void]);
    rules.max_new_tokens = 4;
    assert_eq!(
        sample_drafted(&[6, 7, 8], &rules),
        [Token(6), Token(7), Token(8)]
    );
}

/// Logits of which several threads may take rows; here they take turns.
struct SharedLogits {
    rows: HashedLogits,
    workers: usize,
}

impl LogitRows for SharedLogits {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        self.rows.copy_row(row, logits);
    }

    fn workers(&self) -> usize {
        self.workers
    }
}

#[test]
fn the_scores_of_a_prompt_do_not_depend_on_the_worker_and_nothing_follows_a_failure() {
    const PROMPT: [TokenId; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let params = SamplingParams {
        prompt_logprobs: Some(2),
        ..SamplingParams::greedy()
    };
    let rules = OutputRules {
        max_new_tokens: 4,
        ..OutputRules::default()
    };
    let pages = [Page::new(0)];
    let mut batch = Batch::new();
    for (id, start, end, logits) in [
        (0, 0, 9, 9), // A whole prompt.
        (1, 0, 6, 0), // A part of one that is not scored.
        (2, 0, 5, 4), // A part of one whose first token was scored before.
        (3, 8, 9, 1), // A decode.
    ] {
        let tokens = &PROMPT[start..end];
        batch.push_row(SequenceId::new(id, 0), start, tokens, &pages, logits);
    }
    let run = |workers: usize, breaks_at: usize| {
        let mut rows = HashedLogits(Vec::new());
        for row in batch.rows() {
            for position in row.end() - row.logits as usize..row.end() {
                rows.push(&PROMPT[..=position], breaks_at);
            }
        }
        let mut logits = SharedLogits { rows, workers };
        let mut sampler = BatchSampler::new(VOCABULARY);
        let draws = sampler.sample(&batch, &mut logits, |_| Continuation {
            params: &params,
            rules: &rules,
            known: &PROMPT,
            ahead: &[],
            prompt_tokens: 9,
            masks: None,
        });
        draws.to_vec()
    };
    let alone = run(1, usize::MAX);
    let kind = |draw: &Draw| match &draw.outcome {
        DrawOutcome::Scored(score) => Some(score.token),
        DrawOutcome::Token(_) => None,
        other => panic!("{other:?}"),
    };
    let scored = [2, 3, 4, 5, 6, 7, 8, 9].map(Some).into_iter().chain([None]);
    let scored: Vec<_> = scored.chain([3, 4, 5, 6].map(Some)).chain([None]).collect();
    assert_eq!(alone.iter().map(kind).collect::<Vec<_>>(), scored);
    let broken = run(1, 4);
    for (place, (draw, free)) in broken.iter().zip(&alone).enumerate() {
        match place {
            3 | 11 => assert_eq!(draw.outcome, DrawOutcome::Failed(Unsampleable::NotFinite)),
            4..9 | 12 => assert_eq!(draw.outcome, DrawOutcome::Void),
            _ => assert_eq!(draw, free),
        }
    }
    for workers in 2..17 {
        assert_eq!(run(workers, usize::MAX), alone, "{workers} workers");
        assert_eq!(run(workers, 4), broken, "{workers} workers");
    }
}

/// Returns the logits that the step of one token after `known` needs.
fn needed_after(known: &[TokenId], change: impl FnOnce(&mut SamplingParams)) -> WantedLogits {
    needed_with(known, &[], change)
}

/// Returns the logits that the step of the last of the tokens `known` and of `drafts` needs.
fn needed_with(
    known: &[TokenId],
    drafts: &[TokenId],
    change: impl FnOnce(&mut SamplingParams),
) -> WantedLogits {
    let mut params = SamplingParams::greedy();
    change(&mut params);
    let rules = OutputRules {
        stop_tokens: vec![STOP, 7],
        min_new_tokens: 2,
        ..OutputRules::default()
    };
    let mut batch = Batch::new();
    let start = known.len() - 1;
    let tokens = [&known[start..], drafts].concat();
    let (pages, logits) = ([Page::new(0)], tokens.len());
    batch.push_row(SequenceId::new(0, 0), start, &tokens, &pages, logits);
    let continuation = |_| Continuation {
        params: &params,
        rules: &rules,
        known,
        ahead: &[],
        prompt_tokens: 2,
        masks: None,
    };
    let mut deciding = DecidingLogits::new(VOCABULARY);
    deciding.of(&batch, continuation).clone()
}

/// A draw from many tokens wants the logits that decide it, at its position.
fn check_draws(known: &[TokenId]) {
    let random = |params: &mut SamplingParams| (params.temperature, params.seed) = (0.8, 3);
    let filtered = |params: &mut SamplingParams| {
        random(params);
        (params.top_p, params.min_p) = (0.9, 0.1);
    };
    let draw_of = |needed: &WantedLogits| match needed.tokens().collect::<Vec<_>>()[..] {
        [(Deciding::Draw(draw), [])] => *draw,
        _ => panic!("{needed:?}"),
    };
    let draw = draw_of(&needed_after(known, random));
    assert_eq!((draw.temperature, draw.top_k), (0.8, 0));
    assert_eq!((draw.top_p, draw.min_p), (1.0, 0.0));
    let other = draw_of(&needed_after(known, filtered));
    assert_eq!((other.top_p, other.min_p), (0.9, 0.1));
    assert_eq!(other.noise, draw.noise, "the same seed and position");
    let later = [known, &[6]].concat();
    assert_ne!(draw_of(&needed_after(&later, random)).noise, draw.noise);
    // Each draft token has a draw of its own, whose penalties count the draft tokens before.
    let penalized = |params: &mut SamplingParams| {
        random(params);
        params.presence_penalty = 0.5;
    };
    let drafted = needed_with(known, &[6, 8], penalized);
    for (place, of_place) in drafted.tokens().enumerate() {
        let alone = needed_after(&[known, &[6, 8][..place]].concat(), penalized);
        assert_eq!(Some(of_place), alone.tokens().next());
    }
    assert_eq!(drafted.tokens().len(), 3);
    let many = |params: &mut SamplingParams| {
        random(params);
        params.top_k = 65;
    };
    assert_eq!(draw_of(&needed_after(known, many)).top_k, 65);
    let changed = needed_after(known, |params| {
        random(params);
        params.logit_bias = vec![(9, 2.0)];
        params.repetition_penalty = 1.5;
        (params.frequency_penalty, params.presence_penalty) = (0.25, 0.5);
    });
    let [(Deciding::Draw(_), changes)] = changed.tokens().collect::<Vec<_>>()[..] else {
        panic!("{changed:?}");
    };
    let change = |token, bias, penalty, minus| LogitChange {
        token,
        bias,
        penalty,
        minus,
    };
    let prompt = [change(1, 0.0, 1.5, 0.0), change(2, 0.0, 1.5, 0.0)];
    let output = [change(4, 0.0, 1.5, 0.75), change(5, 0.0, 1.5, 0.75)];
    let expected = [&[change(9, 2.0, 1.0, 0.0)], &prompt[..], &output].concat();
    assert_eq!(changes, expected);
}

#[test]
fn a_step_wants_few_logits_if_its_draws_need_no_others() {
    let known = [1, 2, 4, 5];
    let largest = |count, forbidden: &[TokenId]| {
        let forbidden = forbidden.iter().map(|token| LogitChange {
            token: *token,
            bias: f32::NEG_INFINITY,
            penalty: 1.0,
            minus: 0.0,
        });
        let mut wanted = WantedLogits::default();
        wanted.push(Deciding::Largest(count), &forbidden.collect::<Vec<_>>());
        wanted
    };
    assert_eq!(needed_after(&known, |_| {}), largest(1, &[]));
    let top_k = |params: &mut SamplingParams| (params.temperature, params.top_k) = (0.8, 5);
    assert_eq!(needed_after(&known, top_k), largest(5, &[]));
    // A minimum length forbids both stop tokens.
    assert_eq!(needed_after(&known[..3], top_k), largest(5, &[STOP, 7]));
    check_draws(&known);
    let changes: [fn(&mut SamplingParams); 3] = [
        |params| params.logprobs = Some(0),
        |params| params.pooling = Some(Pooling::LastToken),
        |params| (params.temperature, params.top_k, params.top_p) = (0.8, 65, 0.9),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        assert!(needed_after(&known, change).is_all(), "change {index}");
    }
    // The token after the first of the prompt is known, so it is scored.
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 0, &[1, 2], &[Page::new(0)], 2);
    let (params, rules) = (SamplingParams::greedy(), OutputRules::default());
    let continuation = |_| Continuation {
        params: &params,
        rules: &rules,
        known: &[1, 2],
        ahead: &[],
        prompt_tokens: 2,
        masks: None,
    };
    let mut deciding = DecidingLogits::new(VOCABULARY);
    assert!(deciding.of(&batch, continuation).is_all());
}
