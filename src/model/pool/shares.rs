//! Shares of the work: which rows each worker takes, and the memory that it may write.

use std::ops::Range;

/// Divides `0..len` into at most `parts` ranges. They are contiguous, in order and not empty, and
/// their lengths differ by at most one.
pub(crate) fn ranges(
    len: usize,
    parts: usize,
) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let parts = parts.min(len);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

/// Cuts `data`, which has rows of `row` values, at the given ranges of rows. The ranges must be
/// contiguous from 0. The result is disjoint, so each slice can go to another worker.
pub(crate) fn split_rows<T>(
    data: &mut [T],
    row: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> impl Iterator<Item = &mut [T]> {
    let (mut rest, mut end) = (data, 0);
    ranges.into_iter().map(move |range| {
        assert_eq!(range.start, end, "ranges of rows are contiguous");
        end = range.end;
        let (part, after) = std::mem::take(&mut rest).split_at_mut(range.len() * row);
        rest = after;
        part
    })
}
