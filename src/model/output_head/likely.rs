//! The steps of a large output head that want only some logits of few tokens: the largest, or those
//! that decide a draw.
//!
//! The pass over all rows reads a copy in 4 bits, which bounds all logits (`narrow.rs`). Then only
//! the rows that can be among the wanted ones are computed (`known.rs`, `drawn.rs`), in 8 bits and
//! from the floats. So the wanted logits are those of `screened.rs`.
//!
//! The copy is built when the engine is idle, after the first [`SEEN_TOKENS`] tokens of such steps:
//! their inputs say which columns are large. `trials.rs` decides whether a step uses the copy.

use sterna_kernels::{DenseMatrix, Int8Matrix, PANEL_ROWS, PanelScales};

use super::drawn::{self, Candidates, find_drawn};
use super::known::{EXACT_ROWS, KnownRows, RowLogits, RowSearch, TokenLimits, max_candidates};
use super::narrow::{MAX_INPUTS, MIN_COLUMNS, NarrowCopy};
use super::top::{TopSearch, place};
use super::trials::Trials;
use crate::fault::{self, Place};
use crate::model::inputs::Inputs;
use crate::model::options::HeadChoice;
use crate::model::pool::{ranges, split_rows};
use crate::model::wanted::{Deciding, WantedLogits};
use crate::model::workers::Workers;

/// The tokens whose inputs are seen before the copy is built.
pub(super) const SEEN_TOKENS: usize = 64;
/// The classes of steps by the largest number of logits that is wanted: 1, 2 or 3, 4 to 7, …
const LARGEST_CLASSES: usize = EXACT_ROWS.ilog2() as usize + 1;
/// The same, and a class of steps with draws that need no place in the order, and of other draws.
const WANTED_CLASSES: usize = LARGEST_CLASSES + 2;
/// A step may change one part in this many of the candidates that it may compute.
const CANDIDATES_PER_CHANGE: usize = 4;

/// How often only the likely rows of a head were computed, since the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LikelyUse {
    /// The steps whose logits were computed so.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    /// The rows that were computed for the tokens.
    pub rows: u64,
    /// The bytes of the copy and of the rows that these steps have read.
    pub bytes: u64,
}

/// The rows of a head, as floats and in 8 bits.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    pub(super) exact: &'a DenseMatrix,
    pub(super) screen: &'a Int8Matrix,
}

/// The copy in 4 bits, when it is used, and the memory of such steps.
pub(super) struct LikelyRows {
    copy: Option<NarrowCopy>,
    known: KnownRows,
    candidates: Candidates,
    top: TopSearch,
    /// The maximum limit of each panel and token, `[panel][token]`.
    maxima: Vec<f32>,
    /// The sums of the squares of the inputs by column, and their number, until the copy is
    /// allocated.
    squares: Vec<f32>,
    seen: usize,
    most_changes: usize, // Of a step.
    choice: HeadChoice,
    /// By the number of tokens of a step, less one, and the class of what it wants.
    trials: [[Trials; WANTED_CLASSES]; MAX_INPUTS],
    /// The wanted logits of a step, by token and row.
    found: Vec<(usize, u32, f32)>,
    use_so_far: LikelyUse,
}

impl LikelyRows {
    /// Allocates the memory for a head of this shape, except the copy.
    pub(super) fn new(rows: usize, columns: usize, choice: HeadChoice) -> LikelyRows {
        LikelyRows {
            copy: None,
            known: KnownRows::new(rows),
            candidates: drawn::candidates(rows),
            top: TopSearch::new(rows),
            maxima: Vec::with_capacity(MAX_INPUTS * rows.div_ceil(PANEL_ROWS)),
            squares: vec![0.0; columns],
            seen: 0,
            most_changes: max_candidates(rows) / CANDIDATES_PER_CHANGE,
            choice,
            trials: Default::default(),
            found: Vec::with_capacity(max_candidates(rows)),
            use_so_far: LikelyUse::default(),
        }
    }

    /// Returns how often only the likely rows were computed.
    pub(super) fn use_so_far(&self) -> LikelyUse {
        self.use_so_far
    }

    /// Builds the next panels of the copy, if steps have wanted it. Returns whether there is more
    /// to build.
    pub(super) fn prepare(&mut self, workers: &mut Workers, head: HeadRows<'_>) -> bool {
        if self.seen < SEEN_TOKENS || head.exact.columns() < MIN_COLUMNS {
            return false;
        }
        let (kernels, squares) = (workers.kernels, &self.squares);
        let copy = self
            .copy
            .get_or_insert_with(|| NarrowCopy::new(kernels, head.exact, squares));
        !copy.is_built() && !copy.build(kernels, &mut workers.pool, head.exact, head.screen)
    }

    /// Returns whether the copy is there for a step that wants these logits. Until then, the inputs
    /// of such steps say which columns are large.
    pub(super) fn could_compute(&mut self, inputs: &Inputs, wanted: &WantedLogits) -> bool {
        let is_few = |deciding: &Deciding| match deciding {
            Deciding::Largest(count) => (1..=EXACT_ROWS).contains(&(*count as usize)),
            Deciding::Draw(_) => true,
        };
        let could = (1..=MAX_INPUTS).contains(&wanted.tokens().len())
            && wanted.changes() <= self.most_changes
            && wanted.tokens().all(|(deciding, _)| is_few(deciding));
        if could && self.copy.is_none() {
            (0..inputs.tokens()).for_each(|token| self.see(inputs.float_row(token)));
        }
        could && self.copy.as_ref().is_some_and(NarrowCopy::is_built)
    }

    /// Adds the squares of an input, unless it is not finite.
    fn see(&mut self, x: &[f32]) {
        if !x.iter().map(|x| x * x).sum::<f32>().is_finite() {
            return;
        }
        for (sum, x) in self.squares.iter_mut().zip(x) {
            *sum += x * x;
        }
        self.seen += 1;
    }

    /// Returns whether a step that wants these logits should compute likely rows only.
    pub(super) fn is_due(&mut self, wanted: &WantedLogits) -> bool {
        match self.choice {
            HeadChoice::Faster => self.trials_of(wanted).is_due(),
            HeadChoice::LikelyRows => true,
        }
    }

    /// Returns the trials of steps like one that wants these logits.
    pub(super) fn trials_of(&mut self, wanted: &WantedLogits) -> &mut Trials {
        let classes = wanted.tokens().map(|(deciding, _)| match deciding {
            Deciding::Largest(count) => count.ilog2() as usize,
            Deciding::Draw(draw) => {
                LARGEST_CLASSES + usize::from(draw.top_k > 0 || draw.top_p < 1.0)
            }
        });
        let class = classes.max().expect("something is wanted");
        &mut self.trials[wanted.tokens().len() - 1][class]
    }

    /// Computes the wanted logits of each token, and sets all others to the lowest number. Returns
    /// whether that was possible.
    pub(super) fn compute(
        &mut self,
        workers: &mut Workers,
        head: HeadRows<'_>,
        inputs: &Inputs,
        wanted: &WantedLogits,
        logits: &mut [f32],
    ) -> bool {
        let (tokens, rows) = (inputs.tokens(), head.exact.rows());
        let LikelyRows {
            copy,
            known,
            candidates,
            top,
            maxima,
            found,
            use_so_far,
            ..
        } = self;
        let copy = copy.as_mut().expect("the copy is built");
        let rounded = inputs.quantized(0);
        let floats = (0..tokens).map(|token| inputs.float_row(token));
        found.clear();
        let (mut computed, mut room) = (0, max_candidates(rows));
        maxima.resize(head.screen.panels() * tokens, 0.0);
        let is_possible = copy.take_inputs(workers.kernels, floats, rounded) && {
            copy.limits(workers, logits, maxima);
            wanted.tokens().enumerate().all(|(token, wanted)| {
                let limits = TokenLimits {
                    limits: logits,
                    maxima,
                    tokens,
                    token,
                    rows,
                };
                let kernels = workers.kernels;
                let compute = |chosen: &[u32], found: &mut Vec<RowLogits>| {
                    computed += chosen.len() as u64;
                    compute_rows(workers, head, inputs, token, (chosen, found));
                };
                let (deciding, changes) = wanted;
                let search = RowSearch::begin(limits, changes, known, &mut room, compute);
                let is_found = search.and_then(|mut search| {
                    match deciding {
                        Deciding::Largest(count) => search.find_largest(*count as usize, top),
                        Deciding::Draw(draw) => {
                            find_drawn(&mut search, draw, kernels, (top, candidates))
                        }
                    }?;
                    found.extend(search.settled().map(|(row, logit)| (token, row, logit)));
                    Some(())
                });
                is_found.is_some()
            })
        };
        if !is_possible {
            return false;
        }
        let bytes = NarrowCopy::bytes_of(rows, head.exact.columns()) as u64;
        use_so_far.steps += 1;
        use_so_far.tokens += tokens as u64;
        use_so_far.rows += computed;
        use_so_far.bytes += bytes + computed * (head.exact.bytes() / rows) as u64;
        let shares = ranges(head.screen.panels(), workers.pool.workers());
        let parts = split_rows(logits, tokens * PANEL_ROWS, shares);
        workers
            .pool
            .run_parts(parts, |_, logits| logits.fill(f32::MIN));
        for &(token, row, logit) in &*found {
            logits[place(tokens, token, row)] = logit;
        }
        true
    }
}

/// Appends the logits of some rows and one token to `found`, each in 8 bits and from the floats,
/// with the bits that the passes over all rows give.
fn compute_rows(
    workers: &mut Workers,
    HeadRows { exact, screen }: HeadRows<'_>,
    inputs: &Inputs,
    token: usize,
    (rows, found): (&[u32], &mut Vec<RowLogits>),
) {
    let (x, rounded) = (inputs.float_row(token), inputs.quantized(0));
    let factor = 1.0 / rounded.scales()[token];
    let begin = found.len();
    found.extend(rows.iter().map(|&row| RowLogits {
        row,
        rounded: 0.0,
        exact: 0.0,
    }));
    let shares = ranges(rows.len(), workers.pool.workers());
    let parts = split_rows(&mut found[begin..], 1, shares).zip(&mut workers.scratch);
    let kernels = workers.kernels;
    workers.pool.run_parts(parts, |_, (found, scratch)| {
        let floats = &mut scratch.rows[..exact.columns()];
        for found in found.chunks_mut(PANEL_ROWS) {
            let (mut rows, mut scales) = ([0; PANEL_ROWS], [0.0; PANEL_ROWS]);
            for ((row, scale), found) in rows.iter_mut().zip(&mut scales).zip(&*found) {
                *row = found.row;
                *scale =
                    screen.scales(found.row as usize / PANEL_ROWS)[found.row as usize % PANEL_ROWS];
            }
            let (mut sums, mut logits) = ([0; PANEL_ROWS], [0.0; PANEL_ROWS]);
            let count = found.len();
            kernels.dense_dots(exact, &rows[..count], x, &mut logits[..count]);
            for (found, logit) in found.iter_mut().zip(logits) {
                found.exact = logit;
            }
            for ((sum, row), scale) in sums.iter_mut().zip(&rows[..count]).zip(scales) {
                kernels.dense_row(exact, *row as usize, floats);
                *sum = kernels.rounded_dot(floats, scale, rounded.row(token));
            }
            let scales = PanelScales {
                row_scales: &scales[..count],
                token_factors: &[factor],
            };
            kernels.scale_panel(&sums, scales, &mut logits, &mut [0.0]);
            for (found, logit) in found.iter_mut().zip(logits) {
                found.rounded = logit;
            }
        }
        fault::pass(Place::HeadRescored);
    });
}
