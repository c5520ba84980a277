//! A large output head in two passes: all rows in 8 bits, then each token's best rows again from the floats.
//!
//! A head of 128,256 rows is most of what a step reads. In 8 bits it is half as much, and runs on the integer multipliers; but rounding
//! moves a logit by some hundredths. So the [`EXACT_ROWS`] rows that the first pass puts highest are multiplied again, floats by floats:
//! whatever the model itself makes likely, or is asked for as a top log-probability, is exact; the others touch little but the sum
//! of all exponentials. One of them that is drawn after all, by chance or lifted up by a bias, has its 8-bit logit.
//!
//! Always true: which rows are exact depends on the token's own first pass alone, ties going to the lower row.

use std::cmp::Ordering;
use std::sync::Arc;

use sterna_kernels::{DenseMatrix, Int8Matrix, Kernels, PANEL_ROWS, PanelScales, prefetch};

use super::inputs::{Crew, Inputs, Scratch};
use super::pool::{Pool, ranges, split_rows};

/// Rows of a token that are computed exactly: more than the 20 whose log-probabilities may be asked for, by as much as rounding may
/// shuffle rows, and few enough to cost nothing.
pub(super) const EXACT_ROWS: usize = 64;

/// Of so many times as many groups of pieces as values are sought, the largest of each are ranked, to find a bound for those.
const LEADERS: usize = 4;

/// A float matrix of many rows, and the same in 8 bits.
pub(super) struct ScreenedHead {
    exact: Arc<DenseMatrix>,
    screen: Int8Matrix,
}

/// Memory of the second pass, reused from step to step.
pub(super) struct Rescoring {
    largest: Vec<f32>,        // [panel][token], of the first pass
    rows: Vec<u32>,           // [token][EXACT_ROWS]: of the second pass,
    exact: Vec<f32>,          // and their logits.
    searches: Vec<TopSearch>, // One a worker.
}

/// Memory of one search for the largest values.
struct TopSearch {
    largest: Vec<f32>, // Of each piece,
    leaders: Vec<f32>, // and of each group of neighbouring pieces.
    ranked: Vec<f32>,
    found: Vec<(u32, f32)>,
}

impl ScreenedHead {
    /// Rounds `exact`, a row at a time on all workers.
    pub(super) fn new(kernels: Kernels, pool: &mut Pool, exact: Arc<DenseMatrix>) -> ScreenedHead {
        let (rows, columns) = (exact.rows(), exact.columns());
        let mut screen = Int8Matrix::new(rows, columns);
        let mut panels: Vec<_> = screen.panels_mut().collect();
        let shares = ranges(panels.len(), pool.workers());
        let parts = split_rows(&mut panels, 1, shares);
        pool.run_parts(parts, |_, panels| {
            let mut floats = vec![0.0; columns];
            for panel in panels {
                for row in panel.rows() {
                    kernels.dense_row(&exact, row, &mut floats);
                    panel.set_row(row, &floats);
                }
            }
        });
        drop(panels);
        ScreenedHead { exact, screen }
    }

    /// The floats.
    pub(super) fn exact(&self) -> &DenseMatrix {
        &self.exact
    }

    /// What the first pass reads.
    pub(super) fn screen(&self) -> &Int8Matrix {
        &self.screen
    }

    /// The logits of all tokens of `inputs`, panel-major, `[panel][token][32]`.
    pub(super) fn multiply(
        &self,
        crew: &mut Crew,
        inputs: &Inputs,
        memory: &mut Rescoring,
        logits: &mut [f32],
    ) {
        let logits = &mut logits[..self.screen.panels() * inputs.tokens() * PANEL_ROWS];
        self.screen_all(crew, inputs, &mut memory.largest, logits);
        self.rescore(crew, inputs, memory, logits);
    }

    /// The first pass: all rows in 8 bits, and the largest logit of each panel and token.
    fn screen_all(
        &self,
        crew: &mut Crew,
        inputs: &Inputs,
        largest: &mut Vec<f32>,
        logits: &mut [f32],
    ) {
        let tokens = inputs.tokens();
        largest.resize(self.screen.panels() * tokens, 0.0);
        let shares = ranges(self.screen.panels(), crew.pool.workers());
        let largest = split_rows(largest, tokens, shares.clone());
        let logits = split_rows(logits, tokens * PANEL_ROWS, shares.clone());
        let kernels = crew.kernels;
        crew.pool.run_parts(
            shares.zip(logits).zip(largest).zip(&mut crew.scratch),
            |_, (((panels, logits), largest), scratch)| {
                let panel = tokens * PANEL_ROWS;
                let Scratch { sums, factors, .. } = scratch;
                let x = inputs.quantized();
                factors.clear();
                factors.extend(x.scales().iter().map(|scale| 1.0 / scale));
                let outs = logits.chunks_exact_mut(panel);
                let outs = outs.zip(largest.chunks_exact_mut(tokens));
                for (panel, (logits, largest)) in panels.zip(outs) {
                    let sums = &mut sums[..logits.len()];
                    kernels.int8_matmul(&self.screen, panel..panel + 1, x, sums);
                    let scales = PanelScales {
                        row_scales: self.screen.scales(panel),
                        token_factors: &factors[..],
                    };
                    kernels.scale_panel(sums, scales, logits, largest);
                }
            },
        );
    }

    /// The second pass: writes the best rows of each token over what the first pass left in `logits`.
    fn rescore(
        &self,
        crew: &mut Crew,
        inputs: &Inputs,
        memory: &mut Rescoring,
        logits: &mut [f32],
    ) {
        let (tokens, rows) = (inputs.tokens(), self.exact.rows());
        let each = EXACT_ROWS.min(rows);
        memory.rows.resize(tokens * each, 0);
        memory.exact.resize(tokens * each, 0.0);
        let shares = ranges(tokens, crew.pool.workers());
        let best = split_rows(&mut memory.rows, each, shares.clone());
        let exact = split_rows(&mut memory.exact, each, shares.clone());
        let parts = shares.zip(best.zip(exact)).zip(&mut memory.searches);
        let (kernels, seen, largest) = (crew.kernels, &*logits, &memory.largest);
        crew.pool
            .run_parts(parts, |_, ((share, (best, exact)), search)| {
                let outs = (best.chunks_exact_mut(each)).zip(exact.chunks_exact_mut(each));
                for (token, (best, exact)) in share.zip(outs) {
                    let piece = |panel: usize| {
                        let rows = (rows - panel * PANEL_ROWS).min(PANEL_ROWS);
                        &seen[(panel * tokens + token) * PANEL_ROWS..][..rows]
                    };
                    let largest = largest[token..].iter().copied().step_by(tokens);
                    let found = search.largest(largest, piece, each);
                    for (row, (found, _)) in best.iter_mut().zip(found) {
                        *row = *found;
                    }
                    kernels.dense_dots(&self.exact, best, inputs.floats(token), exact);
                }
            });
        let best = memory.rows.chunks_exact(each);
        let best = best.zip(memory.exact.chunks_exact(each));
        for (token, (rows, exact)) in best.enumerate() {
            for (&row, &logit) in rows.iter().zip(exact) {
                let (panel, lane) = (row as usize / PANEL_ROWS, row as usize % PANEL_ROWS);
                logits[(panel * tokens + token) * PANEL_ROWS + lane] = logit;
            }
        }
    }
}

impl Rescoring {
    /// For `workers` workers and up to `max_tokens` tokens a step of a head of `rows` rows.
    pub(super) fn new(workers: usize, max_tokens: usize, rows: usize) -> Rescoring {
        let search = || TopSearch {
            largest: Vec::with_capacity(rows.div_ceil(PANEL_ROWS)),
            leaders: Vec::with_capacity(rows.div_ceil(PANEL_ROWS)),
            ranked: Vec::with_capacity(rows.div_ceil(PANEL_ROWS)),
            found: Vec::with_capacity(rows),
        };
        Rescoring {
            largest: Vec::with_capacity(max_tokens * rows.div_ceil(PANEL_ROWS)),
            rows: Vec::with_capacity(max_tokens * EXACT_ROWS),
            exact: Vec::with_capacity(max_tokens * EXACT_ROWS),
            searches: (0..workers).map(|_| search()).collect(),
        }
    }
}

impl TopSearch {
    /// The `count` largest of at least as many values, in no order; of equal ones those that come first. Values that are no numbers are
    /// below all others. The values stand in pieces of [`PANEL_ROWS`], `piece(i)`, the last perhaps shorter; `largest` are those of each.
    ///
    /// The `count`th of the largest of some pieces each is a value that at least `count` values reach, so nothing below it can be among the
    /// largest of all.
    fn largest<'a>(
        &mut self,
        largest: impl Iterator<Item = f32>,
        piece: impl Fn(usize) -> &'a [f32],
        count: usize,
    ) -> &[(u32, f32)] {
        let TopSearch {
            largest: all,
            leaders,
            ranked,
            found,
        } = self;
        all.clear();
        all.extend(largest);
        // Enough of them that the bound is a close one.
        let neighbours = (all.len() / (LEADERS * count)).max(1);
        leaders.clear();
        let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
        let leader = |some: &[f32]| some.iter().fold(f32::NEG_INFINITY, larger);
        leaders.extend(all.chunks(neighbours).map(leader));
        ranked.clone_from(leaders);
        let bound = if count <= ranked.len() {
            *(ranked.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a))).1
        } else {
            f32::NEG_INFINITY
        };
        found.clear();
        let rows = |index: usize| (PANEL_ROWS * index..).zip(piece(index));
        let leading = (0..leaders.len()).filter(|first| leaders[*first] >= bound);
        let reaching = leading.flat_map(|first| (first * neighbours..all.len()).take(neighbours));
        let reaching = reaching.filter(|index| all[*index] >= bound);
        // They lie far apart: all are asked for before one is waited for.
        reaching.clone().for_each(|index| prefetch(piece(index)));
        for index in reaching {
            let reaching = rows(index).filter(|(_, value)| **value >= bound);
            found.extend(reaching.map(|(row, value)| (row as u32, *value)));
        }
        if found.len() < count {
            // The others are no numbers, or they would reach −∞.
            let others = (0..all.len()).flat_map(rows).filter(|(_, v)| v.is_nan());
            let others = others.take(count - found.len());
            found.extend(others.map(|(row, value)| (row as u32, *value)));
        }
        found.select_nth_unstable_by(count - 1, larger_first);
        &found[..count]
    }
}

fn larger_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    (b.1.total_cmp(&a.1)).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows found among `values`, ascending.
    fn found(values: &[f32], count: usize) -> Vec<u32> {
        let mut memory = Rescoring::new(1, 1, values.len());
        let piece = |index| values.chunks(PANEL_ROWS).nth(index).unwrap();
        let largest = values.chunks(PANEL_ROWS).map(|piece| {
            let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
            piece.iter().fold(f32::NEG_INFINITY, larger)
        });
        let found = memory.searches[0].largest(largest, piece, count);
        let mut rows: Vec<u32> = found.iter().map(|(row, _)| *row).collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn the_largest_values_are_found_wherever_they_stand() {
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
        // All in one piece.
        let mut values = vec![0.0; 40 * PANEL_ROWS];
        values[5 * PANEL_ROWS..6 * PANEL_ROWS].fill(1.0);
        assert_eq!(found(&values, 32), (160..192).collect::<Vec<_>>());
    }

    #[test]
    fn of_equal_values_those_that_come_first_are_found() {
        let values = [vec![1.0; 50], vec![2.0; 3], vec![1.0; 5000]].concat();
        let expected = [(0..7).collect(), vec![50, 51, 52]].concat();
        assert_eq!(found(&values, 10), expected);
    }

    #[test]
    fn values_that_are_no_numbers_come_last() {
        let mut values = vec![f32::NAN; 100];
        assert_eq!(found(&values, 2), [0, 1]);
        values[70] = f32::NEG_INFINITY;
        values[30] = -5.0;
        assert_eq!(found(&values, 2), [30, 70]);
        assert_eq!(found(&values, 3), [0, 30, 70]);
    }
}
