//! A large output head in two passes: all rows in 8 bits, then the best rows of each token again
//! from the floats.
//!
//! Most of the bytes that a step reads belong to the output head. In 8 bits the head has half as
//! many bytes, and the product runs on the integer multipliers. But rounding moves a logit by some
//! hundredths. So the [`EXACT_ROWS`] rows that the first pass ranks highest are multiplied again
//! from the floats. Likely tokens and reported top log-probabilities are therefore exact. The other
//! logits matter only in the sum of all exponentials, or if such a token is sampled by chance or
//! lifted by a bias; then its 8-bit logit counts.
//!
//! Steps that want only the few largest logits of few tokens, or those that decide a draw, may
//! compute only the rows that can have them (`likely.rs`).
//!
//! Invariant: which rows of a token are exact depends on that token's first pass alone. Of equal
//! logits, the lower rows are exact.

use std::sync::Arc;
use std::time::Instant;

use sterna_kernels::{DenseMatrix, Int8Matrix, Kernels, PANEL_ROWS, PanelScales};

use super::known::EXACT_ROWS;
use super::likely::{HeadRows, LikelyRows, LikelyUse};
use super::narrow::NarrowCopy;
use super::top::{TopSearch, place};
use crate::fault::{self, Place};
use crate::model::inputs::{InputFormat, Inputs, MAX_STREAMS};
use crate::model::options::HeadChoice;
use crate::model::pool::{Pool, ranges, split_rows};
use crate::model::rotation::RowRotation;
use crate::model::wanted::WantedLogits;
use crate::model::workers::{Scratch, Workers};

/// A float matrix of many rows, with a copy in 8 bits and the memory of its passes, which steps
/// reuse.
pub(crate) struct ScreenedHead {
    exact: Arc<DenseMatrix>,
    screen: Int8Matrix,
    /// The maximum of each panel and token in the first pass, `[panel][token]`.
    maxima: Vec<f32>,
    /// The best rows, `[token][EXACT_ROWS]`.
    best: Vec<u32>,
    /// The exact logits of those rows.
    rescored: Vec<f32>,
    searches: Vec<TopSearch>, // [worker]
    rotation: Option<RowRotation>,
    likely: LikelyRows,
}

impl ScreenedHead {
    /// Rounds `exact` to 8 bits on all workers of `pool`, row by row. `rotation` is the rotation of
    /// its input, if `exact` is stored rotated.
    pub(crate) fn new(
        kernels: Kernels,
        pool: &mut Pool,
        exact: Arc<DenseMatrix>,
        max_tokens: usize,
        rotation: Option<RowRotation>,
        choice: HeadChoice,
    ) -> ScreenedHead {
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
        ScreenedHead {
            exact,
            screen,
            maxima: Vec::with_capacity(max_tokens * rows.div_ceil(PANEL_ROWS)),
            best: Vec::with_capacity(max_tokens * EXACT_ROWS),
            rescored: Vec::with_capacity(max_tokens * EXACT_ROWS),
            searches: (0..pool.workers()).map(|_| TopSearch::new(rows)).collect(),
            rotation,
            likely: LikelyRows::new(rows, columns, choice),
        }
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.exact.rows()
    }

    pub(crate) fn likely_use(&self) -> LikelyUse {
        self.likely.use_so_far()
    }

    /// Returns the bytes that the first pass reads.
    pub(crate) fn screen_bytes(&self) -> usize {
        self.screen.bytes()
    }

    /// Returns the bytes of the copy in 4 bits, which is built later.
    pub(crate) fn later_bytes(&self) -> usize {
        NarrowCopy::bytes_of(self.exact.rows(), self.exact.columns())
    }

    /// Returns the form of the input rows: quantized for the first pass, floats for the second.
    pub(crate) fn input_format(&self) -> InputFormat<'_> {
        InputFormat {
            columns: self.exact.columns(),
            streams: 1,
            norms: [None; MAX_STREAMS],
            corrections: [None; MAX_STREAMS],
            rotation: self.rotation.as_ref(),
            rotates_floats: self.rotation.is_some(),
            group: None,
            floats: true,
        }
    }

    /// Writes the logits of all rows of `inputs`, panel-major, `[panel][token][PANEL_ROWS]`. Unless
    /// all are `wanted`, it says which logits of each token are wanted. Other logits may be lower
    /// than they are.
    pub(crate) fn multiply(
        &mut self,
        workers: &mut Workers,
        inputs: &Inputs,
        wanted: &WantedLogits,
        logits: &mut [f32],
    ) {
        assert!(
            wanted.is_all() || wanted.tokens().len() == inputs.tokens(),
            "wanted logits of {} tokens for {} tokens",
            wanted.tokens().len(),
            inputs.tokens()
        );
        let logits = &mut logits[..self.screen.panels() * inputs.tokens() * PANEL_ROWS];
        let could = self.likely.could_compute(inputs, wanted);
        if could && self.likely.is_due(wanted) {
            let began = Instant::now();
            let head = HeadRows {
                exact: &self.exact,
                screen: &self.screen,
            };
            let is_done = (self.likely).compute(workers, head, inputs, wanted, logits);
            let time = is_done.then(|| began.elapsed());
            self.likely.trials_of(wanted).took_likely_rows(time);
            if is_done {
                return;
            }
        }
        let began = Instant::now();
        self.screen_all(workers, inputs, logits);
        self.rescore(workers, inputs, logits);
        if could {
            self.likely.trials_of(wanted).took_all_rows(began.elapsed());
        }
    }

    /// Builds the next panels of the copy in 4 bits, if steps have wanted it. Returns whether there
    /// is more to build.
    pub(crate) fn prepare(&mut self, workers: &mut Workers) -> bool {
        let head = HeadRows {
            exact: &self.exact,
            screen: &self.screen,
        };
        self.likely.prepare(workers, head)
    }

    /// The first pass: computes all logits in 8 bits, and the maximum of each panel and token.
    fn screen_all(&mut self, workers: &mut Workers, inputs: &Inputs, logits: &mut [f32]) {
        let (screen, tokens) = (&self.screen, inputs.tokens());
        let maxima = &mut self.maxima;
        maxima.resize(screen.panels() * tokens, 0.0);
        let shares = ranges(screen.panels(), workers.pool.workers());
        let maxima = split_rows(maxima, tokens, shares.clone());
        let logits = split_rows(logits, tokens * PANEL_ROWS, shares.clone());
        let parts = shares.zip(logits).zip(maxima).zip(&mut workers.scratch);
        let kernels = workers.kernels;
        let pool = &mut workers.pool;
        pool.run_parts(parts, |_, (((panels, logits), maxima), scratch)| {
            let Scratch { sums, factors, .. } = scratch;
            let x = inputs.quantized(0);
            factors.clear();
            factors.extend(x.scales().iter().map(|scale| 1.0 / scale));
            let outs = logits.chunks_exact_mut(tokens * PANEL_ROWS);
            let outs = outs.zip(maxima.chunks_exact_mut(tokens));
            for (panel, (logits, maxima)) in panels.zip(outs) {
                let sums = &mut sums[..logits.len()];
                kernels.int8_matmul(screen, panel..panel + 1, x, sums);
                let scales = PanelScales {
                    row_scales: screen.scales(panel),
                    token_factors: &factors[..],
                };
                kernels.scale_panel(sums, scales, logits, maxima);
            }
            fault::pass(Place::HeadScreened);
        });
    }

    /// The second pass: replaces the logits of each token's best rows by exact ones.
    fn rescore(&mut self, workers: &mut Workers, inputs: &Inputs, logits: &mut [f32]) {
        let (head, tokens) = (&self.exact, inputs.tokens());
        let rows = head.rows();
        let count = EXACT_ROWS.min(rows);
        self.best.resize(tokens * count, 0);
        self.rescored.resize(tokens * count, 0.0);
        let shares = ranges(tokens, workers.pool.workers());
        let best = split_rows(&mut self.best, count, shares.clone());
        let exact = split_rows(&mut self.rescored, count, shares.clone());
        let parts = shares.zip(best.zip(exact)).zip(&mut self.searches);
        let (kernels, screened, maxima) = (workers.kernels, &*logits, &self.maxima);
        let pool = &mut workers.pool;
        pool.run_parts(parts, |_, ((share, (best, exact)), search)| {
            let outs = (best.chunks_exact_mut(count)).zip(exact.chunks_exact_mut(count));
            for (token, (best, exact)) in share.zip(outs) {
                let panel = |index: usize| {
                    let rows = (rows - index * PANEL_ROWS).min(PANEL_ROWS);
                    &screened[(index * tokens + token) * PANEL_ROWS..][..rows]
                };
                let maxima = maxima[token..].iter().copied().step_by(tokens);
                let found = search.largest(maxima, panel, count);
                for (row, (found, _)) in best.iter_mut().zip(found) {
                    *row = *found;
                }
                kernels.dense_dots(head, best, inputs.float_row(token), exact);
            }
            fault::pass(Place::HeadRescored);
        });
        let best = self.best.chunks_exact(count);
        for (token, (rows, exact)) in best.zip(self.rescored.chunks_exact(count)).enumerate() {
            for (&row, &logit) in rows.iter().zip(exact) {
                logits[place(tokens, token, row)] = logit;
            }
        }
    }
}
