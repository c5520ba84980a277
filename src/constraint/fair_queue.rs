//! A queue in which tenants take turns.

use std::collections::VecDeque;

/// Waiting items, in turns by tenant. A tenant's own items stay in their order.
pub(super) struct FairQueue<T> {
    tenants: VecDeque<(u32, VecDeque<T>)>, // Only tenants with items; the next one is first.
}

impl<T> Default for FairQueue<T> {
    fn default() -> FairQueue<T> {
        FairQueue {
            tenants: VecDeque::new(),
        }
    }
}

impl<T> FairQueue<T> {
    /// Adds an item of `tenant`.
    pub(super) fn push(&mut self, tenant: u32, item: T) {
        let mut tenants = self.tenants.iter_mut();
        match tenants.find(|(id, _)| *id == tenant) {
            Some((_, items)) => items.push_back(item),
            None => self.tenants.push_back((tenant, VecDeque::from([item]))),
        }
    }

    /// Takes the first item of the tenant whose turn it is.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (tenant, mut items) = self.tenants.pop_front()?;
        let item = items.pop_front();
        if !items.is_empty() {
            self.tenants.push_back((tenant, items));
        }
        item
    }

    /// Returns the number of items of `tenant`.
    pub(super) fn len_of(&self, tenant: u32) -> usize {
        let mut tenants = self.tenants.iter();
        let own = tenants.find(|(id, _)| *id == tenant);
        own.map_or(0, |(_, items)| items.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_take_turns_and_keep_their_order() {
        let mut queue = FairQueue::default();
        for (tenant, item) in [(1, "a"), (1, "b"), (1, "c"), (2, "d"), (3, "e"), (2, "f")] {
            queue.push(tenant, item);
        }
        assert_eq!((queue.len_of(1), queue.len_of(4)), (3, 0));
        let taken: Vec<&str> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(taken, ["a", "d", "e", "b", "f", "c"]);
    }
}
