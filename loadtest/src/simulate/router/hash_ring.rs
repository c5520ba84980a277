//! Consistent hashing (Karger et al., 1997): each machine has many points on a ring, and a key
//! belongs to the machine of the next point.

use sterna_random::mix;

/// The points of each machine, as many as vllm-router 0.1.17 has.
const POINTS: u64 = 160;

/// A ring of points, in ascending order, each with its machine.
pub(super) struct HashRing(Vec<(u64, usize)>);

impl HashRing {
    /// Creates the ring of this many machines.
    pub(super) fn new(machines: usize) -> HashRing {
        let points = |machine: usize| {
            (0..POINTS).map(move |point| (mix(mix(machine as u64 + 1) ^ point), machine))
        };
        let mut ring: Vec<_> = (0..machines).flat_map(points).collect();
        ring.sort_unstable();
        HashRing(ring)
    }

    /// Returns the machine of `key`: that of the first point after the key's hash whose machine is
    /// alive, or `None` if none is. So the keys of a machine that failed spread over all others.
    /// vllm-router sends them to its first healthy server instead.
    pub(super) fn find(&self, key: u64, is_alive: impl Fn(usize) -> bool) -> Option<usize> {
        let hash = mix(!mix(key));
        let start = self.0.partition_point(|(point, _)| *point < hash);
        let (before, after) = self.0.split_at(start);
        let machines = after.iter().chain(before).map(|(_, machine)| *machine);
        machines.into_iter().find(|&machine| is_alive(machine))
    }
}
