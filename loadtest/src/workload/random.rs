//! Seeded randomness, and the distributions that workloads are made of.
//!
//! Always true: a (seed, stream) pair is one sequence of numbers, on every machine.

/// SplitMix64: each (seed, stream) pair is its own sequence.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The sequence number `stream` of `seed`.
    pub(crate) fn new(seed: u64, stream: u64) -> Rng {
        let mut rng = Rng(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    /// Any 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Evenly in 0..1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Evenly in 0..`end`; the bias of the remainder is below 2⁻⁵⁰ for the ends used here.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Exponentially distributed: the pause before the next event of a Poisson process.
    pub(crate) fn pause(&mut self, mean: f64) -> f64 {
        -(1.0 - self.fraction()).ln() * mean
    }

    /// Normally distributed, mean 0 and deviation 1 (Box and Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.fraction()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.fraction()).cos()
    }
}

/// A bijection that leaves no pattern (the finalizer of SplitMix64).
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How a count is distributed: tokens of a text, turns of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Count {
    /// Always this.
    Exactly(u32),
    /// Evenly among these, both ends included.
    Between(u32, u32),
    /// Log-normal, as lengths of real prompts and answers are, and cut at the ends.
    LogNormal {
        /// Half are below it.
        median: f64,
        /// Deviation of the logarithm.
        sigma: f64,
        /// No less than this.
        least: u32,
        /// No more than this.
        most: u32,
    },
}

impl Count {
    /// One number.
    pub(crate) fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Count::Exactly(count) => count,
            Count::Between(least, most) => least + rng.below(u64::from(most - least) + 1) as u32,
            Count::LogNormal {
                median,
                sigma,
                least,
                most,
            } => ((median * (sigma * rng.normal()).exp()).round() as u32).clamp(least, most),
        }
    }
}

/// Ranks 0..n, rank k being drawn in proportion to 1 / (k + 1)^exponent.
#[derive(Debug)]
pub(crate) struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Of `count` ranks; exponent 0 makes all alike.
    pub(crate) fn new(count: u32, exponent: f64) -> Zipf {
        let mut sum = 0.0;
        let cumulative = (1..=count)
            .map(|rank| {
                sum += f64::from(rank).powf(-exponent);
                sum
            })
            .collect();
        Zipf { cumulative }
    }

    /// One rank.
    pub(crate) fn draw(&self, rng: &mut Rng) -> u32 {
        let total = self.cumulative.last().copied().unwrap_or(0.0);
        let at = rng.fraction() * total;
        let rank = self.cumulative.partition_point(|&sum| sum <= at);
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
            least: 4,
            most: 2000,
        };
        let mut rng = Rng::new(1, 1);
        let mut drawn: Vec<u32> = (0..20_001).map(|_| count.draw(&mut rng)).collect();
        drawn.sort_unstable();
        assert!((95..=105).contains(&drawn[10_000]), "{}", drawn[10_000]);
        // One deviation up: 84.1 % are below 100 e^0.8.
        assert!((212..=234).contains(&drawn[16_827]), "{}", drawn[16_827]);
    }

    #[test]
    fn the_first_rank_of_a_zipf_law_has_its_share() {
        let zipf = Zipf::new(1000, 1.0);
        let mut rng = Rng::new(1, 2);
        let first = (0..100_000).filter(|_| zipf.draw(&mut rng) == 0).count();
        // 1 / H(1000) = 13.36 %.
        assert!((12_900..13_800).contains(&first), "{first}");
        let even = Zipf::new(4, 0.0);
        let last = (0..10_000).filter(|_| even.draw(&mut rng) == 3).count();
        assert!((2_300..2_700).contains(&last), "{last}");
    }
}
