//! An indexed binary heap: members in the order of their keys, and a key can change in place.
//!
//! Invariant: no member occurs twice, and `places` holds the index of each member in the heap.
//!
//! Invariant: adding a member that was in the heap before allocates nothing.

/// Members by ascending key, and by number if their keys are equal.
#[derive(Debug, Default)]
pub(crate) struct Ranking {
    heap: Vec<(u64, u32)>, // Key and member; no parent is greater than its children.
    places: Vec<u32>,      // By member: its index in the heap, or `ABSENT`.
    front: Vec<u32>,       // In `first`: the indices that may come next.
}

const ABSENT: u32 = u32::MAX;

impl Ranking {
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn least_key(&self) -> Option<u64> {
        self.heap.first().map(|&(key, _)| key)
    }

    /// Returns the members in no particular order.
    pub(crate) fn members(&self) -> impl Iterator<Item = u32> {
        self.heap.iter().map(|&(_, member)| member)
    }

    /// Adds a member, or changes its key.
    pub(crate) fn set(&mut self, member: u32, key: u64) {
        let index = member as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, ABSENT);
        }
        if self.places[index] == ABSENT {
            self.places[index] = self.heap.len() as u32;
            self.heap.push((key, member));
        }
        let place = self.places[index] as usize;
        self.heap[place].0 = key;
        self.settle(place);
    }

    /// Removes a member if it is in the heap.
    pub(crate) fn remove(&mut self, member: u32) {
        let Some(&place) = self.places.get(member as usize) else {
            return;
        };
        if place == ABSENT {
            return;
        }
        self.places[member as usize] = ABSENT;
        let (place, last) = (place as usize, self.heap.len() - 1);
        self.heap.swap_remove(place);
        if place != last {
            self.places[self.heap[place].1 as usize] = place as u32;
            self.settle(place);
        }
    }

    /// Appends to `out` up to `count` members whose keys are at most `limit`, in order.
    pub(crate) fn first(&mut self, count: usize, limit: u64, out: &mut Vec<u32>) {
        self.front.clear();
        self.front.extend((!self.heap.is_empty()).then_some(0));
        let wanted = out.len() + count;
        while out.len() < wanted {
            let nearest =
                (0..self.front.len()).min_by_key(|&index| self.heap[self.front[index] as usize]);
            let Some(index) = nearest else { return };
            let place = self.front.swap_remove(index) as usize;
            let (key, member) = self.heap[place];
            if key > limit {
                return;
            }
            out.push(member);
            let children = [2 * place + 1, 2 * place + 2].into_iter();
            let present = children.filter(|&child| child < self.heap.len());
            self.front.extend(present.map(|child| child as u32));
        }
    }

    /// Moves the entry at `place` up or down until no parent is greater than its children.
    fn settle(&mut self, mut place: usize) {
        while place > 0 && self.heap[place] < self.heap[(place - 1) / 2] {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
        loop {
            let children = [2 * place + 1, 2 * place + 2].into_iter();
            let present = children.filter(|&child| child < self.heap.len());
            match present.min_by_key(|&child| self.heap[child]) {
                Some(least) if self.heap[least] < self.heap[place] => {
                    self.swap(place, least);
                    place = least;
                }
                _ => return,
            }
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.places[self.heap[a].1 as usize] = a as u32;
        self.places[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    #[test]
    fn the_order_is_that_of_sorting() {
        let mut random = Random::new(1);
        let mut ranking = Ranking::default();
        let mut reference = std::collections::BTreeMap::new();
        for _ in 0..20_000 {
            let member = random.below(40) as u32;
            if random.below(3) == 0 {
                ranking.remove(member);
                reference.remove(&member);
            } else {
                let key = random.below(30);
                ranking.set(member, key);
                reference.insert(member, key);
            }
            let (count, limit) = (random.index(12), random.below(30));
            let mut sorted: Vec<_> = reference
                .iter()
                .map(|(&member, &key)| (key, member))
                .collect();
            sorted.sort_unstable();
            assert_eq!(ranking.least_key(), sorted.first().map(|&(key, _)| key));
            assert_eq!(ranking.len(), reference.len());
            sorted.retain(|&(key, _)| key <= limit);
            let expected: Vec<_> = sorted
                .iter()
                .take(count)
                .map(|&(_, member)| member)
                .collect();
            let mut found = Vec::new();
            ranking.first(count, limit, &mut found);
            assert_eq!(found, expected);
        }
    }
}
