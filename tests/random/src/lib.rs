//! Seeded pseudo-random numbers for tests, benchmarks, synthetic checkpoints, workloads and the
//! draws of the sampler.
//!
//! The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
//! generators", OOPSLA 2014). It is not for secrets.
//!
//! Invariant: one seed gives one sequence of numbers, on every machine.

#![forbid(unsafe_code)]

use std::hash::{BuildHasher, RandomState};

/// The increment of the counter: 2⁶⁴ divided by the golden ratio, made odd.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Scrambles 64 bits with the finalizer of SplitMix64: every input bit affects every output bit.
#[must_use]
pub const fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns the whole number in the environment variable `STERNA_SEED`, or `None` if it is not set.
///
/// # Panics
/// If the variable is set to something else.
#[must_use]
pub fn seed_from_env() -> Option<u64> {
    let seed = std::env::var("STERNA_SEED").ok()?;
    Some(seed.parse().expect("STERNA_SEED is a whole number"))
}

/// A SplitMix64 generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Starts from `STERNA_SEED`, or from a fresh seed. Prints the seed; the test harness shows it
    /// if the test fails.
    ///
    /// # Panics
    /// If `STERNA_SEED` is not a whole number.
    #[must_use]
    pub fn from_env() -> Random {
        let seed = seed_from_env().unwrap_or_else(|| RandomState::new().hash_one(0));
        println!("STERNA_SEED={seed}");
        Random(seed)
    }

    /// Returns the next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Returns a number in `0..end`. The bias is at most `end` ÷ 2⁶⁴.
    ///
    /// # Panics
    /// If `end` is 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// Returns a number in `low..=high`.
    ///
    /// # Panics
    /// If `low` is above `high`.
    pub const fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns an index in `0..len`.
    ///
    /// # Panics
    /// If `len` is 0.
    pub const fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns one of `items`.
    ///
    /// # Panics
    /// If `items` is empty.
    pub const fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Returns `true` in `chance` of 100 calls.
    pub const fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// Returns a number in `0.0..1.0`, of 53 random bits.
    pub const fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number in `0.0..1.0`, of 24 random bits.
    pub const fn fraction_f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_splitmix64() {
        // The first values of the reference implementation for the seed 1234567.
        let mut random = Random::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| random.next_u64()), expected);
    }

    #[test]
    fn fractions_stay_below_one() {
        let mut random = Random::from_env();
        for _ in 0..10_000 {
            assert!((0.0..1.0).contains(&random.fraction()));
            assert!((0.0..1.0).contains(&random.fraction_f32()));
        }
    }
}
