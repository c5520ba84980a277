//! The least time that a step can take on a machine of given limits: `max(bytes / bandwidth, operations / int8 peak)`, as if all of a
//! step were read while all of it is multiplied; and in turn, the same of each part, one after the other, for a part is not multiplied
//! while another one is read.
//!
//! Bytes are all that the step must read: the packed weights of the layers, the head as it is stored if logits are wanted, the keys and
//! values of every sequence. Operations are a multiplication and an addition for each ternary weight and token, and for each weight of
//! the head and row of logits. Attention's floats, norms and the embedding's rows are left out: a share of the roofline that is reached
//! has paid for them as well.

use serde::Serialize;

use super::limits::Limits;
use crate::engine::DirectStep;
use crate::model::Sizes;

/// What a step cannot do without.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// To be read from memory.
    pub bytes: f64,
    /// Of small integers.
    pub operations: f64,
}

/// Which limit a step meets first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Reading memory.
    Bandwidth,
    /// Multiplying small integers.
    Int8,
}

impl Work {
    /// The work of a step of a model.
    #[must_use]
    pub fn of(step: &DirectStep, sizes: &Sizes) -> Work {
        let parts = Work::parts(step, sizes).into_iter();
        parts.fold(Work::default(), Work::plus)
    }

    /// The work of its parts: the products of the layers, attention, the head.
    #[must_use]
    pub fn parts(step: &DirectStep, sizes: &Sizes) -> [Work; 3] {
        let work = |bytes: usize, multiplications: f64| Work {
            bytes: bytes as f64,
            operations: 2.0 * multiplications,
        };
        let head = if step.logits > 0 { sizes.head_bytes } else { 0 };
        [
            work(
                sizes.layer_bytes,
                sizes.ternary_weights as f64 * step.tokens as f64,
            ),
            work(step.keys * sizes.kv_bytes_per_token, 0.0),
            work(head, sizes.head_weights as f64 * step.logits as f64),
        ]
    }

    /// Both.
    #[must_use]
    pub fn plus(self, other: Work) -> Work {
        Work {
            bytes: self.bytes + other.bytes,
            operations: self.operations + other.operations,
        }
    }

    /// The least seconds that it takes.
    #[must_use]
    pub fn least_seconds(&self, limits: &Limits) -> f64 {
        let [reading, multiplying] = self.seconds(limits);
        reading.max(multiplying)
    }

    /// Which limit it meets first.
    #[must_use]
    pub fn bound(&self, limits: &Limits) -> Bound {
        let [reading, multiplying] = self.seconds(limits);
        if reading >= multiplying {
            Bound::Bandwidth
        } else {
            Bound::Int8
        }
    }

    fn seconds(&self, limits: &Limits) -> [f64; 2] {
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
        ternary_bytes: 500_000_000,
        ternary_weights: 2_000_000_000,
        head_bytes: 300_000_000,
        head_weights: 300_000_000,
        kv_bytes_per_token: 100_000,
    };
    const LIMITS: Limits = Limits {
        gigabytes_per_second: 40.0,
        gigaops_per_second: 2_000.0,
    };

    fn check(tokens: usize, logits: usize, keys: usize, bytes: f64, operations: f64) -> Work {
        let step = DirectStep {
            tokens,
            logits,
            keys,
            ..DirectStep::default()
        };
        let work = Work::of(&step, &SIZES);
        assert_eq!(work, Work { bytes, operations });
        work
    }

    #[test]
    fn one_stream_is_bound_by_what_it_reads() {
        let work = check(1, 1, 1000, 0.9e9, 4.6e9);
        assert_eq!(work.bound(&LIMITS), Bound::Bandwidth);
        assert!((work.least_seconds(&LIMITS) - 0.0225).abs() < 1e-12);
    }

    #[test]
    fn a_few_streams_read_the_head_after_they_multiplied_the_layers() {
        let step = DirectStep {
            tokens: 8,
            logits: 8,
            keys: 2000,
            ..DirectStep::default()
        };
        // Layers: 16 ms of multiplying, 12.5 of reading. Keys: 5 of reading. Head: 7.5 of reading, 2.4 of multiplying.
        let parts = Work::parts(&step, &SIZES);
        let seconds = parts.map(|part| part.least_seconds(&LIMITS));
        let expected = [0.016, 0.005, 0.0075];
        assert!(
            seconds
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-12)
        );
        assert!((Work::of(&step, &SIZES).least_seconds(&LIMITS) - 0.025).abs() < 1e-12);
    }

    #[test]
    fn many_streams_are_bound_by_what_they_multiply() {
        let work = check(32, 32, 32 * 250, 1.6e9, 147.2e9);
        assert_eq!(work.bound(&LIMITS), Bound::Int8);
        assert!((work.least_seconds(&LIMITS) - 0.0736).abs() < 1e-12);
    }

    #[test]
    fn a_chunk_that_wants_no_logits_reads_no_head() {
        check(512, 0, 512, 0.5512e9, 2048e9);
    }
}
