//! The name of one page of KV memory.

/// The number of tokens in a page. Measured: larger pages share less of a prefix and save little
/// time in attention.
pub const PAGE_TOKENS: usize = 16;

/// One page of KV memory: an index into the caller's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(u32);

impl Page {
    /// Creates the name of the page at `index`. Callers that build a batch by hand use it.
    pub fn new(index: u32) -> Page {
        Page(index)
    }

    /// Returns the page's place in the store.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
