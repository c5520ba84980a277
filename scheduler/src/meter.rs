//! A rate limit and its state: the generic cell rate algorithm (ITU-T I.371), whose state is one
//! number.

use crate::{Micros, Rate, RateState};

const MINUTE: u64 = 60_000_000_000;

/// A rate and its state: the time at which all charges so far are earned.
///
/// A charge may exceed the quota left. Then no request conforms until the debt has refilled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    rate: Rate,
    unit: u64,   // The nanoseconds that earn one unit.
    earned: u64, // The time at which all charges are earned, in nanoseconds.
}

impl Meter {
    pub(crate) fn new(rate: Rate) -> Meter {
        Meter {
            rate,
            unit: MINUTE / u64::from(rate.per_minute),
            earned: 0,
        }
    }

    /// Returns a meter of another rate with the same debt.
    pub(crate) fn at_rate(self, now: Micros, rate: Rate) -> Meter {
        let owed = self.earned.saturating_sub(nanos(now)).div_ceil(self.unit);
        let mut meter = Meter::new(rate);
        meter.charge(now, owed);
        meter
    }

    /// Returns the time until a unit may be used if `units` of what was charged are refunded.
    pub(crate) fn wait_with_refund(&self, now: Micros, units: u64) -> Micros {
        let mut refunded = *self;
        refunded.refund(units);
        refunded.conforms(now).err().unwrap_or(0)
    }

    /// Returns `Ok` if a unit may be used now, otherwise the time until then.
    pub(crate) fn conforms(&self, now: Micros) -> Result<(), Micros> {
        let at_once = self.unit.saturating_mul(u64::from(self.rate.burst - 1));
        let latest = nanos(now).saturating_add(at_once);
        match self.earned.saturating_sub(latest) {
            0 => Ok(()),
            early => Err(early.div_ceil(1000)),
        }
    }

    /// Adds to the debt.
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
}
