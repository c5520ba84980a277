//! The memory of keys and values, indexed by page. It knows no sequence.
//!
//! Always true: a page holds 16 tokens of every layer; for each layer and key-value head its keys,
//! `[d][16]`, stand right before its values, `[16][d]`, in half precision, beginning at a cache line.
//! All pages of a layer are neighbours: a step reads all of one layer before anything of the next, so the fewest pages of the system
//! are in use at a time. Of a layer, [`RUN_PAGES`] pages at a time stand head by head, so a sequence whose pages follow each other is
//! read in long runs. Memory that was never written costs nothing.

use std::ops::RangeInclusive;

use sterna_kernels::{HugeSlice, KvPage, PAGE_TOKENS, prefetch};

use super::placement::PageWrite;

/// Pages that stand head by head.
const RUN_PAGES: usize = 64;

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

    /// Values of one page.
    fn page(self) -> usize {
        self.layers * self.kv_heads * self.head()
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
        for layer in 0..self.shape.layers {
            for head in 0..self.shape.kv_heads {
                let [from, to] = [from, to].map(|page| self.start(layer, HeadPage { head, page }));
                let from = from..from + self.shape.head();
                self.values.copy_within(from, to);
            }
        }
    }

    /// What `layer` has at a place.
    pub(super) fn head(&self, layer: usize, place: HeadPage) -> KvPage<'_> {
        let both = self.keys_and_values(layer, place);
        let (keys, values) = both.split_at(PAGE_TOKENS * self.shape.head_dim);
        KvPage { keys, values }
    }

    /// The same in one piece.
    pub(super) fn keys_and_values(&self, layer: usize, place: HeadPage) -> &[u16] {
        let start = self.start(layer, place);
        &self.values[start..][..self.shape.head()]
    }

    /// Where a head's part of a page begins.
    fn start(&self, layer: usize, place: HeadPage) -> usize {
        let heads = layer * self.pages * self.shape.kv_heads + place.index(self.pages, self.shape);
        heads * self.shape.head()
    }

    /// The memory of `layer`, to be written: of each of `ranges` all from its first place to its last, in the order of
    /// [`write_in_order`]. The ranges must ascend.
    pub(super) fn ranges_mut(
        &mut self,
        layer: usize,
        ranges: impl Iterator<Item = RangeInclusive<HeadPage>>,
    ) -> impl Iterator<Item = HeadPagesMut<'_>> {
        let (shape, pages) = (self.shape, self.pages);
        let size = shape.kv_heads * pages * shape.head();
        let (mut rest, mut at) = (&mut self.values[layer * size..][..size], 0);
        ranges.map(move |range| {
            let [first, last] = [range.start(), range.end()].map(|place| place.index(pages, shape));
            let skip = first
                .checked_sub(at)
                .expect("places ascend: each page is written by one sequence");
            at = last + 1;
            let (values, after) = std::mem::take(&mut rest)[skip * shape.head()..]
                .split_at_mut((at - first) * shape.head());
            rest = after;
            HeadPagesMut {
                first,
                pages,
                values,
                shape,
            }
        })
    }
}

/// One head's part of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadPage {
    pub(super) head: usize,
    pub(super) page: usize,
}

impl HeadPage {
    /// Which one it is of all that a layer has, as they stand in memory. The last run may be of fewer pages than the others.
    fn index(self, pages: usize, shape: KvShape) -> usize {
        assert!(self.page < pages, "no page {} of {pages}", self.page);
        let first = self.page - self.page % RUN_PAGES;
        let run = RUN_PAGES.min(pages - first);
        first * shape.kv_heads + self.head * run + self.page - first
    }
}

/// The `index`th write of one head to one page: of all that a layer is given by `writes`, whose pages ascend, as they stand in memory.
pub(super) fn write_in_order(
    writes: &[PageWrite],
    kv_heads: usize,
    index: usize,
) -> (usize, &PageWrite) {
    let run_of = |write: &PageWrite| write.page / RUN_PAGES;
    // All heads of the writes before a run stand before all of the run.
    let run = run_of(&writes[index / kv_heads]);
    let first = writes.partition_point(|write| run_of(write) < run);
    let count = writes[first..].partition_point(|write| run_of(write) == run);
    let index = index - first * kv_heads;
    (index / count, &writes[first + index % count])
}

/// Neighbouring pages of the heads of one layer.
pub(super) struct HeadPagesMut<'a> {
    first: usize,
    pages: usize,
    values: &'a mut [u16],
    shape: KvShape,
}

impl HeadPagesMut<'_> {
    /// Asks for the memory that is about to be written: it was last used a step ago, and a token's key lies in every line of the keys.
    pub(super) fn prefetch(&mut self, head: usize, write: &PageWrite) {
        let head_dim = self.shape.head_dim;
        let (keys, values) = self.page_mut(head, write.page);
        prefetch(keys);
        prefetch(&values[write.slot * head_dim..][..write.tokens * head_dim]);
    }

    /// Keys and values of a head in a page.
    pub(super) fn page_mut(&mut self, head: usize, page: usize) -> (&mut [u16], &mut [u16]) {
        let at = HeadPage { head, page }.index(self.pages, self.shape) - self.first;
        self.values[at * self.shape.head()..][..self.shape.head()]
            .split_at_mut(PAGE_TOKENS * self.shape.head_dim)
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

    /// More than a run, and not a whole number of them.
    const PAGES: usize = 2 * RUN_PAGES + 3;

    fn places() -> impl Iterator<Item = (usize, usize, usize)> {
        let pages = (0..PAGES).flat_map(|page| [(page, 0), (page, 1)]);
        pages.flat_map(|(page, head)| (0..SHAPE.layers).map(move |layer| (page, layer, head)))
    }

    fn mark(page: usize, layer: usize, head: usize) -> u16 {
        (1 + 2 * (100 * page + 10 * layer + head)) as u16
    }

    fn writes(pages: &[usize]) -> Vec<PageWrite> {
        let write = |&page: &usize| PageWrite {
            page,
            slot: 0,
            first_token: 0,
            tokens: 1,
        };
        pages.iter().map(write).collect()
    }

    /// Writes marks to some pages of a layer, in shares of the given lengths.
    fn fill(store: &mut KvStore, layer: usize, pages: &[usize], shares: &[usize]) {
        let writes = writes(pages);
        let place = |index: usize| {
            let (head, write) = write_in_order(&writes, SHAPE.kv_heads, index);
            let page = write.page;
            HeadPage { head, page }
        };
        let mut end = 0;
        let shares: Vec<_> = shares
            .iter()
            .map(|share| {
                end += share;
                end - share..end
            })
            .collect();
        assert_eq!(end, pages.len() * SHAPE.kv_heads);
        let ranges = shares
            .iter()
            .map(|share| place(share.start)..=place(share.end - 1));
        for (mut memory, share) in store.ranges_mut(layer, ranges).zip(&shares) {
            for HeadPage { head, page } in share.clone().map(place) {
                let (keys, values) = memory.page_mut(head, page);
                assert_eq!((keys[0], values[0]), (0, 0), "written once");
                keys.fill(mark(page, layer, head));
                values.fill(mark(page, layer, head) + 1);
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_changes() {
        let pages = [
            0,
            1,
            5,
            RUN_PAGES - 1,
            RUN_PAGES,
            2 * RUN_PAGES + 1,
            PAGES - 1,
        ];
        for shares in [&[14][..], &[7, 7], &[1, 2, 3, 4, 4], &[1; 14]] {
            let mut store = KvStore::new(SHAPE, PAGES);
            fill(&mut store, 1, &pages, shares);
            for (page, layer, head) in places() {
                let read = store.head(layer, HeadPage { head, page });
                let is_written = layer == 1 && pages.contains(&page);
                let expected = if is_written {
                    [mark(page, layer, head), mark(page, layer, head) + 1]
                } else {
                    [0, 0]
                };
                let at = format!("page {page} layer {layer} head {head} in {shares:?}");
                assert!(read.keys.iter().all(|&key| key == expected[0]), "{at}");
                assert!(
                    read.values.iter().all(|&value| value == expected[1]),
                    "{at}"
                );
                assert_eq!(read.keys.as_ptr().align_offset(64), 0);
            }
        }
    }

    #[test]
    fn neighbouring_pages_of_a_head_are_neighbours_in_memory() {
        let store = KvStore::new(SHAPE, PAGES);
        let address = |page| store.head(2, HeadPage { head: 1, page }).keys.as_ptr() as usize;
        for page in (1..PAGES).filter(|page| page % RUN_PAGES != 0) {
            assert_eq!(
                address(page) - address(page - 1),
                2 * SHAPE.head(),
                "{page}"
            );
        }
    }

    #[test]
    fn a_page_is_copied_whole_and_no_other_changes() {
        let mut store = KvStore::new(SHAPE, PAGES);
        let all: Vec<usize> = (0..PAGES).collect();
        for layer in 0..SHAPE.layers {
            fill(&mut store, layer, &all, &[2 * PAGES]);
        }
        store.copy_page(1, PAGES - 1);
        store.copy_page(RUN_PAGES + 2, 0);
        for (page, layer, head) in places() {
            let source = match page {
                0 => RUN_PAGES + 2,
                _ if page == PAGES - 1 => 1,
                _ => page,
            };
            let read = store.head(layer, HeadPage { head, page });
            let mark = mark(source, layer, head);
            assert!(read.keys.iter().all(|&key| key == mark));
            assert!(read.values.iter().all(|&value| value == mark + 1));
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
