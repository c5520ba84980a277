//! Tests of the sampler: filters, penalties, log-probabilities and the distribution of draws.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sterna_kernels::DrawNoise;
use sterna_random::{GOLDEN, mix};

use super::*;

const FORBID: f32 = f32::NEG_INFINITY;

fn sampler(vocabulary: usize) -> Sampler {
    Sampler::new(Kernels::best(), vocabulary)
}

fn at(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        ..SamplingParams::default()
    }
}

fn output(
    logits: &[f32],
    params: &SamplingParams,
    history: &[TokenId],
    prompt_tokens: usize,
) -> TokenOutput {
    let draw = DrawContext {
        params,
        history,
        prompt_tokens,
        forbidden: &[],
        mask: None,
    };
    sampler(logits.len()).sample(logits, &draw).unwrap()
}

/// Returns the token after a prompt of one token.
fn token(logits: &[f32], params: &SamplingParams) -> TokenId {
    output(logits, params, &[0], 1).token
}

/// Returns how often each token is drawn, over `draws` seeds.
fn histogram(logits: &[f32], params: &SamplingParams, draws: u64) -> Vec<u32> {
    let mut counts = vec![0; logits.len()];
    for seed in 0..draws {
        counts[token(
            logits,
            &SamplingParams {
                seed,
                ..params.clone()
            },
        ) as usize] += 1;
    }
    counts
}

/// Returns a pseudo-random number in 0..1.
fn uniform(seed: u64, index: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(index.wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// Returns pseudo-random logits with many ties.
fn row(seed: u64, length: u64) -> Vec<f32> {
    (0..length)
        .map(|i| (uniform(seed, i) * 40.0).round() as f32 / 4.0 - 5.0)
        .collect()
}

#[test]
fn greedy_takes_the_largest_logit_and_the_lowest_id_on_a_tie() {
    assert_eq!(token(&[1.0, 3.0, 3.0, -9.0], &at(0.0)), 1);
    assert_eq!(token(&[-5.0, -4.0, -4.0], &at(0.0)), 1);
    assert_eq!(token(&[f32::MIN, f32::MIN], &at(0.0)), 0);
}

#[test]
fn parameters_that_keep_one_token_are_greedy() {
    let logits = row(3, 500);
    let greedy = token(&logits, &at(0.0));
    for seed in 0..50 {
        let params = SamplingParams { seed, ..at(1.5) };
        assert_eq!(
            token(
                &logits,
                &SamplingParams {
                    top_k: 1,
                    ..params.clone()
                }
            ),
            greedy
        );
        assert_eq!(
            token(
                &logits,
                &SamplingParams {
                    top_p: 1e-9,
                    ..params.clone()
                }
            ),
            greedy
        );
        assert_eq!(
            token(
                &logits,
                &SamplingParams {
                    top_p: 0.0,
                    ..params.clone()
                }
            ),
            greedy
        );
    }
    let distinct: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32).collect();
    for seed in 0..50 {
        for temperature in [1e-6, f32::MIN_POSITIVE, 1e-45] {
            let params = SamplingParams {
                seed,
                ..at(temperature)
            };
            assert_eq!(token(&distinct, &params), token(&distinct, &at(0.0)));
        }
        let params = SamplingParams {
            seed,
            min_p: 1.0,
            ..at(1.0)
        };
        assert_eq!(token(&distinct, &params), token(&distinct, &at(0.0)));
    }
}

#[test]
fn bias_can_leave_one_token_or_none() {
    let logits = [4.0, 2.0, 1.0, 0.0];
    let mut params = at(1.0);
    params.logit_bias = vec![(0, FORBID), (1, FORBID), (3, FORBID)];
    for seed in 0..20 {
        params.seed = seed;
        assert_eq!(token(&logits, &params), 2);
    }
    params.logit_bias.push((2, FORBID));
    let draw = DrawContext {
        params: &params,
        history: &[0],
        prompt_tokens: 1,
        forbidden: &[],
        mask: None,
    };
    let result = sampler(4).sample(&logits, &draw);
    assert_eq!(result, Err(Unsampleable::NothingAllowed));
    let greedy = SamplingParams {
        logit_bias: vec![(3, 100.0)],
        ..at(0.0)
    };
    assert_eq!(token(&logits, &greedy), 3);
}

#[test]
fn no_token_is_drawn_from_logits_that_are_not_finite() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let params = at(1.0);
        let draw = DrawContext {
            params: &params,
            history: &[0],
            prompt_tokens: 1,
            forbidden: &[],
            mask: None,
        };
        let result = sampler(3).sample(&[1.0, bad, 2.0], &draw);
        assert_eq!(result, Err(Unsampleable::NotFinite), "{bad}");
    }
}

#[test]
fn forbidden_tokens_are_not_drawn() {
    let draw = DrawContext {
        params: &at(0.0),
        history: &[0],
        prompt_tokens: 1,
        forbidden: &[1, 1],
        mask: None,
    };
    let output = sampler(3).sample(&[1.0, 9.0, 2.0], &draw).unwrap();
    assert_eq!(output.token, 2);
}

#[test]
fn repetition_counts_distinct_tokens_of_prompt_and_output() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        ..at(0.0)
    };
    // 3.0 / 2 = 1.5, however often token 0 occurs. A negative logit moves away from zero.
    assert_eq!(
        output(&[3.0, 1.4, -1.0], &params, &[0, 0, 0, 2], 1).token,
        0
    );
    assert_eq!(
        output(&[3.0, 1.6, -1.0], &params, &[0, 0, 0, 2], 4).token,
        1
    );
    assert_eq!(output(&[-1.0, -1.5], &params, &[0], 1).token, 1);
}

#[test]
fn frequency_and_presence_count_output_only() {
    let frequency = SamplingParams {
        frequency_penalty: 1.0,
        ..at(0.0)
    };
    let presence = SamplingParams {
        presence_penalty: 1.5,
        ..at(0.0)
    };
    let logits = [3.0, 1.2];
    assert_eq!(output(&logits, &frequency, &[0, 0, 0], 3).token, 0);
    assert_eq!(output(&logits, &frequency, &[0, 0, 0], 2).token, 0);
    assert_eq!(output(&logits, &frequency, &[0, 0, 0], 1).token, 1);
    assert_eq!(output(&logits, &presence, &[0, 0, 0], 1).token, 0);
    let presence = SamplingParams {
        presence_penalty: 2.0,
        ..at(0.0)
    };
    assert_eq!(output(&logits, &presence, &[0, 0, 0], 1).token, 1);
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let logits = row(1, 300);
    let params = SamplingParams {
        seed: 42,
        logprobs: Some(3),
        ..at(1.0)
    };
    let mut sampler = sampler(300);
    let first = output(&logits, &params, &[5, 6, 7], 1);
    for other in 0..20 {
        let noise = SamplingParams {
            repetition_penalty: 1.3,
            seed: other,
            ..at(0.7)
        };
        let history = [1, 2, 3, 4];
        let draw = DrawContext {
            params: &noise,
            history: &history,
            prompt_tokens: 2,
            forbidden: &[9],
            mask: None,
        };
        sampler.sample(&row(other, 300), &draw).unwrap();
        // Other tokens in a history of the same length, no penalties: the same draw.
        let draw = DrawContext {
            params: &params,
            history: &[8, 8, 8],
            prompt_tokens: 2,
            forbidden: &[],
            mask: None,
        };
        assert_eq!(sampler.sample(&logits, &draw).unwrap(), first);
    }
    let at_positions: Vec<_> = (1..30)
        .map(|n| output(&logits, &params, &vec![0; n], 1).token)
        .collect();
    assert!(at_positions.iter().any(|token| *token != at_positions[0]));
}

/// Seeded answers must stay the same from one version to the next.
#[test]
fn the_random_numbers_of_seeds_positions_and_tokens_are_fixed() {
    let draws = [(0, 0, 0), (42, 7, 128_000), (u64::MAX, 1000, 5)];
    let bits = draws.map(|(seed, position, token)| noise(seed, position).of(token).to_bits());
    assert_eq!(bits, [1_076_579_163, 1_059_738_353, 3_193_005_469]);
}

/// The numbers of two tokens of one draw, and of one token in two draws, are independent: no
/// difference between the first eight bits of their places in the distribution is more frequent.
#[test]
fn the_random_numbers_of_two_tokens_or_draws_are_independent() {
    const BINS: usize = 256;
    const EACH: u64 = 400;
    let place = |noise: DrawNoise, token: u64| {
        let number = f64::from(noise.of(token as TokenId));
        ((-(-number).exp()).exp() * BINS as f64) as usize
    };
    for distance in [1, 2, 256, 768, 1024, 3072, 4096, 1 << 14, 1 << 16] {
        for axis in 0..4 {
            let mut differences = [0_u32; BINS];
            for i in 0..EACH * BINS as u64 {
                let [first, second] = [0, distance].map(|add| match axis {
                    0 => place(noise(i + add, 7), 100),
                    1 => place(noise(7, i + add), 100),
                    2 => place(noise(7, 100), i + add),
                    _ => place(noise(7, i), 100 + add),
                });
                differences[first ^ second] += 1;
            }
            let each = EACH as f64;
            let square = |n: &u32| (f64::from(*n) - each).powi(2) / each;
            let chi_square: f64 = differences.iter().map(square).sum();
            assert!(
                chi_square < 350.0,
                "255 degrees of freedom, p < 0.0001: {chi_square}, axis {axis}, {distance}"
            );
        }
    }
}

/// Each of many equal tokens is drawn as often as the others, wherever it is in the row.
#[test]
fn equal_tokens_are_drawn_equally_often() {
    for tokens in [7_usize, 64, 1000] {
        let (logits, each) = (vec![0.5; tokens], 200_000 / tokens as u64);
        let counts = histogram(&logits, &at(1.0), each * tokens as u64);
        let each = each as f64;
        let square = |n: &u32| (f64::from(*n) - each).powi(2) / each;
        let chi_square: f64 = counts.iter().map(square).sum();
        // A chi-square of many degrees of freedom is about normal.
        let degrees = tokens as f64 - 1.0;
        let deviations = (chi_square - degrees) / (2.0 * degrees).sqrt();
        assert!(deviations < 4.0, "{tokens} tokens: {deviations} deviations");
    }
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [2.0_f32, 1.0, 0.0, -1.0, 1.0];
    for temperature in [0.5, 1.0, 2.0] {
        let weights: Vec<f64> = logits
            .iter()
            .map(|l| f64::from(l / temperature).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let counts = histogram(&logits, &at(temperature), 20_000);
        let chi_square: f64 = weights
            .iter()
            .zip(&counts)
            .map(|(w, &n)| {
                let expected = w / total * 20_000.0;
                (f64::from(n) - expected).powi(2) / expected
            })
            .sum();
        assert!(
            chi_square < 20.0,
            "4 degrees of freedom, p < 0.0005: {chi_square}"
        );
    }
}

#[test]
fn filters_keep_exactly_the_likely_tokens() {
    // The tokens 2, 0, 3, 1 have the probabilities 0.4, 0.3, 0.2, 0.1.
    let logits = [0.3_f32.ln(), 0.1_f32.ln(), 0.4_f32.ln(), 0.2_f32.ln()];
    let check = |top_k: u32, top_p: f32, min_p: f32, expected: &[usize]| {
        let params = SamplingParams {
            top_k,
            top_p,
            min_p,
            ..at(1.0)
        };
        let counts = histogram(&logits, &params, 2000);
        let drawn: Vec<usize> = (0..4).filter(|&token| counts[token] > 0).collect();
        assert_eq!(drawn, expected, "{params:?}");
    };
    check(0, 1.0, 0.0, &[0, 1, 2, 3]);
    check(2, 1.0, 0.0, &[0, 2]);
    check(99, 1.0, 0.0, &[0, 1, 2, 3]);
    check(0, 0.35, 0.0, &[2]);
    check(0, 0.65, 0.0, &[0, 2]);
    check(0, 0.85, 0.0, &[0, 2, 3]);
    check(0, 1.0, 0.45, &[0, 2, 3]);
    check(0, 1.0, 0.6, &[0, 2]);
    check(3, 0.85, 0.6, &[0, 2]);
    // top-p refers to the tokens that top-k keeps: 0.4 is more than half of 0.4 + 0.3.
    check(2, 0.5, 0.0, &[2]);
    check(3, 0.5, 0.0, &[0, 2]);
}

/// Draws by the definition: sort all tokens, apply top-k, top-p and min-p, take the best score.
fn draw_by_sorting(logits: &[f32], params: &SamplingParams) -> TokenId {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = sterna_kernels::LogitScale {
        largest: max,
        inverse_temperature: (1.0 / params.temperature).min(f32::MAX),
    };
    let mut all: Vec<Rank> = (0..)
        .zip(logits)
        .map(|(token, &logit)| Rank { logit, token })
        .collect();
    all.sort_by(likelier_first);
    if params.top_k > 0 {
        all.truncate(params.top_k as usize);
    }
    let weight = |rank: &Rank| scale.weight(rank.logit);
    if params.top_p < 1.0 {
        let mass: f64 = all.iter().map(|rank| f64::from(weight(rank))).sum();
        let (nucleus, mut sum) = (mass * f64::from(params.top_p), 0.0);
        all.retain(|rank| {
            let before = sum;
            sum += f64::from(weight(rank));
            before == 0.0 || before < nucleus
        });
    }
    all.retain(|rank| weight(rank) >= params.min_p);
    all.sort_by_key(|rank| rank.token);
    let noise = noise(params.seed, 1);
    let scores = sterna_kernels::DrawScores { scale, noise };
    let mut best = (f32::NEG_INFINITY, 0);
    for Rank { logit, token } in all {
        let score = scores.of(logit, token);
        if score > best.0 {
            best = (score, token);
        }
    }
    best.1
}

#[test]
fn top_p_agrees_with_a_full_sort() {
    for seed in 0..400 {
        let params = SamplingParams {
            seed,
            top_p: 0.3 + (seed % 7) as f32 / 10.0,
            min_p: if seed % 3 == 0 { 0.05 } else { 0.0 },
            ..at(0.8)
        };
        // Rows with many, few and no ties; shorter than a block, of whole blocks, and with a tail.
        let length = [20, 256, 700, 5000, 5120][seed as usize % 5];
        let tied = row(seed, length);
        let flat: Vec<f32> = (0..length).map(|i| uniform(seed, i) as f32).collect();
        let peaked: Vec<f32> = flat.iter().map(|x| -30.0 * (1.0 - x).ln()).collect();
        for logits in [tied, flat, peaked, vec![1.5; length as usize]] {
            let expected = draw_by_sorting(&logits, &params);
            assert_eq!(
                token(&logits, &params),
                expected,
                "seed {seed}, {length} tokens"
            );
        }
    }
}

#[test]
fn top_k_agrees_with_a_full_sort() {
    const LENGTH: u64 = 20_000;
    for seed in 0..60 {
        let tied = row(seed, LENGTH);
        let flat: Vec<f32> = (0..LENGTH).map(|i| uniform(seed, i) as f32).collect();
        let peaked: Vec<f32> = flat.iter().map(|x| -30.0 * (1.0 - x).ln()).collect();
        let mut outlier = flat.clone();
        outlier[777] = 1e4;
        let mut few_allowed = vec![FORBID; LENGTH as usize];
        (0..50).for_each(|i| few_allowed[i * 300] = flat[i]);
        let equal = vec![1.5; LENGTH as usize];
        let rows = [tied, flat, peaked, outlier, few_allowed, equal];
        for (index, logits) in rows.iter().enumerate() {
            let params = SamplingParams {
                seed,
                top_k: [2, 50, 2500, 15_000, 19_999][seed as usize % 5],
                top_p: [1.0, 0.9, 0.3, 0.999, 0.0][seed as usize / 5 % 5],
                min_p: [0.0, 0.05, 0.7][seed as usize % 3],
                ..at([0.8, 1e-3, 1e6, 2.0][seed as usize % 4])
            };
            let mut sampler = sampler(logits.len());
            let scan = scan(Kernels::best(), logits, &mut sampler.peaks);
            let context = DrawContext {
                params: &params,
                history: &[0],
                prompt_tokens: 1,
                forbidden: &[],
                mask: None,
            };
            assert_eq!(
                sampler.choose(logits, &scan, &context),
                Ok(draw_by_sorting(logits, &params)),
                "row {index}, {params:?}"
            );
        }
    }
}

#[test]
fn the_largest_logits_are_those_of_a_full_sort() {
    for seed in 0..50 {
        let logits = row(seed, 1000);
        let mut order: Vec<TokenId> = (0..1000).collect();
        order.sort_by(|&a, &b| {
            logits[b as usize]
                .total_cmp(&logits[a as usize])
                .then(a.cmp(&b))
        });
        for count in [0, 1, 2, 15, 16, 17, 64, 300, 1000] {
            let (mut found, mut peaks) = (Vec::new(), Vec::new());
            let scan = scan(Kernels::best(), &logits, &mut peaks);
            let row = ScannedRow {
                kernels: Kernels::best(),
                logits: &logits,
                peaks: &peaks,
                max: scan.max,
            };
            row.largest(count, &mut found);
            found.sort_by(likelier_first);
            let found: Vec<TokenId> = found.iter().map(|rank| rank.token).collect();
            assert_eq!(found, order[..count], "seed {seed}, {count}");
        }
    }
}

#[test]
fn logprobs_ignore_bias_penalties_and_temperature() {
    let logits = [1.0, 2.0, 0.5, 2.0];
    let params = SamplingParams {
        logprobs: Some(3),
        logit_bias: vec![(2, 50.0)],
        repetition_penalty: 1.7,
        presence_penalty: 0.5,
        ..at(3.0)
    };
    let found = output(&logits, &params, &[0, 1, 3], 1);
    let normalizer = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
    let expected = |token: usize| (f64::from(logits[token]) - normalizer) as f32;
    assert_eq!(found.token, 2);
    assert!((found.logprob.unwrap() - expected(2)).abs() < 1e-6);
    let tokens: Vec<TokenId> = found.top.iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [1, 3, 0], "ties by the lowest id");
    assert!((found.top[0].1 - expected(1)).abs() < 1e-6);

    let only_chosen = SamplingParams {
        logprobs: Some(0),
        ..at(0.0)
    };
    let found = output(&logits, &only_chosen, &[0], 1);
    assert!(found.logprob.is_some() && found.top.is_empty());
    let more_than_all = SamplingParams {
        logprobs: Some(20),
        ..at(0.0)
    };
    assert_eq!(output(&logits, &more_than_all, &[0], 1).top.len(), 4);
    assert_eq!(output(&logits, &at(0.0), &[0], 1).logprob, None);
}

#[test]
fn huge_and_tiny_logits_stay_finite() {
    let logits = [f32::MAX, f32::MIN, 0.0, f32::MAX];
    let params = SamplingParams {
        logprobs: Some(4),
        ..at(1.0)
    };
    let found = output(&logits, &params, &[0], 1);
    assert!(found.token == 0 || found.token == 3);
    assert!((found.logprob.unwrap() + std::f32::consts::LN_2).abs() < 1e-6);
}

#[test]
fn a_mask_forbids_exactly_what_it_does_not_allow() {
    use std::sync::atomic::AtomicU32;
    for seed in 0..200 {
        let length = [20, 64, 700, 5000][seed as usize % 4];
        let logits = row(seed, length);
        let words = (0..length.div_ceil(32)).map(|word| match (seed + word) % 5 {
            0 => 0,
            1 => u32::MAX,
            _ => mix(seed ^ word << 20) as u32,
        });
        let mut words: Vec<u32> = words.collect();
        words[0] |= 1; // Something is allowed.
        let is_allowed = |token: u64| words[token as usize / 32] >> (token % 32) & 1 == 1;
        let allowed: Vec<AtomicU32> = words.iter().map(|word| AtomicU32::new(*word)).collect();
        let forbidden = (0..length).filter(|token| !is_allowed(*token));
        let params = SamplingParams {
            seed,
            top_k: [0, 5, 4000][seed as usize % 3],
            top_p: if seed % 2 == 0 { 0.9 } else { 1.0 },
            repetition_penalty: if seed % 7 == 0 { 1.3 } else { 1.0 },
            logprobs: Some(3),
            ..at((seed % 4) as f32 / 2.0)
        };
        let biased = SamplingParams {
            logit_bias: forbidden.map(|token| (token as TokenId, FORBID)).collect(),
            ..params.clone()
        };
        let draw = |params, mask| {
            let context = DrawContext {
                params,
                history: &[0],
                prompt_tokens: 1,
                forbidden: &[],
                mask,
            };
            sampler(logits.len()).sample(&logits, &context).unwrap()
        };
        let masked = draw(&params, Some(Mask::Allowed(&allowed)));
        assert!(is_allowed(masked.token.into()));
        assert_eq!(masked, draw(&biased, None), "seed {seed}");
        let only = draw(&params, Some(Mask::Only(7)));
        assert_eq!(only.token, 7);
        assert_eq!(
            only.top, masked.top,
            "log-probabilities are those before the mask"
        );
    }
}

/// The engine computes the changes before a step, so one with a bad token must not spoil the next.
#[test]
fn changes_after_a_panic_are_those_of_the_request() {
    let params = SamplingParams {
        presence_penalty: 0.5,
        ..at(0.0)
    };
    let context = |history| DrawContext {
        params: &params,
        history,
        prompt_tokens: 0,
        forbidden: &[],
        mask: None,
    };
    let mut changes = LogitChanges::new(10);
    let unknown = AssertUnwindSafe(|| changes.of(&context(&[1, 2, 10])).len());
    assert!(catch_unwind(unknown).is_err(), "there is no token 10");
    let expected = LogitChanges::new(10).of(&context(&[3, 2])).to_vec();
    assert_eq!(changes.of(&context(&[3, 2])), expected);
}

/// A model may leave the other logits out, so that no draw may depend on them.
#[test]
fn a_draw_needs_only_the_logits_that_it_says() {
    let mut left_out = 0;
    for seed in 0..1000 {
        let pick = |choice: u64, from: &[f32]| from[(mix(seed) >> choice) as usize % from.len()];
        let logits = row(seed, 200);
        let params = SamplingParams {
            temperature: pick(0, &[0.0, 0.3, 1.0, 5.0]),
            top_k: pick(8, &[0.0, 1.0, 5.0, 60.0, 200.0, 300.0]) as u32,
            top_p: pick(16, &[1.0, 0.5]),
            min_p: pick(24, &[0.0, 0.2]),
            repetition_penalty: pick(32, &[1.0, 1.0, 0.5, 2.0]),
            presence_penalty: pick(40, &[0.0, 0.0, 0.0, 1.0]),
            logit_bias: vec![(7, 3.0); usize::from(pick(48, &[0.0, 0.0, 0.0, 1.0]) == 1.0)],
            seed,
            ..SamplingParams::default()
        };
        let draw = DrawContext {
            params: &params,
            history: &[0, 1, 2],
            prompt_tokens: 1,
            forbidden: &[5, 9][..seed as usize % 3],
            mask: None,
        };
        let Some(deciding) = deciding(&draw) else {
            continue;
        };
        let mut changes = LogitChanges::new(logits.len());
        let changes = changes.of(&draw);
        let change = |token| changes.iter().find(|change| change.token == token);
        let changed = |token: TokenId| {
            let logit = logits[token as usize];
            change(token).map_or(logit, |change| change.apply(logit))
        };
        let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        order.sort_by(|a, b| changed(*b).total_cmp(&changed(*a)).then(a.cmp(b)));
        let needed = match deciding {
            Deciding::Largest(largest) => largest as usize,
            // Without top-p: the tokens up to the drawn one.
            Deciding::Draw(_) if params.top_p >= 1.0 => {
                let token = sampler(logits.len()).sample(&logits, &draw).unwrap().token;
                1 + order.iter().position(|other| *other == token).unwrap()
            }
            Deciding::Draw(_) => continue,
        };
        let mut few = logits.clone();
        for token in order.iter().skip(needed) {
            few[*token as usize] = f32::MIN;
            left_out += 1;
        }
        let mut sampler = sampler(logits.len());
        let expected = sampler.sample(&logits, &draw);
        assert_eq!(sampler.sample(&few, &draw), expected, "{params:?}");
    }
    assert!(left_out > 10_000, "{left_out} logits were left out");
}
