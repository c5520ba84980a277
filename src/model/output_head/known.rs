//! The rows of a token whose logits are computed, and which logit of a row counts.
//!
//! A row of a head has two logits: in 8 bits, and of the floats. The latter counts if the former is
//! among the [`EXACT_ROWS`] largest of the token (`screened.rs`). Which one counts is settled if as
//! many known rows precede the row by their 8-bit logits, or if all rows that can precede it are
//! known: all whose limit is not below its own 8-bit logit.
//!
//! The rows whose logits a request changes, by penalties and biases, are always computed. So the
//! limits of the other rows bound what is drawn from.

use sterna_kernels::PANEL_ROWS;

use super::narrow::MAX_INPUTS;
use super::top::{TopSearch, larger_first};
use crate::model::wanted::LogitChange;

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
    pub(super) fn panel(self, panel: usize) -> &'a [f32] {
        let rows = (self.rows - panel * PANEL_ROWS).min(PANEL_ROWS);
        &self.limits[(panel * self.tokens + self.token) * PANEL_ROWS..][..rows]
    }

    pub(super) fn maxima(self) -> impl Iterator<Item = f32> + Clone + 'a {
        let of_token = self.maxima[self.token..].iter();
        of_token.copied().step_by(self.tokens)
    }

    /// Returns the rows whose limit is at least `from`, but less than `below`.
    fn rows_within(self, from: f32, below: f32) -> impl Iterator<Item = u32> + 'a {
        let panels = self.maxima().enumerate();
        let reaching = panels.filter(move |(_, maximum)| *maximum >= from);
        reaching.flat_map(move |(panel, _)| {
            let rows = (PANEL_ROWS * panel..).zip(self.panel(panel));
            let within = rows.filter(move |(_, limit)| **limit >= from && **limit < below);
            within.map(|(row, _)| row as u32)
        })
    }
}

/// The rows that are known of one token at a time.
pub(super) struct KnownRows {
    /// The [`EXACT_ROWS`] largest by their 8-bit logits are the first ones, after `rank`.
    rows: Vec<RowLogits>,
    is_known: Vec<bool>, // By row.
    /// The number of each row's change, from 1 on; 0 if its logit is not changed.
    change_of: Vec<u32>,
    changes: Vec<LogitChange>,
    /// All rows with this limit or a greater one are known.
    from: f32,
    chosen: Vec<u32>,
    lower: Vec<f32>,
}

impl KnownRows {
    /// Allocates the memory for a head of `rows` rows.
    pub(super) fn new(rows: usize) -> KnownRows {
        let candidates = max_candidates(rows);
        KnownRows {
            rows: Vec::with_capacity(candidates),
            is_known: vec![false; rows],
            change_of: vec![0; rows],
            changes: Vec::with_capacity(candidates),
            from: f32::INFINITY,
            chosen: Vec::with_capacity(candidates + 1),
            lower: Vec::with_capacity(candidates),
        }
    }

    /// Forgets all rows, and takes how the logits of the next token are changed.
    fn begin(&mut self, changes: &[LogitChange]) {
        for row in self.rows.drain(..) {
            self.is_known[row.row as usize] = false;
        }
        for change in self.changes.drain(..) {
            self.change_of[change.token as usize] = 0;
        }
        self.changes.extend_from_slice(changes);
        for (change, number) in changes.iter().zip(1..) {
            self.change_of[change.token as usize] = number;
        }
        self.from = f32::INFINITY;
    }

    /// Returns the changed logit of a row.
    fn changed(&self, row: u32, logit: f32) -> f32 {
        match self.change_of[row as usize] {
            0 => logit,
            number => self.changes[number as usize - 1].apply(logit),
        }
    }
}

/// A search among the rows of a token. `compute(rows, found)` appends the logits of some rows. The
/// methods return `None` if they need more rows than there is room for.
pub(super) struct RowSearch<'a, C> {
    pub(super) limits: TokenLimits<'a>,
    known: &'a mut KnownRows,
    room: &'a mut usize,
    compute: C,
}

impl<'a, C: FnMut(&[u32], &mut Vec<RowLogits>)> RowSearch<'a, C> {
    /// Begins a search, in which the rows whose logits are `changed` are known first. The rows that
    /// it computes are taken from `room`.
    pub(super) fn begin(
        limits: TokenLimits<'a>,
        changes: &[LogitChange],
        known: &'a mut KnownRows,
        room: &'a mut usize,
        compute: C,
    ) -> Option<RowSearch<'a, C>> {
        if changes.len() > *room {
            return None;
        }
        known.begin(changes);
        let mut search = RowSearch {
            limits,
            known,
            room,
            compute,
        };
        search.know(changes.iter().map(|change| change.token))?;
        Some(search)
    }

    /// Returns the number of known rows.
    pub(super) fn count(&self) -> usize {
        self.known.rows.len()
    }

    /// Returns the known rows from number `begin` on, with the lower of both logits, changed.
    pub(super) fn lower(&self, begin: usize) -> impl Iterator<Item = (u32, f32)> {
        let rows = self.known.rows[begin..].iter();
        rows.map(|row| {
            let lower = row.rounded.min(row.exact);
            (row.row, self.known.changed(row.row, lower))
        })
    }

    /// Returns whether a row is known.
    pub(super) fn is_known(&self, row: u32) -> bool {
        self.known.is_known[row as usize]
    }

    /// Computes the rows that are not known yet.
    pub(super) fn know(&mut self, rows: impl Iterator<Item = u32>) -> Option<()> {
        let KnownRows {
            rows: known,
            is_known,
            chosen,
            ..
        } = &mut *self.known;
        let new = rows.filter(|row| !is_known[*row as usize]);
        chosen.clear();
        chosen.extend(new.take(*self.room + 1));
        *self.room = self.room.checked_sub(chosen.len())?;
        chosen.iter().for_each(|row| is_known[*row as usize] = true);
        (self.compute)(chosen, known);
        Some(())
    }

    /// Computes all rows with at least this limit.
    fn know_from(&mut self, limit: f32) -> Option<()> {
        if limit < self.known.from {
            let rows = self.limits.rows_within(limit, self.known.from);
            self.know(rows)?;
            self.known.from = limit;
        }
        Some(())
    }

    /// Computes the rows of the `count` greatest limits.
    pub(super) fn know_greatest(&mut self, count: usize, top: &mut TopSearch) -> Option<()> {
        let (limits, count) = (self.limits, count.min(self.limits.rows));
        let greatest = top.largest(limits.maxima(), |panel| limits.panel(panel), count);
        self.know(greatest.iter().map(|(row, _)| *row))
    }

    /// Settles which logit counts of all rows whose changed logit can be at least `bound`.
    pub(super) fn settle_from(&mut self, bound: f32) -> Option<()> {
        self.know_from(bound)?;
        self.settle(|_, upper| upper >= bound)
    }

    /// Settles which logit counts of the known rows that are meant: by the row and the upper of
    /// both logits, changed.
    pub(super) fn settle(&mut self, is_meant: impl Fn(u32, f32) -> bool) -> Option<()> {
        self.rank();
        let known = &*self.known;
        let upper = |row: &RowLogits| known.changed(row.row, row.rounded.max(row.exact));
        let meant = known.rows.iter().take(EXACT_ROWS);
        let meant = meant.filter(|row| is_meant(row.row, upper(row)));
        let lowest = meant.fold(known.from, |lowest, row| lowest.min(row.rounded));
        self.know_from(lowest)?;
        self.rank();
        Some(())
    }

    /// Puts the [`EXACT_ROWS`] known rows of the largest 8-bit logits first.
    fn rank(&mut self) {
        let rows = &mut self.known.rows;
        if rows.len() > EXACT_ROWS {
            rows.select_nth_unstable_by(EXACT_ROWS - 1, |a, b| {
                larger_first(&(a.row, a.rounded), &(b.row, b.rounded))
            });
        }
    }

    /// Returns the rows of which it is settled which logit counts, with this logit.
    pub(super) fn settled(&self) -> impl Iterator<Item = (u32, f32)> + Clone {
        let rows = self.known.rows.iter().enumerate();
        rows.filter_map(|(rank, row)| match rank < EXACT_ROWS {
            false => Some((row.row, row.rounded)),
            true => (row.rounded >= self.known.from).then_some((row.row, row.exact)),
        })
    }

    /// Returns the same rows with their changed logits.
    pub(super) fn changed(&self) -> impl Iterator<Item = (u32, f32)> + Clone {
        let settled = self.settled();
        settled.map(|(row, logit)| (row, self.known.changed(row, logit)))
    }

    /// Finds the `wanted` largest changed logits: settles their rows.
    pub(super) fn find_largest(&mut self, wanted: usize, top: &mut TopSearch) -> Option<()> {
        let wanted = wanted.min(self.limits.rows);
        self.know_greatest(2 * wanted + 8, top)?;
        // Some rows reach `bound` with both logits, as many as are wanted.
        let mut lower = std::mem::take(&mut self.known.lower);
        lower.clear();
        lower.extend(self.lower(0).map(|(_, logit)| logit));
        let (_, bound, _) = lower.select_nth_unstable_by(wanted - 1, |a, b| b.total_cmp(a));
        let bound = *bound;
        self.known.lower = lower;
        self.settle_from(bound)
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

    /// Returns changes of some rows.
    fn random_changes(random: &mut Random, rows: usize) -> Vec<LogitChange> {
        let most = random.index(20);
        let changed = (0..rows as u32).filter(|_| random.percent(5));
        let changed: Vec<u32> = changed.take(most).collect();
        let change = |token| LogitChange {
            token,
            bias: random.pick(&[0.0, 50.0, 50.0, 50.0, -50.0, f32::NEG_INFINITY]),
            penalty: random.pick(&[1.0, 1.5, 0.5]),
            minus: random.pick(&[0.0, 2.0, -2.0]),
        };
        changed.into_iter().map(change).collect()
    }

    /// Returns logits from 0 to 100, with so much between those of a row. Some changed rows have a
    /// much lower one of the floats, so that they may be likely by the other one only.
    fn random_logits(
        random: &mut Random,
        rows: usize,
        noise: u64,
        changes: &[LogitChange],
    ) -> Vec<RowLogits> {
        let row = |row: u32| {
            let rounded = random.below(100) as f32;
            let is_changed = changes.iter().any(|change| change.token == row);
            let exact = match is_changed && random.percent(50) {
                true => rounded - 60.0,
                false => rounded + random.below(2 * noise + 1) as f32 - noise as f32,
            };
            RowLogits {
                row,
                rounded,
                exact,
            }
        };
        (0..rows as u32).map(row).collect()
    }

    /// Limits as tight as they may be, and logits of which the rounded ones are in another order.
    #[test]
    fn the_largest_logits_are_found_whatever_the_limits_leave_out() {
        let mut random = Random::from_env();
        for _ in 0..500 {
            let rows = 65 + random.index(300);
            let noise = random.pick(&[0, 1, 5, 60]);
            let changes = random_changes(&mut random, rows);
            let logits = random_logits(&mut random, rows, noise, &changes);
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
            let most = random.pick(&[2, EXACT_ROWS]);
            let wanted = 1 + random.index(most);
            let (mut known, mut top) = (KnownRows::new(rows), TopSearch::new(rows));
            for _ in 0..2 {
                let mut room = rows;
                let compute = |chosen: &[u32], found: &mut Vec<RowLogits>| {
                    found.extend(chosen.iter().map(|row| logits[*row as usize]));
                };
                let search =
                    RowSearch::begin(token_limits, &changes, &mut known, &mut room, compute);
                let mut search = search.expect("there is room for all rows");
                let done = search.find_largest(wanted, &mut top);
                done.expect("there is room for all rows");
                assert!(search.settled().all(|row| counting.contains(&row)));
                let changed = |(row, logit): (u32, f32)| {
                    let mut changes = changes.iter();
                    let change = changes.find(|change| change.token == row);
                    (row, change.map_or(logit, |change| change.apply(logit)))
                };
                let found: Vec<_> = search.changed().collect();
                let expected = counting.iter().copied().map(changed);
                assert_eq!(
                    largest(found, wanted),
                    largest(expected.collect(), wanted),
                    "{wanted} of {rows}"
                );
            }
        }
    }
}
