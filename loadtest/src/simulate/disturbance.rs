//! A disturbance of the simulated machine: for a time, other work makes its steps longer.

use std::str::FromStr;

use sterna_random::Random;
use sterna_scheduler::{CostModel, Micros};

/// A kind of disturbance and its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Disturbance {
    pub(super) kind: DisturbanceKind,
    /// Its first moment. If it is 0, the disturbance also falls on the calibration.
    pub(super) from: Micros,
    /// The moment after its last one.
    pub(super) until: Micros,
}

/// What becomes slower, and by how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DisturbanceKind {
    /// All of a step takes this many times as long.
    Slow(f64),
    /// Each step takes a random time, up to this many times as long.
    Uneven(f64),
    /// Short commands come and go: every few seconds, all of a step takes up to this many times as
    /// long for some tenths of a second.
    Bursts(f64),
    /// Another process computes on one of the two cores. The other core waits for it at the end of
    /// each part of a step. It can read more than half of the memory bandwidth.
    StolenCore,
    /// Another process reads memory all the time.
    HalfBandwidth,
}

/// The mean time between two bursts, and the mean length of one, both exponential,
/// in microseconds.
const BURSTS: [f64; 2] = [5e6, 5e5];

/// The last burst or the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Burst {
    from: Micros,
    until: Micros,
    share: f64,
}

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunPhase {
    Before,
    During,
    After,
}

impl Disturbance {
    /// Returns the phase of a moment.
    pub(super) fn phase(&self, at: Micros) -> RunPhase {
        if at < self.from {
            RunPhase::Before
        } else if at < self.until {
            RunPhase::During
        } else {
            RunPhase::After
        }
    }
}

impl Burst {
    /// Moves on to the burst at `now`, or to the next one. Returns its share of the greatest
    /// factor, which is 0 before it.
    pub(super) fn share(&mut self, now: Micros, random: &mut Random) -> f64 {
        while self.until <= now {
            let times = BURSTS.map(|mean| (-(1.0 - random.fraction()).ln() * mean) as Micros);
            self.from = self.until + times[0];
            self.until = self.from + times[1] + 1;
            self.share = random.fraction();
        }
        if self.from <= now { self.share } else { 0.0 }
    }
}

impl DisturbanceKind {
    /// Returns the cost of steps during the disturbance. `part` is a number from 0 to 1 that
    /// belongs to the step or to its burst.
    pub(super) fn apply(self, cost: &CostModel, part: f64) -> CostModel {
        match self {
            DisturbanceKind::Slow(factor) => longer(cost, factor, factor),
            DisturbanceKind::Uneven(factor) | DisturbanceKind::Bursts(factor) => {
                let factor = 1.0 + part * (factor - 1.0);
                longer(cost, factor, factor)
            }
            DisturbanceKind::StolenCore => longer(cost, 1.5, 2.0),
            DisturbanceKind::HalfBandwidth => longer(cost, 2.0, 1.0),
        }
    }
}

/// Returns a model whose reads take `memory` times as long, and whose arithmetic `compute` times.
/// A step of one token takes as long as the reads of the weights.
fn longer(cost: &CostModel, memory: f64, compute: f64) -> CostModel {
    let times = |time: u64, factor: f64| (time as f64 * factor) as u64;
    let reads = times(cost.rows[0], memory);
    CostModel {
        rows: cost.rows.map(|time| times(time, compute).max(reads)),
        kilo_decode_keys: times(cost.kilo_decode_keys, memory),
        kilo_chunk_keys: times(cost.kilo_chunk_keys, compute),
        head: times(cost.head, memory),
        logit: times(cost.logit, compute),
        sampling: times(cost.sampling, compute),
    }
}

impl FromStr for DisturbanceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<DisturbanceKind, String> {
        let factor = |text: &str| {
            text.parse()
                .ok()
                .filter(|factor| (1.0..=16.0).contains(factor))
        };
        let kind = match text.split_once(':') {
            None if text == "stolen-core" => Some(DisturbanceKind::StolenCore),
            None if text == "half-bandwidth" => Some(DisturbanceKind::HalfBandwidth),
            Some(("slow", times)) => factor(times).map(DisturbanceKind::Slow),
            Some(("uneven", times)) => factor(times).map(DisturbanceKind::Uneven),
            Some(("bursts", times)) => factor(times).map(DisturbanceKind::Bursts),
            _ => None,
        };
        kind.ok_or_else(|| {
            "must be slow:X, uneven:X or bursts:X with a number from 1 to 16, stolen-core or \
             half-bandwidth"
                .into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_bandwidth_does_not_slow_down_long_chunks() {
        let cost = CostModel::UNMEASURED;
        let slower = DisturbanceKind::HalfBandwidth.apply(&cost, 0.0);
        assert_eq!(slower.rows[0], 2 * cost.rows[0]);
        assert_eq!(slower.rows[7], cost.rows[7]);
        let stolen = DisturbanceKind::StolenCore.apply(&cost, 0.0);
        assert_eq!(stolen.rows[7], 2 * cost.rows[7]);
        let uneven = DisturbanceKind::Uneven(5.0);
        assert_eq!(uneven.apply(&cost, 0.0), cost);
        assert_eq!(uneven.apply(&cost, 0.5).head, 3 * cost.head);
    }

    #[test]
    fn bursts_take_about_a_tenth_of_the_time() {
        let (mut burst, mut random) = (Burst::default(), Random::new(9));
        let shares: Vec<f64> = (0..100_000)
            .map(|tenth| burst.share(tenth * 100_000, &mut random))
            .collect();
        let disturbed = shares.iter().filter(|&&share| share > 0.0).count();
        assert!((8_000..10_500).contains(&disturbed), "{disturbed}");
        assert!(shares.iter().all(|share| (0.0..1.0).contains(share)));
    }

    #[test]
    fn kinds_are_read_from_text() {
        assert_eq!("slow:2.5".parse(), Ok(DisturbanceKind::Slow(2.5)));
        assert_eq!("bursts:3".parse(), Ok(DisturbanceKind::Bursts(3.0)));
        assert_eq!("stolen-core".parse(), Ok(DisturbanceKind::StolenCore));
        for wrong in ["slow", "slow:0.5", "slow:x", "stolen-core:2", "fast:2"] {
            assert!(wrong.parse::<DisturbanceKind>().is_err(), "{wrong}");
        }
    }
}
