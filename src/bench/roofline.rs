//! The roofline: the shortest time that a step can take on a machine with given limits.
//!
//! It is `max(bytes / bandwidth, operations / int8 peak)`: the machine reads all memory of the step
//! while it multiplies. A second figure adds up the same maximum over the parts of the step,
//! because the machine does not multiply one part while it reads another.
//!
//! Bytes are the memory that the step must read: the packed weights of the layers, of experts those
//! that have rows, the keys and values of every sequence, in layers with a window at most those of
//! the window, the states of every sequence, which are written too, and, if logits are wanted, the
//! stored head. Operations are one multiplication and one addition for each ternary weight and
//! token, and for each weight of the head and row of logits. Attention's arithmetic,
//! norms and embeddings do not count. A step exceeds 100 % only if a sampled limit is too low.

use serde::Serialize;

use super::machine_limits::MachineLimits;
use crate::engine::StepSize;
use crate::model::Sizes;

/// The work that a step cannot avoid.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes read from memory.
    pub bytes: f64,
    /// Operations on small integers.
    pub operations: f64,
}

/// The limit that a step reaches first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Reading memory.
    Bandwidth,
    /// Multiplying small integers.
    Int8,
}

impl Work {
    /// Returns the work of a step.
    pub fn of(step: &StepSize, sizes: &Sizes) -> Work {
        let parts = Work::parts(step, sizes).into_iter();
        parts.fold(Work::default(), Work::plus)
    }

    /// Returns the work of a step's parts: the matrix products of the layers, attention and states,
    /// the head.
    pub fn parts(step: &StepSize, sizes: &Sizes) -> [Work; 3] {
        let work = |bytes: usize, multiplications: f64| Work {
            bytes: bytes as f64,
            operations: 2.0 * multiplications,
        };
        let longest = sizes.window + step.tokens / step.rows.max(1);
        let local_keys = step.keys.min(step.rows * longest); // Rows of one step are alike.
        let local_bytes = sizes.local_kv_bytes_per_token;
        let keys = step.keys * (sizes.kv_bytes_per_token - local_bytes) + local_keys * local_bytes;
        let states = 2 * step.rows * sizes.state_bytes;
        let head = if step.logits > 0 { sizes.head_bytes } else { 0 };
        [
            work(
                sizes.layer_bytes + step.expert_hits * sizes.expert_bytes,
                sizes.ternary_weights as f64 * step.tokens as f64,
            ),
            work(keys + states, 0.0),
            work(head, sizes.head_weights as f64 * step.logits as f64),
        ]
    }

    /// Returns the sum of both.
    #[must_use]
    pub fn plus(self, other: Work) -> Work {
        Work {
            bytes: self.bytes + other.bytes,
            operations: self.operations + other.operations,
        }
    }

    /// Returns the shortest time for the work, in seconds.
    pub fn min_seconds(&self, limits: &MachineLimits) -> f64 {
        let [reading, multiplying] = self.seconds(limits);
        reading.max(multiplying)
    }

    /// Returns the limit that the work reaches first.
    pub fn bound(&self, limits: &MachineLimits) -> Bound {
        let [reading, multiplying] = self.seconds(limits);
        if reading >= multiplying {
            Bound::Bandwidth
        } else {
            Bound::Int8
        }
    }

    fn seconds(&self, limits: &MachineLimits) -> [f64; 2] {
        [
            self.bytes / limits.gigabytes_per_second / 1e9,
            self.operations / limits.gigaops_per_second / 1e9,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes {
        layer_bytes: 500_000_000,
        expert_bytes: 0,
        experts_per_token: 0,
        ternary_bytes: 500_000_000,
        ternary_weights: 2_000_000_000,
        head_bytes: 300_000_000,
        head_weights: 300_000_000,
        kv_bytes_per_token: 100_000,
        local_kv_bytes_per_token: 0,
        window: 0,
        state_bytes: 0,
    };
    const LIMITS: MachineLimits = MachineLimits {
        gigabytes_per_second: 40.0,
        gigaops_per_second: 2_000.0,
    };

    fn check(tokens: usize, logits: usize, keys: usize, bytes: f64, operations: f64) -> Work {
        let step = StepSize {
            tokens,
            logits,
            keys,
            rows: 1,
            expert_hits: 0,
        };
        let work = Work::of(&step, &SIZES);
        assert_eq!(work, Work { bytes, operations });
        work
    }

    #[test]
    fn one_stream_is_bound_by_bandwidth() {
        let work = check(1, 1, 1000, 0.9e9, 4.6e9);
        assert_eq!(work.bound(&LIMITS), Bound::Bandwidth);
        assert!((work.min_seconds(&LIMITS) - 0.0225).abs() < 1e-12);
    }

    #[test]
    fn parts_of_a_step_may_have_different_bounds() {
        let step = StepSize {
            tokens: 8,
            logits: 8,
            keys: 2000,
            rows: 1,
            expert_hits: 0,
        };
        // Layers: 16 ms of multiplying, 12.5 ms of reading. Keys: 5 ms of reading.
        // Head: 7.5 ms of reading, 2.4 ms of multiplying.
        let parts = Work::parts(&step, &SIZES);
        let seconds = parts.map(|part| part.min_seconds(&LIMITS));
        let expected = [0.016, 0.005, 0.0075];
        assert!(
            seconds
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-12)
        );
        assert!((Work::of(&step, &SIZES).min_seconds(&LIMITS) - 0.025).abs() < 1e-12);
    }

    #[test]
    fn many_streams_are_bound_by_the_int8_peak() {
        let work = check(32, 32, 32 * 250, 1.6e9, 147.2e9);
        assert_eq!(work.bound(&LIMITS), Bound::Int8);
        assert!((work.min_seconds(&LIMITS) - 0.0736).abs() < 1e-12);
    }

    #[test]
    fn experts_without_rows_and_keys_before_a_window_are_not_read() {
        let sizes = Sizes {
            expert_bytes: 1_000_000,
            local_kv_bytes_per_token: 75_000,
            window: 512,
            ..SIZES
        };
        let work = |keys| {
            let step = StepSize {
                tokens: 2,
                logits: 0,
                keys,
                rows: 2,
                expert_hits: 30,
            };
            Work::of(&step, &sizes).bytes
        };
        assert_eq!(work(1000), 530e6 + 1000.0 * 100e3);
        assert_eq!(work(8000), 530e6 + 8000.0 * 25e3 + 2.0 * 513.0 * 75e3);
    }

    #[test]
    fn a_chunk_without_logits_does_not_read_the_head() {
        check(512, 0, 512, 0.5512e9, 2048e9);
    }
}
