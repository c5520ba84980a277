//! The page tables of those who run, side by side, so that a step's batch holds them where they stand and copies none.
//!
//! Invariant: of each table only the first `len` places mean anything. Opening and closing allocate nothing.

use crate::Page;

/// Where a sequence's pages stand, by position: first those in the tree, then its private ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageTable {
    pub(crate) first: usize, // Its place among all pages of all tables.
    pub(crate) len: usize,
    pub(crate) in_tree: usize,
}

/// All page tables. Whoever runs has room for as many pages as the longest sequence takes.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageTables {
    pages: Vec<Page>,
    room: usize,      // Of a table.
    free: Vec<usize>, // Where a table may begin.
}

impl PageTables {
    /// Room for `count` tables of `room` pages. Its memory is touched when so many are open.
    ///
    /// # Panics
    /// If the pages of all tables cannot be numbered by 32 bits.
    pub(crate) fn new(count: usize, room: usize) -> PageTables {
        let all = count * room;
        assert!(u32::try_from(all).is_ok(), "rows name their page tables");
        PageTables {
            pages: Vec::with_capacity(all),
            room,
            free: (0..count).rev().map(|table| table * room).collect(),
        }
    }

    /// An empty table.
    ///
    /// # Panics
    /// If all are open.
    pub(crate) fn open(&mut self) -> PageTable {
        let first = self.free.pop().expect("as many as may run");
        let end = self.pages.len().max(first + self.room);
        self.pages.resize(end, Page::new(0));
        PageTable {
            first,
            ..PageTable::default()
        }
    }

    pub(crate) fn close(&mut self, table: PageTable) {
        self.free.push(table.first);
    }

    /// Where the tables begin that are not open.
    pub(crate) fn free(&self) -> &[usize] {
        &self.free
    }

    pub(crate) fn push(&mut self, table: &mut PageTable, page: Page) {
        assert!(table.len < self.room, "no sequence is longer");
        self.pages[table.first + table.len] = page;
        table.len += 1;
    }

    pub(crate) fn get(&self, table: &PageTable) -> &[Page] {
        self.slice(table.first, table.len)
    }

    pub(crate) fn get_mut(&mut self, table: &PageTable) -> &mut [Page] {
        &mut self.pages[table.first..][..table.len]
    }

    /// Some pages of a table, by their place among all.
    pub(crate) fn slice(&self, first: usize, len: usize) -> &[Page] {
        &self.pages[first..][..len]
    }

    /// Adds a table that has these pages and no room for more; for batches that are built by hand. Returns where it begins.
    pub(crate) fn append(&mut self, pages: &[Page]) -> usize {
        let first = self.pages.len();
        self.pages.extend_from_slice(pages);
        first
    }

    /// Forgets the tables that were appended.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_stand_apart_and_their_room_is_used_again() {
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
        assert_eq!(tables.pages.as_ptr(), memory, "nothing is allocated");
    }
}
