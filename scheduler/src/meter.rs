//! A rate limit and its state: the generic cell rate algorithm (ITU-T I.371), whose state is one
//! number.

use crate::{Micros, Rate, RateState};

const MINUTE: u64 = 60_000_000_000;

/// A rate and its state: the time at which all charges so far are earned.
///
/// A charge may exceed the quota left. Then no request conforms until the debt has refilled.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    rate: Rate,
    unit: u64,   // The nanoseconds that earn one unit.
    earned: u64, // The time at which all charges are earned, in nanoseconds.
}

impl Meter {
    /// Returns a meter that was never charged.
    pub fn new(rate: Rate) -> Meter {
        Meter::owing(rate, 0)
    }

    /// Returns a meter whose whole burst may be used at `reset`.
    pub fn owing(rate: Rate, reset: Micros) -> Meter {
        Meter {
            rate,
            unit: MINUTE / u64::from(rate.per_minute),
            earned: nanos(reset),
        }
    }

    /// Returns a meter of another rate that owes as many units. A lower rate takes longer to earn
    /// them.
    pub fn at_rate(self, now: Micros, rate: Rate) -> Meter {
        let mut meter = Meter::new(rate);
        let before = u128::from(self.earned.saturating_sub(nanos(now)));
        let after = (before * u128::from(meter.unit)).div_ceil(u128::from(self.unit));
        let after = u64::try_from(after).unwrap_or(u64::MAX);
        meter.earned = nanos(now).saturating_add(after);
        meter
    }

    /// Returns the time until a unit may be used if `units` of what was charged are refunded.
    pub(crate) fn wait_with_refund(&self, now: Micros, units: u64) -> Micros {
        let mut refunded = *self;
        refunded.refund(units);
        refunded.conforms(now).err().unwrap_or(0)
    }

    /// Returns `Ok` if a unit may be used now, otherwise the time until then.
    pub fn conforms(&self, now: Micros) -> Result<(), Micros> {
        let at_once = self.unit.saturating_mul(u64::from(self.rate.burst - 1));
        let latest = nanos(now).saturating_add(at_once);
        match self.earned.saturating_sub(latest) {
            0 => Ok(()),
            early => Err(early.div_ceil(1000)),
        }
    }

    /// Adds to the debt.
    pub fn charge(&mut self, now: Micros, units: u64) {
        let cost = self.unit.saturating_mul(units);
        self.earned = self.earned.max(nanos(now)).saturating_add(cost);
    }

    pub(crate) fn refund(&mut self, units: u64) {
        self.earned = self.earned.saturating_sub(self.unit.saturating_mul(units));
    }

    /// Returns what may be used at `now`.
    pub fn state(&self, now: Micros) -> RateState {
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
    fn a_burst_is_followed_by_the_rate() {
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

    #[test]
    fn at_another_rate_the_same_units_are_owed() {
        let burst = 3;
        let rate = |per_minute| Rate { per_minute, burst };
        let meter = Meter::owing(rate(60), 9 * SECOND / 2);
        for (per_minute, reset) in [
            (60, 9 * SECOND / 2),
            (120, 9 * SECOND / 4),
            (30, 9 * SECOND),
        ] {
            let other = meter.at_rate(0, rate(per_minute));
            assert_eq!(other.state(0).reset, reset, "{per_minute}");
        }
        let later = meter.at_rate(4 * SECOND, rate(6)); // Half a unit is left.
        assert_eq!(later.state(4 * SECOND).reset, 5 * SECOND);
        assert_eq!(later.state(9 * SECOND).remaining, burst);
    }
}
