//! So much a minute, so much at once: the generic cell rate algorithm (ITU-T I.371), which needs one number for its state.

use crate::{Micros, Rate, RateState};

const MINUTE: u64 = 60_000_000_000;

/// A rate and how far it is used up.
///
/// The state is the moment at which all that was charged will have been earned. Debt is allowed: what is charged may
/// exceed what is left, and then nothing conforms until it has been earned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    rate: Rate,
    unit: u64,   // Nanoseconds that earn one.
    earned: u64, // When all charges will have been earned, in nanoseconds.
}

impl Meter {
    pub(crate) fn new(rate: Rate) -> Meter {
        Meter {
            rate,
            unit: MINUTE / u64::from(rate.per_minute),
            earned: 0,
        }
    }

    /// The same charges at another rate.
    pub(crate) fn at_rate(self, now: Micros, rate: Rate) -> Meter {
        let owed = self.earned.saturating_sub(nanos(now)).div_ceil(self.unit);
        let mut meter = Meter::new(rate);
        meter.charge(now, owed);
        meter
    }

    /// Whether anything may be used now; if not, when.
    pub(crate) fn conforms(&self, now: Micros) -> Result<(), Micros> {
        let at_once = self.unit.saturating_mul(u64::from(self.rate.burst - 1));
        let latest = nanos(now).saturating_add(at_once);
        match self.earned.saturating_sub(latest) {
            0 => Ok(()),
            early => Err(early.div_ceil(1000)),
        }
    }

    pub(crate) fn charge(&mut self, now: Micros, units: u64) {
        let cost = self.unit.saturating_mul(units);
        self.earned = self.earned.max(nanos(now)).saturating_add(cost);
    }

    pub(crate) fn refund(&mut self, units: u64) {
        self.earned = self.earned.saturating_sub(self.unit.saturating_mul(units));
    }

    pub(crate) fn state(&self, now: Micros) -> RateState {
        let owed = self.earned.saturating_sub(nanos(now));
        let all = self.unit.saturating_mul(u64::from(self.rate.burst));
        RateState {
            limit: self.rate.burst,
            remaining: (all.saturating_sub(owed) / self.unit) as u32,
            reset: owed.div_ceil(1000),
        }
    }
}

fn nanos(now: Micros) -> u64 {
    now * 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = 1_000_000;

    #[test]
    fn a_burst_then_the_rate() {
        let mut meter = Meter::new(Rate {
            per_minute: 60,
            burst: 3,
        });
        for left in [2, 1, 0] {
            assert_eq!(meter.conforms(0), Ok(()));
            meter.charge(0, 1);
            assert_eq!(meter.state(0).remaining, left);
        }
        assert_eq!(meter.conforms(0), Err(SECOND));
        assert_eq!(meter.conforms(SECOND / 4), Err(SECOND * 3 / 4));
        assert_eq!(meter.conforms(SECOND), Ok(()));
        meter.refund(1);
        assert_eq!(meter.conforms(0), Ok(()));
    }

    #[test]
    fn debt_is_earned_before_anything_conforms() {
        let mut meter = Meter::new(Rate {
            per_minute: 600,
            burst: 10,
        });
        meter.charge(0, 100);
        assert_eq!(meter.state(0).remaining, 0);
        assert_eq!(meter.conforms(0), Err(9 * SECOND + SECOND / 10));
        assert_eq!(meter.conforms(9 * SECOND + SECOND / 10), Ok(()));
        assert_eq!(meter.state(20 * SECOND).remaining, 10);
    }
}
