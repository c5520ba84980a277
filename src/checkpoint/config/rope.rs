//! How the frequencies of the rotary embedding are changed for contexts that are longer than the
//! contexts of the first training.
//!
//! Sources: YaRN, <https://arxiv.org/abs/2309.00071>; LongRoPE, <https://arxiv.org/abs/2402.13753>;
//! Llama 3's rule as in `transformers`. Frequencies are computed in single precision, as there.

use std::f64::consts::TAU;

/// How frequencies are changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Frequencies are not changed.
    #[default]
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN: low frequencies are divided, high ones stay, and a ramp lies between.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The positions of the first training.
        original: f64,
        /// The rotations over `original` positions from which on a frequency stays.
        beta_fast: f64,
        /// The rotations up to which a frequency is divided.
        beta_slow: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
    /// Llama 3: as YaRN, with a ramp over wavelengths, and cosines stay.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// The positions of the first training.
        original: f64,
        /// The rotations over `original` positions up to which a frequency is divided.
        low: f64,
        /// The rotations from which on a frequency stays.
        high: f64,
    },
    /// LongRoPE: each frequency has a divisor of its own. Checkpoints have a list for contexts as
    /// long as in the first training, and a list for longer contexts. The longest context of the
    /// model decides which list counts, so that a sequence keeps its keys when it grows.
    LongRope {
        /// The divisors, one for each pair of values in a head.
        divisors: Vec<f64>,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// Returns the angle per position of each pair of values in a head of `head_dim`, where value i
    /// is rotated together with value i + head_dim / 2.
    pub(crate) fn frequencies(&self, theta: f64, head_dim: usize) -> Vec<f32> {
        let pairs = 0..head_dim / 2;
        let plain = pairs.map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            1.0 / (theta.powf(f64::from(exponent)) as f32)
        });
        let ramp = self.yarn_ramp(theta, head_dim);
        let scaled = plain.enumerate().map(|(i, frequency)| match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / *factor as f32,
            RopeScaling::Yarn { factor, .. } => {
                let divided = 1.0 / (*factor as f32 * (1.0 / frequency));
                let stays = 1.0 - ramp(i);
                divided * (1.0 - stays) + frequency * stays
            }
            RopeScaling::Llama3 {
                factor,
                original,
                low,
                high,
            } => llama3(frequency, *factor, *original, (*low, *high)),
            RopeScaling::LongRope { divisors, .. } => frequency / divisors[i] as f32,
        });
        scaled.collect()
    }

    /// Returns the factor of cosines and sines.
    pub(crate) fn attention_factor(&self) -> f32 {
        match self {
            RopeScaling::Yarn {
                attention_factor, ..
            }
            | RopeScaling::LongRope {
                attention_factor, ..
            } => *attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Returns YaRN's ramp: how far frequency `i` is divided, between 0 and 1.
    fn yarn_ramp(&self, theta: f64, head_dim: usize) -> impl Fn(usize) -> f32 {
        let (first, last) = match *self {
            RopeScaling::Yarn {
                original,
                beta_fast,
                beta_slow,
                ..
            } => {
                // The index of the frequency that rotates so often over the original positions.
                let index = |rotations: f64| {
                    let logarithm = (original / (rotations * TAU)).ln();
                    head_dim as f64 * logarithm / (2.0 * theta.ln())
                };
                let first = index(beta_fast).floor().max(0.0);
                (first, index(beta_slow).ceil().min(head_dim as f64 - 1.0))
            }
            _ => (0.0, 0.0),
        };
        let last = if last == first { last + 0.001 } else { last };
        move |i| ((i as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0)
    }
}

fn llama3(frequency: f32, factor: f64, original: f64, (low, high): (f64, f64)) -> f32 {
    let rotations = original / (TAU / f64::from(frequency));
    let divided = frequency / factor as f32;
    if rotations < low {
        divided
    } else if rotations > high {
        frequency
    } else {
        let smooth = ((rotations - low) / (high - low)) as f32;
        (1.0 - smooth) * divided + smooth * frequency
    }
}

/// Returns YaRN's factor of cosines and sines if a checkpoint does not state one.
pub(super) fn yarn_attention_factor(factor: f64) -> f64 {
    if factor > 1.0 {
        0.1 * factor.ln() + 1.0
    } else {
        1.0
    }
}

/// Returns LongRoPE's factor of cosines and sines if a checkpoint does not state one. `original` is
/// the number of positions of the first training.
pub(super) fn longrope_attention_factor(factor: f64, original: f64) -> f64 {
    if factor > 1.0 {
        (1.0 + factor.ln() / original.ln()).sqrt()
    } else {
        1.0
    }
}
