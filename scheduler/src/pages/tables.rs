//! The page tables of all running sequences in one array, so that a batch refers to them and copies
//! none.
//!
//! Invariant: only the first `len` entries of a table are valid.
//!
//! Invariant: opening and closing a table allocate nothing.

use crate::Page;

/// One sequence's page table: its pages in the order of positions, tree pages before private pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageTable {
    pub(crate) first: usize, // The index of its first entry in the array of all tables.
    pub(crate) len: usize,
    pub(crate) published: usize, // The number of its tree pages.
}

impl PageTable {
    /// Notes that the first `pages` pages are tree pages.
    pub(crate) fn mark_published(&mut self, pages: usize) {
        self.published = pages;
    }

    /// Keeps the first `len` pages.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = len;
    }
}

/// All page tables. Each has the capacity for the longest sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageTables {
    pages: Vec<Page>,
    capacity: usize,  // Of one table, in pages.
    free: Vec<usize>, // The first entries of the tables that are not open.
}

impl PageTables {
    /// Reserves `count` tables of `capacity` pages. The memory of a table is first touched when it
    /// opens.
    ///
    /// # Panics
    /// If the pages of all tables cannot be numbered by 32 bits.
    pub(crate) fn new(count: usize, capacity: usize) -> PageTables {
        let all = count * capacity;
        assert!(
            u32::try_from(all).is_ok(),
            "a row stores the index of its page table in 32 bits"
        );
        PageTables {
            pages: Vec::with_capacity(all),
            capacity,
            free: (0..count).rev().map(|table| table * capacity).collect(),
        }
    }

    /// Opens an empty table.
    ///
    /// # Panics
    /// If all tables are open.
    pub(crate) fn open(&mut self) -> PageTable {
        let first = self
            .free
            .pop()
            .expect("there are as many tables as sequences may run");
        let end = self.pages.len().max(first + self.capacity);
        self.pages.resize(end, Page::new(0));
        PageTable {
            first,
            ..PageTable::default()
        }
    }

    pub(crate) fn close(&mut self, table: PageTable) {
        self.free.push(table.first);
    }

    /// Returns the first entries of the tables that are not open.
    pub(crate) fn free(&self) -> &[usize] {
        &self.free
    }

    pub(crate) fn push(&mut self, table: &mut PageTable, page: Page) {
        assert!(table.len < self.capacity, "the page table is full");
        self.pages[table.first + table.len] = page;
        table.len += 1;
    }

    pub(crate) fn get(&self, table: &PageTable) -> &[Page] {
        self.slice(table.first, table.len)
    }

    pub(crate) fn get_mut(&mut self, table: &PageTable) -> &mut [Page] {
        &mut self.pages[table.first..][..table.len]
    }

    /// Returns `len` entries from index `first` of the array of all tables.
    pub(crate) fn slice(&self, first: usize, len: usize) -> &[Page] {
        &self.pages[first..][..len]
    }

    /// Adds a table of exactly these pages for a batch that is built by hand. Returns the index of
    /// its first entry.
    pub(crate) fn append(&mut self, pages: &[Page]) -> usize {
        let first = self.pages.len();
        self.pages.extend_from_slice(pages);
        first
    }

    /// Removes the tables that were appended.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_do_not_overlap_and_a_closed_table_is_reused() {
        let mut tables = PageTables::new(3, 2);
        let memory = tables.pages.as_ptr();
        let mut open = [(); 3].map(|()| tables.open());
        for page in 0..6 {
            tables.push(&mut open[page as usize % 3], Page::new(page));
        }
        let [first, second, third] = open;
        tables.get_mut(&second)[0] = Page::new(9);
        tables.close(second);
        let fourth = tables.open();
        assert_eq!((fourth.first, tables.get(&fourth)), (second.first, &[][..]));
        assert_eq!(tables.get(&first), [0, 3].map(Page::new));
        assert_eq!(tables.get(&third), [2, 5].map(Page::new));
        assert_eq!(
            tables.pages.as_ptr(),
            memory,
            "the array was not reallocated"
        );
    }
}
