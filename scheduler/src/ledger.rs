//! How much there is of something, how much of it each owner holds, and who gives way when it is
//! full.
//!
//! Connections, bodies, places in queues and cached grammars have a ledger each, of their own size
//! (ARCHITECTURE.md lists them). A ledger only counts. Its user keeps the things that are counted,
//! and decides which of an owner's things leaves.
//!
//! The units of an owner are in the order in which the owner took them. The number of units before
//! a unit counts relative to the owner's weight. A full ledger has room for an owner if everything
//! fits once each other owner is cut down to this owner's level: no other owner keeps a unit with
//! more before it than the last new unit has. The owner whose last unit has the most before it
//! gives way. This is the longest-queue drop (Suter et al., INFOCOM 1998), weighted, and the result
//! is max-min fair.
//!
//! ```text
//! room_for(owner, count):
//!     if the owner would hold more than its quota: refuse
//!     if count fits: it has room
//!     if count fits once the others are cut down to the owner's level:
//!         the owner furthest above the others gives way, and the caller asks again
//!     refuse
//! ```
//!
//! A fixed part for each owner, the size divided by the number of owners, was rejected. With many
//! owners a part rounds to nothing, and the unused rest of small owners' parts would need rules of
//! its own.
//!
//! Invariant: of `n` owners of equal weight, an owner that wants at most the size divided by `n`
//! always finds room. An owner that holds nothing finds room for a unit as long as another owner
//! holds two.
//!
//! Invariant: an owner gives way only to an owner that stays below it, and never in vain: once an
//! owner has given way, the same request finds room, perhaps after more owners have given way. So
//! owners that flood a ledger cannot displace each other in turns.

use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Returns the part of something that one tenant may hold at most, so that no tenant fills it.
pub const fn quarter(size: usize) -> usize {
    size.div_ceil(4)
}

/// What an owner may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its part of a full ledger, relative to other owners, at least 1.
    pub weight: u64,
    /// The most that it may hold, however much is left.
    pub quota: usize,
}

impl Share {
    /// An equal part of a full ledger, without a quota.
    pub const EQUAL: Share = Share::with_quota(usize::MAX);

    /// Returns an equal part of a full ledger, and at most `quota`.
    pub const fn with_quota(quota: usize) -> Share {
        Share { weight: 1, quota }
    }
}

/// Why an owner finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// Its quota is used up.
    OfOwner,
    /// The ledger is full, and no other owner has to give way.
    OfAll,
}

/// The units of something, by owner.
#[derive(Debug)]
pub struct Ledger<O> {
    size: usize,
    used: usize,
    accounts: BTreeMap<O, Account>, // Only of owners that hold some.
}

#[derive(Clone, Copy, Debug)]
struct Account {
    used: usize,
    weight: u64,
}

/// What stands before a unit, for its owner's weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) before: u64,
    pub(crate) weight: u64,
}

impl Standing {
    /// Compares `before / weight` without fractions. The greater one gives way first.
    pub(crate) fn compare(&self, other: &Standing) -> Ordering {
        let own = u128::from(self.before) * u128::from(other.weight);
        own.cmp(&(u128::from(other.before) * u128::from(self.weight)))
    }
}

impl Account {
    /// Returns the standing of the last unit.
    fn last(&self) -> Standing {
        Standing {
            before: self.used.saturating_sub(1) as u64,
            weight: self.weight,
        }
    }

    /// Returns the number of units that have more before them than `level`.
    fn above(&self, level: &Standing) -> usize {
        let most = u128::from(level.before) * u128::from(self.weight) / u128::from(level.weight);
        let kept = usize::try_from(most + 1).unwrap_or(usize::MAX);
        self.used.saturating_sub(kept)
    }
}

impl<O: Copy + Ord> Ledger<O> {
    /// Creates an empty ledger of `size` units.
    pub fn new(size: usize) -> Ledger<O> {
        Ledger {
            size,
            used: 0,
            accounts: BTreeMap::new(),
        }
    }

    /// Returns the number of units that are taken.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Returns the number of units that `owner` holds.
    pub fn used_by(&self, owner: O) -> usize {
        self.accounts.get(&owner).map_or(0, |account| account.used)
    }

    /// Returns the owner that must give way before `owner` can take `count` more units, `None` if
    /// they fit. If several owners are equally far above, the last of them gives way.
    ///
    /// # Errors
    /// If there is no room, even if others give way.
    pub fn room_for(&self, owner: O, share: Share, count: usize) -> Result<Option<O>, NoRoom> {
        let (used, weight) = (self.used_by(owner) + count, share.weight);
        if used > share.quota {
            return Err(NoRoom::OfOwner);
        }
        let missing = (self.used + count).saturating_sub(self.size);
        if missing == 0 {
            return Ok(None);
        }
        let level = Account { used, weight }.last();
        let others = self.accounts.iter().filter(|(other, _)| **other != owner);
        let above = others.clone().map(|(_, account)| account.above(&level));
        if above.sum::<usize>() < missing {
            return Err(NoRoom::OfAll);
        }
        let furthest = others.max_by(|(_, a), (_, b)| a.last().compare(&b.last()));
        Ok(furthest.map(|(other, _)| *other))
    }

    /// Takes `count` units for `owner`, which has asked for room.
    pub fn take(&mut self, owner: O, share: Share, count: usize) {
        self.set(owner, share.weight, self.used_by(owner) + count);
    }

    /// Gives back `count` units of `owner`.
    ///
    /// # Panics
    /// If the owner does not hold as many.
    pub fn give_back(&mut self, owner: O, count: usize) {
        let weight = self
            .accounts
            .get(&owner)
            .map_or(1, |account| account.weight);
        let left = self.used_by(owner).checked_sub(count);
        self.set(
            owner,
            weight,
            left.expect("an owner gives back what it holds"),
        );
    }

    fn set(&mut self, owner: O, weight: u64, used: usize) {
        let before = match used {
            0 => self.accounts.remove(&owner),
            _ => self.accounts.insert(owner, Account { used, weight }),
        };
        self.used = self.used - before.map_or(0, |account| account.used) + used;
    }
}
