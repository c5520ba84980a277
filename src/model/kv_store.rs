//! The KV store: keys and values of all sequences, by page. It has no notion of sequences.
//!
//! Invariant: a page holds 16 tokens of every layer. For each layer and key-value head, the keys,
//! the values and their scales begin at a cache line, as [`KvDtype`] lays them out.
//!
//! Invariant: all pages of a layer are neighbours. A step reads all of one layer before it reads
//! the next, so it uses as few pages of the system at a time as possible. Within a layer, runs of
//! [`RUN_PAGES`] pages are stored head by head, so a sequence with neighbouring pages is read in
//! long runs.
//!
//! The memory of the first pages is taken at the start, and the rest in parts while the engine is
//! idle ([`KvStore::take_memory`]): a large machine needs seconds for all of it.

use std::io;
use std::ops::RangeInclusive;

use sterna_kernels::{HugeSlice, KvDtype, PAGE_TOKENS, prefetch};

use super::placement::PageWrite;
use super::state_store::StateStore;

/// The number of neighbouring pages that are stored head by head.
const RUN_PAGES: usize = 64;

/// The memory that is taken at the start: enough for the first requests, and for the steps whose
/// time is measured.
const START_BYTES: usize = 1 << 30;

/// The memory that is taken at a time, in some milliseconds.
const PART_BYTES: usize = 16 << 20;

/// The sizes of the keys and values of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvShape {
    pub(super) layers: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: KvDtype,
}

impl KvShape {
    /// Returns the bytes of one head in one page.
    fn head(self) -> usize {
        self.dtype.page_bytes(self.head_dim)
    }

    /// Returns the bytes of one page.
    pub(super) fn page_bytes(self) -> usize {
        self.layers * self.kv_heads * self.head()
    }

    /// Returns the bytes of one token.
    pub(super) fn token_bytes(self) -> usize {
        self.page_bytes() / PAGE_TOKENS
    }
}

/// The keys and values of all sequences, in pages of [`PAGE_TOKENS`] tokens, and the states of
/// recurrent layers beside them.
pub struct KvStore {
    shape: KvShape,
    pages: usize,
    bytes: HugeSlice<u8>,
    taken: usize, // Of `bytes`, whose memory is taken from its start on.
    states: Option<StateStore>,
}

impl KvStore {
    /// Reserves the memory for `pages` pages, and takes that of the first of them.
    ///
    /// # Errors
    /// If the system does not have it.
    pub(super) fn new(shape: KvShape, pages: usize) -> io::Result<KvStore> {
        let mut store = KvStore {
            shape,
            pages,
            bytes: HugeSlice::reserve(pages * shape.page_bytes())?,
            taken: 0,
            states: None,
        };
        let runs = START_BYTES / (RUN_PAGES * shape.page_bytes()).max(1);
        let first = pages.min(runs.max(1) * RUN_PAGES);
        let page = shape.kv_heads * shape.head();
        for layer in 0..shape.layers {
            let start = layer * pages * page;
            store.bytes.commit(start..start + first * page)?;
        }
        Ok(store)
    }

    /// Takes the next part of the memory that is not taken yet. Pages may have been written.
    /// Returns whether there is more to take.
    ///
    /// # Errors
    /// If the system does not have the memory and says so. The first write to a page takes it too.
    pub fn take_memory(&mut self) -> io::Result<bool> {
        let end = self.bytes.len().min(self.taken + PART_BYTES);
        self.bytes.commit(self.taken..end)?;
        self.taken = end;
        match &mut self.states {
            _ if end < self.bytes.len() => Ok(true),
            Some(states) => states.take_memory(PART_BYTES),
            None => Ok(false),
        }
    }

    /// Adds the states of recurrent layers, and takes some of their memory.
    ///
    /// # Errors
    /// If the system does not have it.
    pub(super) fn with_states(self, mut states: StateStore) -> io::Result<KvStore> {
        states.take_memory(START_BYTES)?;
        let states = Some(states);
        Ok(KvStore { states, ..self })
    }

    /// Returns the states of recurrent layers.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn states_mut(&mut self) -> &mut StateStore {
        let states = self.states.as_mut();
        states.expect("the store of a model with recurrent layers has states")
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the number format of keys and values.
    pub(super) fn dtype(&self) -> KvDtype {
        self.shape.dtype
    }

    /// Copies page `from` to page `to`, in every layer.
    ///
    /// # Panics
    /// If one of the pages does not exist.
    pub(super) fn copy_page(&mut self, from: usize, to: usize) {
        let pages = self.pages;
        assert!(
            from < pages && to < pages,
            "cannot copy page {from} to page {to} in a store of {pages} pages"
        );
        for layer in 0..self.shape.layers {
            for head in 0..self.shape.kv_heads {
                let [from, to] = [from, to].map(|page| self.start(layer, HeadPage { head, page }));
                let from = from..from + self.shape.head();
                self.bytes.copy_within(from, to);
            }
        }
    }

    /// Returns the keys and values of `layer` at a place.
    pub(super) fn head(&self, layer: usize, place: HeadPage) -> &[u8] {
        let start = self.start(layer, place);
        &self.bytes[start..][..self.shape.head()]
    }

    /// Returns the index of the first byte at a place.
    fn start(&self, layer: usize, place: HeadPage) -> usize {
        let heads = layer * self.pages * self.shape.kv_heads + place.index(self.pages, self.shape);
        heads * self.shape.head()
    }

    /// Returns the memory of `layer` for each of `ranges`, from its first place to its last, in the
    /// order of [`write_in_order`].
    ///
    /// # Panics
    /// If the ranges do not ascend.
    pub(super) fn ranges_mut(
        &mut self,
        layer: usize,
        ranges: impl Iterator<Item = RangeInclusive<HeadPage>>,
    ) -> impl Iterator<Item = HeadPagesMut<'_>> {
        let (shape, pages) = (self.shape, self.pages);
        let size = shape.kv_heads * pages * shape.head();
        let (mut rest, mut at) = (&mut self.bytes[layer * size..][..size], 0);
        ranges.map(move |range| {
            let [first, last] = [range.start(), range.end()].map(|place| place.index(pages, shape));
            let skip = first
                .checked_sub(at)
                .expect("places ascend, because one sequence writes each page");
            at = last + 1;
            let (bytes, after) = std::mem::take(&mut rest)[skip * shape.head()..]
                .split_at_mut((at - first) * shape.head());
            rest = after;
            HeadPagesMut {
                first,
                pages,
                bytes,
                shape,
            }
        })
    }
}

/// The place of one head's keys and values: a head and a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadPage {
    pub(super) head: usize,
    pub(super) page: usize,
}

impl HeadPage {
    /// Returns the index of the place in a layer of `pages` pages, in the order of memory. The last
    /// run may have fewer pages than the others.
    fn index(self, pages: usize, shape: KvShape) -> usize {
        assert!(self.page < pages, "no page {} of {pages}", self.page);
        let first = self.page - self.page % RUN_PAGES;
        let run = RUN_PAGES.min(pages - first);
        first * shape.kv_heads + self.head * run + self.page - first
    }
}

/// Returns write `index` of a layer, as a head and a write of its page, in the order of memory. The
/// pages of `writes` ascend.
pub(super) fn write_in_order(
    writes: &[PageWrite],
    kv_heads: usize,
    index: usize,
) -> (usize, &PageWrite) {
    let run_of = |write: &PageWrite| write.page / RUN_PAGES;
    // All heads of the runs before come first.
    let run = run_of(&writes[index / kv_heads]);
    let first = writes.partition_point(|write| run_of(write) < run);
    let count = writes[first..].partition_point(|write| run_of(write) == run);
    let index = index - first * kv_heads;
    (index / count, &writes[first + index % count])
}

/// The memory of neighbouring places in one layer.
pub(super) struct HeadPagesMut<'a> {
    first: usize,
    pages: usize,
    bytes: &'a mut [u8],
    shape: KvShape,
}

impl HeadPagesMut<'_> {
    /// Prefetches the memory that `write` is about to change. It was last used a step ago, and a
    /// token's key is spread over every cache line of the keys.
    pub(super) fn prefetch(&mut self, head: usize, write: &PageWrite) {
        let KvShape {
            dtype, head_dim, ..
        } = self.shape;
        let page = self.page_mut(head, write.page);
        let keys = dtype.value_range(head_dim, 0..PAGE_TOKENS).start;
        let values = dtype.value_range(head_dim, write.slot..write.slot + write.tokens);
        let scales = dtype.value_range(head_dim, 0..PAGE_TOKENS).end;
        prefetch(&page[..keys]);
        prefetch(&page[values]);
        prefetch(&page[scales..]);
    }

    /// Returns the keys and values of a head in a page.
    pub(super) fn page_mut(&mut self, head: usize, page: usize) -> &mut [u8] {
        let at = HeadPage { head, page }.index(self.pages, self.shape) - self.first;
        &mut self.bytes[at * self.shape.head()..][..self.shape.head()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl KvStore {
        /// Fills the store with NaN.
        pub(in crate::model) fn poison(&mut self) {
            self.bytes.fill(u8::MAX);
        }
    }

    const SHAPE: KvShape = KvShape {
        layers: 3,
        kv_heads: 2,
        head_dim: 16,
        dtype: KvDtype::Int8,
    };

    /// More than one run, and not a multiple of it.
    const PAGES: usize = 2 * RUN_PAGES + 3;

    fn places() -> impl Iterator<Item = (usize, usize, usize)> {
        let pages = (0..PAGES).flat_map(|page| [(page, 0), (page, 1)]);
        pages.flat_map(|(page, head)| (0..SHAPE.layers).map(move |layer| (page, layer, head)))
    }

    fn mark(page: usize, layer: usize, head: usize) -> [u8; 2] {
        ((1 + 100 * page + 10 * layer + head) as u16).to_le_bytes()
    }

    /// Returns whether all of some memory is a mark.
    fn is_mark(memory: &[u8], mark: [u8; 2]) -> bool {
        memory.as_chunks().0.iter().all(|&pair| pair == mark)
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

    /// Writes a mark to each given page of a layer, in shares of the given lengths.
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
                let memory = memory.page_mut(head, page);
                assert!(is_mark(memory, [0, 0]), "written once");
                memory.as_chunks_mut().0.fill(mark(page, layer, head));
            }
        }
    }

    #[test]
    fn written_pages_are_read_back_and_no_other_page_changes() {
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
            let mut store = KvStore::new(SHAPE, PAGES).unwrap();
            fill(&mut store, 1, &pages, shares);
            for (page, layer, head) in places() {
                let read = store.head(layer, HeadPage { head, page });
                let is_written = layer == 1 && pages.contains(&page);
                let expected = if is_written {
                    mark(page, layer, head)
                } else {
                    [0, 0]
                };
                let at = format!("page {page} layer {layer} head {head} in {shares:?}");
                assert!(is_mark(read, expected), "{at}");
                assert_eq!(read.as_ptr().align_offset(64), 0);
            }
        }
    }

    #[test]
    fn neighbouring_pages_of_a_head_are_neighbours_in_memory() {
        let store = KvStore::new(SHAPE, PAGES).unwrap();
        let address = |page| store.head(2, HeadPage { head: 1, page }).as_ptr() as usize;
        for page in (1..PAGES).filter(|page| page % RUN_PAGES != 0) {
            assert_eq!(address(page) - address(page - 1), SHAPE.head(), "{page}");
        }
    }

    #[test]
    fn a_copy_covers_the_whole_page_and_no_other_page_changes() {
        let mut store = KvStore::new(SHAPE, PAGES).unwrap();
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
            assert!(is_mark(read, mark(source, layer, head)));
        }
    }

    #[test]
    #[should_panic(expected = "cannot copy page 1 to page 4 in a store of 4 pages")]
    fn a_copy_to_a_page_that_does_not_exist_panics() {
        KvStore::new(SHAPE, 4).unwrap().copy_page(1, 4);
    }

    #[test]
    fn memory_is_taken_to_its_end_and_keeps_what_was_written() {
        for pages in [0, 4, 6000] {
            let mut store = KvStore::new(SHAPE, pages).unwrap();
            let all: Vec<usize> = (0..pages).collect();
            if pages > 0 {
                fill(&mut store, 1, &all, &[2 * pages]);
            }
            let mut parts = 1;
            while store.take_memory().unwrap() {
                parts += 1;
            }
            assert_eq!(parts, store.bytes.len().div_ceil(PART_BYTES).max(1));
            for page in all {
                let read = store.head(1, HeadPage { head: 1, page });
                assert!(is_mark(read, mark(page, 1, 1)));
            }
        }
    }

    #[test]
    fn a_page_has_the_size_that_the_shape_states() {
        for dtype in KvDtype::ALL {
            let shape = KvShape { dtype, ..SHAPE };
            let store = KvStore::new(shape, 7).unwrap();
            assert_eq!(store.bytes.len(), 7 * shape.page_bytes());
            let head = match dtype {
                KvDtype::F16 | KvDtype::Bf16 => 2 * 16 * 16 * 2,
                _ => 2 * 16 * 16 + 2 * 16 * 2,
            };
            assert_eq!(shape.page_bytes(), 3 * 2 * head);
            assert_eq!(shape.token_bytes() * PAGE_TOKENS, shape.page_bytes());
        }
    }

    #[test]
    fn eight_bits_hold_1_97_times_the_tokens_of_half_precision_with_heads_of_128() {
        let [half, eight] = [KvDtype::F16, KvDtype::Int8].map(|dtype| {
            let shape = KvShape {
                layers: 30,
                kv_heads: 5,
                head_dim: 128,
                dtype,
            };
            shape.token_bytes()
        });
        assert_eq!([half, eight], [76_800, 39_000]);
    }
}
