//! The search for the largest values of a token's logits.

use std::cmp::Ordering;

use sterna_kernels::{PANEL_ROWS, prefetch};

/// The number of groups per value that is sought. More groups give a tighter bound.
const GROUPS_PER_VALUE: usize = 4;

/// The memory of one search.
pub(super) struct TopSearch {
    panel_maxima: Vec<f32>,
    group_maxima: Vec<f32>,
    ranked: Vec<f32>,
    found: Vec<(u32, f32)>,
}

impl TopSearch {
    /// Allocates the memory to search `rows` values.
    pub(super) fn new(rows: usize) -> TopSearch {
        let panels = rows.div_ceil(PANEL_ROWS);
        TopSearch {
            panel_maxima: Vec::with_capacity(panels),
            group_maxima: Vec::with_capacity(panels),
            ranked: Vec::with_capacity(panels),
            found: Vec::with_capacity(rows),
        }
    }

    /// Returns the `count` largest values with their rows, in no order. There must be at least
    /// `count` values. Among equal values, lower rows win. NaN is below all others.
    ///
    /// `panel(i)` is a panel of [`PANEL_ROWS`] values; the last may be shorter. `maxima` are the
    /// maxima of the panels.
    pub(super) fn largest<'a>(
        &mut self,
        maxima: impl Iterator<Item = f32>,
        panel: impl Fn(usize) -> &'a [f32],
        count: usize,
    ) -> &[(u32, f32)] {
        self.panel_maxima.clear();
        self.panel_maxima.extend(maxima);
        let panels = self.panel_maxima.len();
        let group = (panels / (GROUPS_PER_VALUE * count)).max(1);
        let bound = self.lower_bound(group, count);
        let TopSearch {
            panel_maxima,
            group_maxima,
            found,
            ..
        } = self;
        found.clear();
        let rows = |index: usize| (PANEL_ROWS * index..).zip(panel(index));
        let groups = (0..group_maxima.len()).filter(|index| group_maxima[*index] >= bound);
        let reaching = groups.flat_map(|index| (index * group..panels).take(group));
        let reaching = reaching.filter(|index| panel_maxima[*index] >= bound);
        // The panels lie far apart, so all are prefetched before the first is read.
        reaching.clone().for_each(|index| prefetch(panel(index)));
        for index in reaching {
            let reaching = rows(index).filter(|(_, value)| **value >= bound);
            found.extend(reaching.map(|(row, value)| (row as u32, *value)));
        }
        if found.len() < count {
            // The bound is −∞ here, which all values except NaN reach.
            let nans = (0..panels).flat_map(rows).filter(|(_, v)| v.is_nan());
            let nans = nans.take(count - found.len());
            found.extend(nans.map(|(row, value)| (row as u32, *value)));
        }
        found.select_nth_unstable_by(count - 1, larger_first);
        &found[..count]
    }

    /// Group the panels into about 4 × `count` groups and rank each group's maximum: the
    /// `count`-th largest is a lower bound for the top `count` values.
    fn lower_bound(&mut self, group: usize, count: usize) -> f32 {
        let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
        let maximum = |panels: &[f32]| panels.iter().fold(f32::NEG_INFINITY, larger);
        self.group_maxima.clear();
        self.group_maxima
            .extend(self.panel_maxima.chunks(group).map(maximum));
        self.ranked.clone_from(&self.group_maxima);
        if count > self.ranked.len() {
            return f32::NEG_INFINITY;
        }
        let largest_first = |a: &f32, b: &f32| b.total_cmp(a);
        *self
            .ranked
            .select_nth_unstable_by(count - 1, largest_first)
            .1
    }
}

/// Returns the place of a logit, panel-major.
pub(super) fn place(tokens: usize, token: usize, row: u32) -> usize {
    let (panel, lane) = (row as usize / PANEL_ROWS, row as usize % PANEL_ROWS);
    (panel * tokens + token) * PANEL_ROWS + lane
}

/// The order in which rows are found: by falling values, equal ones by rising rows.
pub(super) fn larger_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    (b.1.total_cmp(&a.1)).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows found among `values`, ascending.
    fn found(values: &[f32], count: usize) -> Vec<u32> {
        let mut search = TopSearch::new(values.len());
        let panel = |index| values.chunks(PANEL_ROWS).nth(index).unwrap();
        let maxima = values.chunks(PANEL_ROWS).map(|panel| {
            let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
            panel.iter().fold(f32::NEG_INFINITY, larger)
        });
        let found = search.largest(maxima, panel, count);
        let mut rows: Vec<u32> = found.iter().map(|(row, _)| *row).collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn the_largest_values_are_found_in_any_place() {
        // A permutation of 0..3001, so that the rows of the largest are known.
        let value = |row: usize| (row * 1700 % 3001) as f32 - 1500.0;
        let values: Vec<f32> = (0..3001).map(value).collect();
        for count in [1, 2, 63, 64, 100, 3001] {
            let mut expected: Vec<u32> = (0..3001).collect();
            expected.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]));
            expected.truncate(count);
            expected.sort_unstable();
            assert_eq!(found(&values, count), expected);
        }
        // All in one panel.
        let mut values = vec![0.0; 40 * PANEL_ROWS];
        values[5 * PANEL_ROWS..6 * PANEL_ROWS].fill(1.0);
        assert_eq!(found(&values, 32), (160..192).collect::<Vec<_>>());
    }

    #[test]
    fn of_equal_values_those_of_the_lower_rows_are_found() {
        let values = [vec![1.0; 50], vec![2.0; 3], vec![1.0; 5000]].concat();
        let expected = [(0..7).collect(), vec![50, 51, 52]].concat();
        assert_eq!(found(&values, 10), expected);
    }

    #[test]
    fn nan_comes_last() {
        let mut values = vec![f32::NAN; 100];
        assert_eq!(found(&values, 2), [0, 1]);
        values[70] = f32::NEG_INFINITY;
        values[30] = -5.0;
        assert_eq!(found(&values, 2), [30, 70]);
        assert_eq!(found(&values, 3), [0, 30, 70]);
    }
}
