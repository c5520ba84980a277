//! Worlds in which owners take and give back units of a ledger, and a simple model keeps the same
//! books.
//!
//! The model knows each thing that an owner holds, as the doors of the server do. When an owner
//! gives way, its newest thing leaves.

use std::collections::BTreeMap;

use sterna_random::Random;
use sterna_scheduler::{Ledger, NoRoom, Share};

const OPERATIONS: u64 = 400;

/// A ledger, and what its owners hold.
pub(crate) struct LedgerWorld {
    seed: u64,
    random: Random,
    size: usize,
    ledger: Ledger<u32>,
    shares: Vec<Share>,                // By owner.
    things: BTreeMap<u32, Vec<usize>>, // By owner, the units of each thing, the newest last.
    largest: u64,                      // Units of a thing.
}

/// What has happened in the worlds.
#[derive(Debug, Default)]
pub(crate) struct LedgerCoverage {
    pub(crate) taken: u64,
    pub(crate) gave_way: u64,
    pub(crate) quota_used_up: u64,
    pub(crate) full: u64,
}

impl Drop for LedgerWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl LedgerWorld {
    pub(crate) fn new(seed: u64) -> LedgerWorld {
        let mut random = Random::new(seed);
        let size = random.between(1, 60) as usize;
        let owners = random.between(1, 12);
        let largest = random.pick(&[1, 1, 4, 20]);
        let weights: &[u64] = random.pick(&[&[1], &[1, 2, 3], &[1, 7, 1000, 1 << 50]]);
        let quotas = [usize::MAX, size.div_ceil(4), size.div_ceil(2)];
        let shares = (0..owners).map(|_| Share {
            weight: random.pick(weights),
            quota: random.pick(&quotas),
        });
        LedgerWorld {
            seed,
            size,
            ledger: Ledger::new(size),
            shares: shares.collect(),
            things: BTreeMap::new(),
            largest,
            random,
        }
    }

    pub(crate) fn run(mut self, coverage: &mut LedgerCoverage) {
        for _ in 0..OPERATIONS {
            match self.random.below(10) {
                0 => self.change_weight(),
                1..3 => self.give_back(),
                _ => self.take(coverage),
            }
            self.check();
        }
        while !self.things.is_empty() {
            self.give_back();
            self.check();
        }
        assert_eq!(self.ledger.used(), 0, "L4: all units have come back");
    }

    /// Changes the weight of an owner that holds nothing. Others keep theirs until they take more.
    fn change_weight(&mut self) {
        let owner = self.random.index(self.shares.len());
        if self.held(owner as u32) == 0 {
            self.shares[owner].weight = self.random.between(1, 9);
        }
    }

    fn give_back(&mut self) {
        let owners: Vec<u32> = self.things.keys().copied().collect();
        if !owners.is_empty() {
            let owner = self.random.pick(&owners);
            let which = self.random.index(self.things[&owner].len());
            self.remove(owner, which);
        }
    }

    fn take(&mut self, coverage: &mut LedgerCoverage) {
        let owner = self.random.index(self.shares.len()) as u32;
        let (share, units) = (self.share(owner), self.random.between(1, self.largest));
        let count = units as usize;
        let mut gave_way = 0;
        loop {
            match self.ledger.room_for(owner, share, count) {
                Ok(None) => break,
                Ok(Some(other)) => {
                    self.check_gives_way(other, owner, count);
                    let newest = self.things[&other].len() - 1;
                    self.remove(other, newest);
                    gave_way += 1;
                }
                Err(why) => {
                    assert_eq!(gave_way, 0, "L5: {owner} finds no room after all");
                    return self.check_refusal(why, owner, count, coverage);
                }
            }
        }
        let used: usize = self.things.values().flatten().sum();
        assert!(used + count <= self.size, "L1: there is no room");
        self.ledger.take(owner, share, count);
        self.things.entry(owner).or_default().push(count);
        coverage.taken += 1;
        coverage.gave_way += gave_way;
    }

    fn remove(&mut self, owner: u32, which: usize) {
        let things = self.things.get_mut(&owner).expect("the owner has things");
        let units = things.remove(which);
        if things.is_empty() {
            self.things.remove(&owner);
        }
        self.ledger.give_back(owner, units);
    }

    fn share(&self, owner: u32) -> Share {
        self.shares[owner as usize]
    }

    fn held(&self, owner: u32) -> usize {
        self.things.get(&owner).into_iter().flatten().sum()
    }

    /// Returns whether the last of `count` units of `owner` has more before it, for its weight,
    /// than the last of `other_count` units of `other`.
    fn is_above(&self, (owner, count): (u32, usize), (other, other_count): (u32, usize)) -> bool {
        let weigh = |before: usize, weight: u64| before as u128 * u128::from(weight);
        let (weight, other_weight) = (self.share(owner).weight, self.share(other).weight);
        count > 0 && weigh(count - 1, other_weight) > weigh(other_count - 1, weight)
    }

    /// Asserts that the books agree, and that no owner holds too much.
    fn check(&self) {
        let used: usize = self.things.values().flatten().sum();
        assert_eq!(self.ledger.used(), used, "L4: the sum");
        assert!(used <= self.size, "L1: {used} of {} units", self.size);
        for owner in 0..self.shares.len() as u32 {
            let held = self.held(owner);
            assert_eq!(self.ledger.used_by(owner), held, "L4: of {owner}");
            let quota = self.share(owner).quota;
            assert!(held <= quota, "L2: {owner} has {held}, above {quota}");
        }
    }

    fn check_gives_way(&self, leaving: u32, owner: u32, count: usize) {
        assert_ne!(leaving, owner, "L3: an owner does not give way to itself");
        let held = (leaving, self.held(leaving));
        let wanted = (owner, self.held(owner) + count);
        assert!(self.is_above(held, wanted), "L3: {leaving} is not above");
        for &other in self.things.keys() {
            let further = self.is_above((other, self.held(other)), held);
            assert!(!further || other == owner, "L3: {other} is further above");
        }
    }

    fn check_refusal(&self, why: NoRoom, owner: u32, count: usize, all: &mut LedgerCoverage) {
        let (held, share) = (self.held(owner), self.share(owner));
        let wanted = held + count;
        if wanted > share.quota {
            assert_eq!(why, NoRoom::OfOwner, "L2: {owner} has used up its quota");
            all.quota_used_up += 1;
            return;
        }
        assert_eq!(why, NoRoom::OfAll, "L2: {owner} is within its quota");
        let mut left = held + count;
        let others = self.things.keys().filter(|&&other| other != owner);
        for &other in others.clone() {
            let units = 1..=self.held(other);
            let kept = units.filter(|&unit| !self.is_above((other, unit), (owner, wanted)));
            left += kept.count();
        }
        assert!(left > self.size, "L5: the others could give way");
        let users = 1 + others.clone().count();
        let weights = others.clone().map(|&other| self.share(other).weight);
        if weights.clone().all(|weight| weight == share.weight) {
            let part = self.size / users;
            assert!(wanted > part, "L5: {owner} is refused below its part");
        }
        let has_two = others.clone().any(|&other| self.held(other) >= 2);
        assert!(wanted > 1 || !has_two, "L5: {owner} holds nothing");
        all.full += 1;
    }
}
