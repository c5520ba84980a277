//! Reads little-endian values from the bytes of a file, and never beyond their end.

use std::ops::Range;

/// The longest string. Chat templates have some kilobytes.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// A place in the bytes of a file.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// Returns the number of bytes before the cursor.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Returns the number of bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Takes the next `N` bytes. `what` names them in the error.
    pub(super) fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let cut = || format!("{what}: the file ends at byte {}", self.bytes.len());
        let bytes = self.bytes[self.at..].first_chunk().ok_or_else(cut)?;
        self.at += N;
        Ok(*bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.take(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// Takes a string: its length in eight bytes, then UTF-8.
    pub(super) fn text(&mut self, what: &str) -> Result<&'a str, String> {
        self.text_within(what, MAX_TEXT_BYTES)
    }

    /// Takes a string of at most `limit` bytes.
    pub(super) fn text_within(&mut self, what: &str, limit: u64) -> Result<&'a str, String> {
        let length = self.u64(what)?;
        self.text_of(length, limit, what)
    }

    /// Takes a string of `length` bytes, of which `limit` are allowed.
    pub(super) fn text_of(
        &mut self,
        length: u64,
        limit: u64,
        what: &str,
    ) -> Result<&'a str, String> {
        if length > limit {
            return Err(format!(
                "{what}: a string of {length} bytes is too long; the limit is {limit}"
            ));
        }
        let range = self.range(length).ok_or_else(|| {
            format!("{what}: a string of {length} bytes goes beyond the end of the file")
        })?;
        str::from_utf8(&self.bytes[range])
            .map_err(|_| format!("{what}: a string is not valid UTF-8"))
    }

    /// Skips `length` bytes and returns where they are, or `None` if there are fewer.
    pub(super) fn range(&mut self, length: u64) -> Option<Range<usize>> {
        let length = usize::try_from(length).ok()?;
        let start = self.at;
        (length <= self.left()).then(|| {
            self.at += length;
            start..self.at
        })
    }
}
