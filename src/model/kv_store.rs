//! The memory of keys and values, indexed by page. It knows no sequence.
//!
//! Always true: a page holds 16 tokens of every layer; for each layer and key-value head its keys,
//! `[d][16]`, stand right before its values, `[16][d]`, in half precision, beginning at a cache line.
//! All pages of a layer are neighbours: a step reads all of one layer before anything of the next, so the fewest pages of the
//! system are in use at a time. Memory that was never written costs nothing.

use std::ops::Range;

use sterna_kernels::{HugeSlice, KvPage, PAGE_TOKENS, prefetch};

use super::placement::PageWrite;

/// Sizes of what a token leaves in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvShape {
    pub(super) layers: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

impl KvShape {
    /// Values of one page of one head: keys and values.
    fn head(self) -> usize {
        2 * PAGE_TOKENS * self.head_dim
    }

    /// Values of one page of one layer.
    fn layer(self) -> usize {
        self.kv_heads * self.head()
    }

    /// Values of one page.
    fn page(self) -> usize {
        self.layers * self.layer()
    }

    /// Bytes of one page.
    pub(super) fn page_bytes(self) -> usize {
        self.page() * size_of::<u16>()
    }
}

/// Keys and values of all sequences, in pages of [`PAGE_TOKENS`] tokens.
pub struct KvStore {
    shape: KvShape,
    pages: usize,
    values: HugeSlice<u16>,
}

impl KvStore {
    pub(super) fn new(shape: KvShape, pages: usize) -> KvStore {
        KvStore {
            shape,
            pages,
            values: HugeSlice::new(pages * shape.page()),
        }
    }

    /// How many pages there are.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Fills the store with NaN.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.values.fill(u16::MAX);
    }

    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Copies all of page `from`, every layer, to page `to`.
    ///
    /// # Panics
    /// If there is no such page.
    pub(super) fn copy_page(&mut self, from: usize, to: usize) {
        assert!(
            from < self.pages && to < self.pages,
            "page {from} is copied to {to}, of {}",
            self.pages
        );
        let size = self.shape.layer();
        for layer in self.values.chunks_exact_mut(self.pages * size) {
            layer.copy_within(from * size..(from + 1) * size, to * size);
        }
    }

    /// What `head` of `layer` has in `page`.
    pub(super) fn head(&self, page: usize, layer: usize, head: usize) -> KvPage<'_> {
        let at = (layer * self.pages + page) * self.shape.layer() + head * self.shape.head();
        let (keys, values) =
            self.values[at..][..self.shape.head()].split_at(PAGE_TOKENS * self.shape.head_dim);
        KvPage { keys, values }
    }

    /// What `layer` has in the pages of each of `ranges`, to be written; the ranges must ascend.
    pub(super) fn ranges_mut(
        &mut self,
        layer: usize,
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> impl Iterator<Item = PagesMut<'_>> {
        let shape = self.shape;
        let size = shape.layer();
        let values = &mut self.values[layer * self.pages * size..][..self.pages * size];
        let (mut rest, mut at) = (values, 0);
        ranges.map(move |pages| {
            let skip = pages
                .start
                .checked_sub(at)
                .expect("pages ascend: each is written by one sequence");
            at = pages.end;
            let (values, after) =
                std::mem::take(&mut rest)[skip * size..].split_at_mut(pages.len() * size);
            rest = after;
            PagesMut {
                first: pages.start,
                values,
                shape,
            }
        })
    }
}

/// Neighbouring pages of one layer.
pub(super) struct PagesMut<'a> {
    first: usize,
    values: &'a mut [u16],
    shape: KvShape,
}

impl PagesMut<'_> {
    /// Asks for the memory that is about to be written: it was last used a step ago, and a token's key lies in every line of the keys.
    pub(super) fn prefetch(&mut self, write: &PageWrite) {
        let head_dim = self.shape.head_dim;
        for (keys, values) in self.heads_mut(write.page) {
            prefetch(keys);
            prefetch(&values[write.slot * head_dim..][..write.tokens * head_dim]);
        }
    }

    /// Keys and values of `page`, head by head.
    pub(super) fn heads_mut(
        &mut self,
        page: usize,
    ) -> impl Iterator<Item = (&mut [u16], &mut [u16])> {
        let at = (page - self.first) * self.shape.layer();
        let keys = PAGE_TOKENS * self.shape.head_dim;
        self.values[at..][..self.shape.layer()]
            .chunks_exact_mut(self.shape.head())
            .map(move |head| head.split_at_mut(keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        layers: 3,
        kv_heads: 2,
        head_dim: 16,
    };

    #[test]
    fn what_is_written_is_read_and_nothing_else_changes() {
        let mut store = KvStore::new(SHAPE, 5);
        let mut marks = 1..;
        for mut pages in store.ranges_mut(1, [0..1, 2..4].into_iter()) {
            for page in pages.first..pages.first + pages.values.len() / SHAPE.layer() {
                let mark = marks.next().unwrap();
                for (head, (keys, values)) in (0..).zip(pages.heads_mut(page)) {
                    keys.fill(100 * mark + 10 * head);
                    values.fill(100 * mark + 10 * head + 1);
                }
            }
        }
        for (page, mark) in [(0, 1), (1, 0), (2, 2), (3, 3), (4, 0)] {
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                let read = store.head(page, layer, head);
                let expected = if layer == 1 && mark > 0 {
                    100 * mark + 10 * head as u16
                } else {
                    0
                };
                assert!(
                    read.keys.iter().all(|&key| key == expected),
                    "page {page} layer {layer} head {head}"
                );
                assert!(
                    read.values
                        .iter()
                        .all(|&value| value == expected.saturating_add(u16::from(expected > 0)))
                );
                assert_eq!(read.keys.as_ptr().align_offset(64), 0);
            }
        }
    }

    #[test]
    fn a_page_is_copied_whole_and_no_other_changes() {
        let mut store = KvStore::new(SHAPE, 4);
        for layer in 0..SHAPE.layers {
            for mut pages in store.ranges_mut(layer, std::iter::once(0..4)) {
                for page in 0..4 {
                    for (head, (keys, values)) in (0..).zip(pages.heads_mut(page)) {
                        let mark = (1000 * page + 100 * layer) as u16 + 10 * head;
                        keys.fill(mark);
                        values.fill(mark + 1);
                    }
                }
            }
        }
        store.copy_page(1, 3);
        store.copy_page(2, 0);
        for (page, source) in [(0, 2), (1, 1), (2, 2), (3, 1)] {
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                let read = store.head(page, layer, head);
                let mark = (1000 * source + 100 * layer + 10 * head) as u16;
                assert!(read.keys.iter().all(|&key| key == mark));
                assert!(read.values.iter().all(|&value| value == mark + 1));
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 1 is copied to 4, of 4")]
    fn a_page_that_is_not_there_is_not_written() {
        KvStore::new(SHAPE, 4).copy_page(1, 4);
    }

    #[test]
    fn a_page_is_as_large_as_announced() {
        let store = KvStore::new(SHAPE, 7);
        assert_eq!(store.values.len(), 7 * SHAPE.page_bytes() / 2);
        assert_eq!(SHAPE.page_bytes(), 3 * 2 * 2 * 16 * 16 * 2);
    }
}
