//! Who comes first, among many: a heap that knows where each member stands, so that a key may change in place.
//!
//! Invariant: no two members have the same number, and each is where `places` says. Nothing here allocates once the
//! members have been in it before.

/// Members by ascending key, ties by number.
#[derive(Debug, Default)]
pub(crate) struct Ranking {
    heap: Vec<(u64, u32)>, // Key and member; a parent is never greater than its children.
    places: Vec<u32>,      // By member: its place in the heap.
    front: Vec<u32>,       // For a walk in order: places that may come next.
}

const ABSENT: u32 = u32::MAX;

impl Ranking {
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn least_key(&self) -> Option<u64> {
        self.heap.first().map(|&(key, _)| key)
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

    /// Removes a member if it is there.
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

    /// Appends to `out` up to `most` members whose keys are at most `limit`, in order.
    pub(crate) fn first(&mut self, most: usize, limit: u64, out: &mut Vec<u32>) {
        self.front.clear();
        self.front.extend((!self.heap.is_empty()).then_some(0));
        let wanted = out.len() + most;
        while out.len() < wanted {
            let nearest =
                (0..self.front.len()).min_by_key(|&at| self.heap[self.front[at] as usize]);
            let Some(at) = nearest else { return };
            let place = self.front.swap_remove(at) as usize;
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

    /// Moves the entry at `place` up or down until the order holds.
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
    use super::*;

    #[test]
    fn it_agrees_with_sorting() {
        let mut state = 1_u64;
        let mut random = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % bound
        };
        let mut ranking = Ranking::default();
        let mut truth = std::collections::BTreeMap::new();
        for _ in 0..20_000 {
            let member = random(40) as u32;
            if random(3) == 0 {
                ranking.remove(member);
                truth.remove(&member);
            } else {
                let key = random(30);
                ranking.set(member, key);
                truth.insert(member, key);
            }
            let (most, limit) = (random(12) as usize, random(30));
            let mut sorted: Vec<_> = truth.iter().map(|(&member, &key)| (key, member)).collect();
            sorted.sort_unstable();
            assert_eq!(ranking.least_key(), sorted.first().map(|&(key, _)| key));
            assert_eq!(ranking.len(), truth.len());
            sorted.retain(|&(key, _)| key <= limit);
            let expected: Vec<_> = sorted
                .iter()
                .take(most)
                .map(|&(_, member)| member)
                .collect();
            let mut found = Vec::new();
            ranking.first(most, limit, &mut found);
            assert_eq!(found, expected);
        }
    }
}
