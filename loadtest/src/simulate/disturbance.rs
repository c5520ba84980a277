//! A disturbance of the simulated machine: for a time, other work makes its steps longer.

use std::str::FromStr;

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
    /// Another process computes on one of the two cores. The other core waits for it at the end of
    /// each part of a step. It can read more than half of the memory bandwidth.
    StolenCore,
    /// Another process reads memory all the time.
    HalfBandwidth,
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

impl DisturbanceKind {
    /// Returns the cost of steps during the disturbance. `part`, from 0 to 1, is drawn for each
    /// step.
    pub(super) fn apply(self, cost: &CostModel, part: f64) -> CostModel {
        match self {
            DisturbanceKind::Slow(factor) => longer(cost, factor, factor),
            DisturbanceKind::Uneven(factor) => {
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
            _ => None,
        };
        kind.ok_or_else(|| {
            "must be slow:X or uneven:X with a number from 1 to 16, stolen-core or half-bandwidth"
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
    fn kinds_are_read_from_text() {
        assert_eq!("slow:2.5".parse(), Ok(DisturbanceKind::Slow(2.5)));
        assert_eq!("stolen-core".parse(), Ok(DisturbanceKind::StolenCore));
        for wrong in ["slow", "slow:0.5", "slow:x", "stolen-core:2", "fast:2"] {
            assert!(wrong.parse::<DisturbanceKind>().is_err(), "{wrong}");
        }
    }
}
