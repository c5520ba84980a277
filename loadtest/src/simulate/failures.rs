//! When machines fail, and for how long.

use sterna_random::Random;
use sterna_scheduler::Micros;

use crate::workload::stream;

/// Independent failures of machines. The times to failure are exponential.
pub(super) struct Failures {
    mean_seconds: f64,
    down: Micros,
    randoms: Vec<Random>, // Indexed by machine.
}

impl Failures {
    /// Lets each of this many machines fail after `mean_seconds` on average, and return
    /// `down_seconds` later.
    pub(super) fn new(
        machines: usize,
        mean_seconds: f64,
        down_seconds: f64,
        seed: u64,
    ) -> Failures {
        let random = |machine| stream(seed, u64::MAX / 4 + machine);
        Failures {
            mean_seconds,
            down: (down_seconds * 1e6) as Micros,
            randoms: (0..machines as u64).map(random).collect(),
        }
    }

    /// Draws the time until a machine fails that works now.
    pub(super) fn time_to_failure(&mut self, machine: usize) -> Micros {
        let fraction = self.randoms[machine].fraction();
        (-(1.0 - fraction).ln() * self.mean_seconds * 1e6) as Micros
    }

    /// Returns how long a failed machine is away.
    pub(super) fn down(&self) -> Micros {
        self.down
    }
}
