//! A queue in which tenants take turns.

use std::collections::VecDeque;

use sterna_scheduler::{Ledger, NoRoom, Share, quarter};

/// Waiting items, in turns by tenant. A tenant's own items stay in their order.
///
/// Invariant: if the queue is full, the tenant with most items loses its newest one.
pub(super) struct FairQueue<T> {
    tenants: VecDeque<(u32, VecDeque<T>)>, // Only tenants with items; the next one is first.
    places: Ledger<u32>,
    quota: Share,
}

impl<T> FairQueue<T> {
    /// Creates an empty queue of `size` places. A tenant may fill a quarter of them.
    pub(super) fn new(size: usize) -> FairQueue<T> {
        FairQueue {
            tenants: VecDeque::new(),
            places: Ledger::new(size),
            quota: Share::with_quota(quarter(size)),
        }
    }

    /// Returns the number of items.
    pub(super) fn len(&self) -> usize {
        self.places.used()
    }

    /// Adds an item of `tenant`. Returns the item that loses its place, if any.
    pub(super) fn push(&mut self, tenant: u32, item: T) -> Result<Option<T>, NoRoom> {
        let most = self.places.room_for(tenant, self.quota, 1)?;
        let displaced = most.and_then(|most| self.pop_newest_of(most));
        self.places.take(tenant, self.quota, 1);
        let mut tenants = self.tenants.iter_mut();
        match tenants.find(|(id, _)| *id == tenant) {
            Some((_, items)) => items.push_back(item),
            None => self.tenants.push_back((tenant, VecDeque::from([item]))),
        }
        Ok(displaced)
    }

    /// Takes the first item of the tenant whose turn it is. Tenants that are not `free` wait.
    pub(super) fn pop(&mut self, is_free: impl Fn(u32) -> bool) -> Option<T> {
        let place = self.tenants.iter().position(|(id, _)| is_free(*id))?;
        let (tenant, mut items) = self.tenants.remove(place)?;
        self.places.give_back(tenant, 1);
        let item = items.pop_front();
        if !items.is_empty() {
            self.tenants.push_back((tenant, items));
        }
        item
    }

    fn pop_newest_of(&mut self, tenant: u32) -> Option<T> {
        self.places.give_back(tenant, 1);
        let place = self.tenants.iter().position(|(id, _)| *id == tenant)?;
        let (_, items) = &mut self.tenants[place];
        let item = items.pop_back();
        if items.is_empty() {
            self.tenants.remove(place);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_tenants_take_turns_and_keep_their_order() {
        let mut queue = FairQueue::new(100);
        for (tenant, item) in [(1, "a"), (1, "b"), (1, "c"), (2, "d"), (3, "e"), (2, "f")] {
            assert_eq!(queue.push(tenant, item), Ok(None));
        }
        let taken: Vec<&str> = std::iter::from_fn(|| queue.pop(|tenant| tenant != 3)).collect();
        assert_eq!(taken, ["a", "d", "b", "f", "c"]);
        assert_eq!(queue.pop(|_| true), Some("e"));
    }

    #[test]
    fn in_a_full_queue_the_tenant_with_most_items_loses_its_newest_one() {
        let mut queue = FairQueue::new(8);
        for (tenant, item) in (1..=4).flat_map(|tenant| [(tenant, 10), (tenant, 20)]) {
            assert_eq!(queue.push(tenant, tenant + item), Ok(None));
        }
        assert_eq!(queue.push(4, 34), Err(NoRoom::OfOwner));
        assert_eq!(queue.push(5, 15), Ok(Some(24)));
        assert_eq!(queue.push(5, 25), Err(NoRoom::OfAll));
        let taken: Vec<u32> = std::iter::from_fn(|| queue.pop(|_| true)).collect();
        assert_eq!(taken, [11, 12, 13, 14, 15, 21, 22, 23]);
        assert_eq!(queue.places.used(), 0);
    }
}
