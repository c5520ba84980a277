//! The random distributions that workloads are drawn from.
//!
//! Invariant: one (seed, stream) pair gives one sequence of numbers, on every machine.

use sterna_random::Random;

/// Starts the sequence of numbers that belongs to `seed` and `number`.
pub(crate) fn stream(seed: u64, number: u64) -> Random {
    let mut random = Random::new(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    random.next_u64();
    random
}

/// Draws from an exponential distribution: the time to the next event of a Poisson process.
pub(super) fn exponential(random: &mut Random, mean: f64) -> f64 {
    -(1.0 - random.fraction()).ln() * mean
}

/// Draws from the normal distribution with mean 0 and deviation 1 (Box and Muller).
fn normal(random: &mut Random) -> f64 {
    let radius = (-2.0 * (1.0 - random.fraction()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.fraction()).cos()
}

/// The distribution of a count: tokens of a text, or turns of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Count {
    /// Always this number.
    Exactly(u32),
    /// Uniform between two numbers, both included.
    Between(u32, u32),
    /// Log-normal, as the lengths of real prompts and answers are, and clamped to a range.
    LogNormal {
        /// The median.
        median: f64,
        /// The standard deviation of the logarithm.
        sigma: f64,
        /// The lower limit.
        min: u32,
        /// The upper limit.
        max: u32,
    },
}

impl Count {
    /// Draws one number.
    pub(crate) fn draw(self, random: &mut Random) -> u32 {
        match self {
            Count::Exactly(count) => count,
            Count::Between(min, max) => min + random.below(u64::from(max - min) + 1) as u32,
            Count::LogNormal {
                median,
                sigma,
                min,
                max,
            } => ((median * (sigma * normal(random)).exp()).round() as u32).clamp(min, max),
        }
    }
}

/// A Zipf law over the ranks `0..n`: rank k is drawn in proportion to 1 / (k + 1)^exponent.
#[derive(Debug)]
pub(super) struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Creates the law of `count` ranks. With exponent 0, all ranks are equally likely.
    pub(super) fn new(count: u32, exponent: f64) -> Zipf {
        let mut sum = 0.0;
        let cumulative = (1..=count)
            .map(|rank| {
                sum += f64::from(rank).powf(-exponent);
                sum
            })
            .collect();
        Zipf { cumulative }
    }

    /// Draws one rank.
    pub(super) fn draw(&self, random: &mut Random) -> u32 {
        let total = self.cumulative.last().copied().unwrap_or(0.0);
        let target = random.fraction() * total;
        let rank = self.cumulative.partition_point(|&sum| sum <= target);
        rank.min(self.cumulative.len() - 1) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_log_normal() {
        let count = Count::LogNormal {
            median: 100.0,
            sigma: 0.8,
            min: 4,
            max: 2000,
        };
        let mut random = stream(1, 1);
        let mut drawn: Vec<u32> = (0..20_001).map(|_| count.draw(&mut random)).collect();
        drawn.sort_unstable();
        assert!((95..=105).contains(&drawn[10_000]), "{}", drawn[10_000]);
        // One deviation up: 84.1 % are below 100 e^0.8.
        assert!((212..=234).contains(&drawn[16_827]), "{}", drawn[16_827]);
    }

    #[test]
    fn the_first_rank_of_a_zipf_law_has_its_share() {
        let zipf = Zipf::new(1000, 1.0);
        let mut random = stream(1, 2);
        let first = (0..100_000).filter(|_| zipf.draw(&mut random) == 0).count();
        // 1 / H(1000) = 13.36 %.
        assert!((12_900..13_800).contains(&first), "{first}");
        let even = Zipf::new(4, 0.0);
        let last = (0..10_000).filter(|_| even.draw(&mut random) == 3).count();
        assert!((2_300..2_700).contains(&last), "{last}");
    }
}
