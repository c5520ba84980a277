//! The largest logits of a token, from limits of all of them: only logits that can be among the
//! largest are computed.
//!
//! A row of a head has two logits: in 8 bits, and of the floats. The latter counts if the former is
//! among the [`EXACT_ROWS`] largest of the token (`screened.rs`). Let τ be a bound that as many
//! rows reach with both logits as are wanted. A row with a smaller limit has smaller logits, so the
//! wanted ones are among the others. Which logit of a row counts follows from its rank by the
//! logits in 8 bits, for which all rows that precede it must be known: all with a limit from its
//! own 8-bit logit on.

use sterna_kernels::PANEL_ROWS;

use super::narrow::MAX_INPUTS;
use super::top::{TopSearch, larger_first};

/// The rows of each token that are computed exactly. A request may ask for the log-probabilities of
/// 20; the rest is a margin for rows that rounding puts in the wrong order.
pub(super) const EXACT_ROWS: usize = 64;

/// A step computes at most this share of a large head row by row.
const ROWS_PER_CANDIDATE: usize = 16;

/// The logits of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowLogits {
    pub(super) row: u32,
    /// In 8 bits.
    pub(super) rounded: f32,
    /// Of the floats.
    pub(super) exact: f32,
}

/// The limits of a token's logits.
#[derive(Clone, Copy)]
pub(super) struct TokenLimits<'a> {
    /// Of all tokens, panel-major.
    pub(super) limits: &'a [f32],
    /// The maximum of each panel and token.
    pub(super) maxima: &'a [f32],
    pub(super) tokens: usize,
    pub(super) token: usize,
    /// The rows of the head.
    pub(super) rows: usize,
}

impl<'a> TokenLimits<'a> {
    fn panel(&self, panel: usize) -> &'a [f32] {
        let rows = (self.rows - panel * PANEL_ROWS).min(PANEL_ROWS);
        &self.limits[(panel * self.tokens + self.token) * PANEL_ROWS..][..rows]
    }

    fn maxima(&self) -> impl Iterator<Item = f32> + Clone + 'a {
        let of_token = self.maxima[self.token..].iter();
        of_token.copied().step_by(self.tokens)
    }

    /// Returns the rows whose limit is at least `from`, but less than `below`.
    fn rows_within(&self, from: f32, below: f32) -> impl Iterator<Item = u32> + '_ {
        let panels = self.maxima().enumerate();
        let reaching = panels.filter(move |(_, maximum)| *maximum >= from);
        reaching.flat_map(move |(panel, _)| {
            let rows = (PANEL_ROWS * panel..).zip(self.panel(panel));
            let within = rows.filter(move |(_, limit)| **limit >= from && **limit < below);
            within.map(|(row, _)| row as u32)
        })
    }
}

/// The memory of a search.
pub(super) struct LargestSearch {
    rows: Vec<u32>,
    found: Vec<RowLogits>,
    lower: Vec<f32>,
    largest: Vec<(u32, f32)>,
}

impl LargestSearch {
    /// Allocates the memory to search a head of `rows` rows.
    pub(super) fn new(rows: usize) -> LargestSearch {
        let candidates = max_candidates(rows);
        LargestSearch {
            rows: Vec::with_capacity(candidates + 1),
            found: Vec::with_capacity(candidates),
            lower: Vec::with_capacity(candidates),
            largest: Vec::with_capacity(candidates),
        }
    }

    /// Returns rows and logits of a token, among them the `wanted` largest logits, in the order of
    /// their 8-bit logits. Returns `None` if that needs more than `room` rows, and takes their
    /// number from `room` otherwise. `compute(rows, found)` appends the logits of some rows.
    pub(super) fn find(
        &mut self,
        limits: TokenLimits<'_>,
        wanted: usize,
        room: &mut usize,
        search: &mut TopSearch,
        mut compute: impl FnMut(&[u32], &mut Vec<RowLogits>),
    ) -> Option<&[(u32, f32)]> {
        let LargestSearch {
            rows,
            found,
            lower,
            largest,
        } = self;
        let first = (2 * wanted + 8).min(limits.rows);
        let wanted = wanted.min(limits.rows);
        let reaching = search.largest(limits.maxima(), |panel| limits.panel(panel), first);
        rows.clear();
        rows.extend(reaching.iter().map(|(row, _)| row));
        found.clear();
        compute(rows, found);
        // Some rows reach `bound` with both logits, as many as are wanted.
        lower.clear();
        lower.extend(found.iter().map(|row| row.rounded.min(row.exact)));
        let (_, bound, _) = lower.select_nth_unstable_by(wanted - 1, |a, b| b.total_cmp(a));
        let bound = *bound;
        let mut compute_within = |from: f32, below: f32, found: &mut Vec<RowLogits>| {
            rows.clear();
            rows.extend(limits.rows_within(from, below).take(*room + 1));
            *room = room.checked_sub(rows.len())?;
            compute(rows, found);
            Some(())
        };
        found.clear();
        compute_within(bound, f32::INFINITY, found)?;
        let candidates = found.iter().filter(|row| row.exact >= bound);
        let lowest = candidates.fold(bound, |lowest, row| lowest.min(row.rounded));
        compute_within(lowest, bound, found)?;
        found.sort_unstable_by(|a, b| larger_first(&(a.row, a.rounded), &(b.row, b.rounded)));
        largest.clear();
        for (rank, row) in found.iter().enumerate() {
            if row.rounded >= bound || row.exact >= bound {
                let is_exact = rank < EXACT_ROWS;
                largest.push((row.row, if is_exact { row.exact } else { row.rounded }));
            }
        }
        Some(largest)
    }
}

/// Returns the most rows that are computed one by one in a step.
pub(super) fn max_candidates(rows: usize) -> usize {
    (rows / ROWS_PER_CANDIDATE).max(MAX_INPUTS * 4 * EXACT_ROWS)
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    /// Returns the largest of some logits, the lower rows first on a tie.
    fn largest(mut logits: Vec<(u32, f32)>, count: usize) -> Vec<(u32, f32)> {
        logits.sort_by(larger_first);
        logits.truncate(count);
        logits
    }

    /// Limits as tight as they may be, and logits of which the rounded ones are in another order.
    #[test]
    fn the_largest_logits_are_found_whatever_the_limits_leave_out() {
        let mut random = Random::from_env();
        for _ in 0..500 {
            let rows = 65 + random.index(300);
            let noise = random.pick(&[0, 1, 5, 60]);
            let logits: Vec<RowLogits> = (0..rows as u32)
                .map(|row| {
                    let rounded = random.below(100) as f32;
                    let exact = rounded + random.below(2 * noise + 1) as f32 - noise as f32;
                    RowLogits {
                        row,
                        rounded,
                        exact,
                    }
                })
                .collect();
            let mut limits = vec![f32::NEG_INFINITY; rows.next_multiple_of(PANEL_ROWS)];
            for (limit, row) in limits.iter_mut().zip(&logits) {
                *limit = row.rounded.max(row.exact) + random.pick(&[0.0, 0.0, 1.0, 9.0]);
            }
            let panels = limits.chunks(PANEL_ROWS);
            let maxima: Vec<f32> = panels
                .map(|panel| panel.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                .collect();
            let token_limits = TokenLimits {
                limits: &limits,
                maxima: &maxima,
                tokens: 1,
                token: 0,
                rows,
            };
            let mut by_rounded = logits.clone();
            by_rounded.sort_by(|a, b| larger_first(&(a.row, a.rounded), &(b.row, b.rounded)));
            let counting = by_rounded.iter().enumerate().map(|(rank, row)| {
                let is_exact = rank < EXACT_ROWS;
                (row.row, if is_exact { row.exact } else { row.rounded })
            });
            let counting: Vec<(u32, f32)> = counting.collect();
            let wanted = 1 + random.index(EXACT_ROWS);
            let (mut search, mut top) = (LargestSearch::new(rows), TopSearch::new(rows));
            let mut room = rows;
            let compute = |chosen: &[u32], found: &mut Vec<RowLogits>| {
                found.extend(chosen.iter().map(|row| logits[*row as usize]));
            };
            let found = search.find(token_limits, wanted, &mut room, &mut top, compute);
            let found = found.expect("there is room for all rows").to_vec();
            assert_eq!(
                largest(found, wanted),
                largest(counting, wanted),
                "{wanted} of {rows}"
            );
        }
    }
}
