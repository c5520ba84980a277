//! Kernels over a row of logits.

use sterna_kernels::{DrawNoise, DrawScores, Kernels, LOGITS_BLOCK, LogitScale, Rank};
use sterna_random::Random;

use crate::{bits, each_isa, float, scalar};

/// Returns a random row:
///
/// - shorter than a block, of whole blocks, or with a partial block at its end;
/// - with ties or without;
/// - sometimes with a logit that is not finite, or whose weight is zero.
fn row_of_logits(random: &mut Random) -> Vec<f32> {
    let count = match random.index(3) {
        0 => 1 + random.index(300),
        1 => LOGITS_BLOCK * (1 + random.index(4)),
        _ => 1 + random.index(5 * LOGITS_BLOCK),
    };
    let spread = random.pick(&[0.0, 1.0, 10.0, 200.0]);
    let is_tied = random.index(2) == 0;
    let step = |x: f32| if is_tied { x.round() } else { x };
    let mut logits: Vec<f32> = (0..count).map(|_| step(float(random) * spread)).collect();
    if random.index(4) == 0 {
        let odd = random.pick(&[f32::NEG_INFINITY, f32::INFINITY, f32::NAN]);
        logits[random.index(count)] = odd;
    }
    logits
}

#[test]
fn every_isa_finds_the_largest_logits_and_those_that_are_not_finite() {
    let mut random = Random::from_env();
    for _ in 0..500 {
        let logits = row_of_logits(&mut random);
        let larger = |a, &b: &f32| if b > a { b } else { a };
        let blocks = logits.chunks(LOGITS_BLOCK);
        let expected: Vec<f32> = blocks
            .map(|block| block.iter().fold(f32::NEG_INFINITY, larger))
            .collect();
        for kernels in each_isa() {
            let mut peaks = vec![f32::NAN; expected.len()];
            let is_finite = kernels.scan_logits(&logits, &mut peaks);
            assert_eq!(peaks, expected, "{}", kernels.isa());
            assert_eq!(is_finite, logits.iter().all(|logit| logit.is_finite()));
        }
    }
}

/// Returns a random place in the order of a row: the end, or that of one of its tokens.
fn rank(random: &mut Random, logits: &[f32]) -> Rank {
    let token = random.index(logits.len());
    match random.index(3) {
        0 => Rank::END,
        _ => Rank {
            logit: logits[token],
            token: token as u32,
        },
    }
}

#[test]
fn every_isa_computes_the_same_sums_and_finds_the_best_score() {
    let mut random = Random::from_env();
    for _ in 0..500 {
        let mut logits = row_of_logits(&mut random);
        let forbidden = |logit: &mut f32| *logit = f32::NEG_INFINITY;
        let odd = logits.iter_mut().filter(|logit| !logit.is_finite());
        odd.for_each(forbidden);
        logits.push(float(&mut random));
        let scale = LogitScale {
            largest: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            inverse_temperature: random.pick(&[1.0, 0.5, 1.25, 30.0]),
        };
        let noise = DrawNoise::new([(); 3].map(|()| random.next_u64() as u32));
        let scores = DrawScores { scale, noise };
        let (end, first) = (rank(&mut random, &logits), random.pick(&[0, 32, u32::MAX]));
        let shifted = scores.starting_at(first);
        let blocks = logits.chunks(LOGITS_BLOCK);
        let largest = |block: &[f32]| block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let peaks: Vec<f32> = blocks.clone().map(largest).collect();
        let tokens = (0..).zip(logits.iter().copied());
        let tokens = tokens.filter(|(token, logit)| end.is_after(*logit, *token));
        let scored = tokens
            .map(|(token, logit): (u32, f32)| (scores.of(logit, token.wrapping_add(first)), token));
        let higher = |best: (f32, u32), token: (f32, u32)| {
            if token.0 > best.0 { token } else { best }
        };
        let floor = random.pick(&[f32::NEG_INFINITY, -2.0, 3.0, 5.0]);
        let best = scored.fold((floor, u32::MAX), higher);
        let run = |kernels: Kernels| {
            let mut masses = vec![f32::NAN; peaks.len()];
            kernels.sum_weights(&logits, scale, end, &peaks, &mut masses);
            let found = kernels.best_score(&logits, shifted, end, &peaks, floor);
            assert_eq!(found, best, "{}", kernels.isa());
            bits(&masses)
        };
        let expected = run(scalar());
        let firsts = (0..).step_by(LOGITS_BLOCK);
        for ((first, block), mass) in firsts.zip(blocks).zip(&expected) {
            let tokens = (first..).zip(block.iter().copied());
            let tokens = tokens.filter(|(token, logit)| end.is_after(*logit, *token));
            let weights = tokens.map(|(_, logit)| {
                f64::from((logit - scale.largest) * scale.inverse_temperature).exp()
            });
            let (sum, found) = (weights.sum::<f64>(), f64::from(f32::from_bits(*mass)));
            assert!(
                (sum - found).abs() <= 1e-6 * sum + 1e-30,
                "{found} instead of {sum}"
            );
        }
        for kernels in each_isa() {
            assert_eq!(run(kernels), expected, "{}", kernels.isa());
        }
    }
}
