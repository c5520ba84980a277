//! Kernels over a row of logits.

use sterna_kernels::{Kernels, LOGITS_BLOCK, LogitScale};
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

#[test]
fn every_isa_computes_the_same_weights_and_sums() {
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
        let blocks = logits.len().div_ceil(LOGITS_BLOCK);
        let threshold = random.pick(&[1e-30, 0.01, 0.3, 1.0]);
        let run = |kernels: Kernels| {
            let mut weights = vec![f32::NAN; logits.len()];
            let [mut masses, mut heaviest, mut sums] = [(); 3].map(|()| vec![f32::NAN; blocks]);
            kernels.weigh_logits(&logits, scale, &mut weights, &mut masses, &mut heaviest);
            kernels.sum_weights(&logits, scale, &mut sums);
            assert_eq!(
                bits(&sums),
                bits(&masses),
                "the sums are the same with and without weights"
            );
            let (mass, count) = kernels.weights_from(threshold, &weights, &heaviest);
            let all = [&weights[..], &masses, &heaviest].concat();
            let expected = weights
                .iter()
                .filter(|weight| **weight >= threshold)
                .count();
            assert_eq!(count, expected, "{} from {threshold} up", kernels.isa());
            kernels.drop_weights(threshold, &mut weights, &heaviest, &mut masses);
            let remaining: f64 = masses.iter().copied().map(f64::from).sum();
            assert_eq!(
                remaining.to_bits(),
                mass.to_bits(),
                "the remaining weights are those from the threshold up"
            );
            (bits(&all), bits(&weights), bits(&masses))
        };
        let expected = run(scalar());
        for (weight, &logit) in expected.0.iter().zip(&logits) {
            assert_eq!(*weight, scale.weight(logit).to_bits());
            let exact = f64::from((logit - scale.largest) * scale.inverse_temperature).exp();
            let error = (f64::from(f32::from_bits(*weight)) - exact).abs();
            assert!(error <= 3e-7 * exact + 1e-37, "off {exact} by {error}");
        }
        for kernels in each_isa() {
            assert_eq!(run(kernels), expected, "{}", kernels.isa());
        }
    }
}
