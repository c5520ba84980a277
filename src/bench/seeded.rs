//! Numbers that look random and are the same in every run.

use crate::engine::TokenId;

/// SplitMix64.
pub(super) struct Seeded(u64);

impl Seeded {
    pub(super) fn new(seed: u64) -> Seeded {
        Seeded(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// So many tokens of a vocabulary.
    pub(super) fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<TokenId> {
        let token = |_| (self.next() % vocabulary as u64) as TokenId;
        (0..count).map(token).collect()
    }
}
