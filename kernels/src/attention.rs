//! Attention over one span of keys: the state that spans are merged into, and all of it that is not a product.
//!
//! Keys are taken in absolute spans of [`SPAN_TOKENS`] positions. Each span is reduced on its own, and spans merge in ascending order. So
//! what a query receives depends on its position alone: not on chunks, batches or threads. Queries of neighbouring positions are worked on
//! together, that a key or value once loaded serves many; each one's sums run as if it were alone.
//! Each instruction set multiplies keys and values in its own file; what stands between is here, compiled by each for itself.
//!
//! Always true: a key that a query may not see contributes nothing to it, whatever its memory holds (a recycled page may hold NaN, a later
//! token infinity).

use crate::elementwise::{LANES, exp, larger, largest_lane, sum_lanes};
#[cfg(target_arch = "x86_64")]
use crate::x86_64::attention::PanelRow;

/// Tokens of a page of keys and values: as many as a register has lanes, and as the scheduler's pages have.
pub const PAGE_TOKENS: usize = 16;

/// Keys of a span, the unit of reduction.
pub const SPAN_TOKENS: usize = 256;

/// The most values of a head.
pub const MAX_HEAD_DIM: usize = SPAN_TOKENS;

/// One KV head's keys and values of [`PAGE_TOKENS`] tokens, in half precision (as bits).
#[derive(Clone, Copy)]
pub struct KvPage<'a> {
    /// `[d][16]`: one dimension of all tokens is contiguous, so a token is a lane.
    pub keys: &'a [u16],
    /// `[16][d]`.
    pub values: &'a [u16],
}

/// The pages of one span that are seen, and some that are read later.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    /// The span's pages up to the last that is seen.
    pub pages: &'a [KvPage<'a>],
    /// At most as many pages as `pages`, of those that are read later, perhaps another sequence's: their keys are fetched from memory
    /// meanwhile.
    pub next: &'a [KvPage<'a>],
    /// How many of the span's keys the first position sees. Each further position sees one more, as far as the span goes.
    pub visible: usize,
}

/// Whatever there is of one query: its values, its products with the keys of a span, or its sums. Of fixed size, so that the rows of a
/// block stand at distances that are known when a kernel is compiled.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Row(pub(crate) [f32; SPAN_TOKENS]);

/// Attention of g query heads at some neighbouring positions of one sequence, over the spans so far. The buffers are reused.
pub struct AttentionState {
    group: usize,
    positions: usize,
    head_dim: usize,
    fresh: bool,       // No span was merged yet.
    queries: Vec<Row>, // [position][g]
    scores: Vec<Row>,  // [position][g], of the current span
    past: Reduced,
    span: Reduced,
    #[cfg(target_arch = "x86_64")]
    panel: Vec<PanelRow>,
}

/// Some keys, reduced for each `[position][g]`: what softmax needs to go on with more of them.
struct Reduced {
    largest: Vec<f32>, // The largest score.
    sum: Vec<f32>,     // Of the weights exp(score − largest).
    acc: Vec<Row>,     // Of weight · value.
}

impl AttentionState {
    /// Room for `max_group` query heads of `max_head_dim` values, at up to [`PAGE_TOKENS`] positions.
    ///
    /// # Panics
    /// If a head is wider than [`MAX_HEAD_DIM`].
    #[must_use]
    pub fn new(max_group: usize, max_head_dim: usize) -> AttentionState {
        assert!(max_head_dim <= MAX_HEAD_DIM, "a head of {max_head_dim}");
        let rows = max_group * PAGE_TOKENS;
        AttentionState {
            group: 0,
            positions: 0,
            head_dim: 0,
            fresh: true,
            queries: vec![Row([0.0; SPAN_TOKENS]); rows],
            scores: vec![Row([0.0; SPAN_TOKENS]); rows],
            past: Reduced::new(rows),
            span: Reduced::new(rows),
            #[cfg(target_arch = "x86_64")]
            panel: vec![PanelRow::ZERO; SPAN_TOKENS],
        }
    }

    /// Forgets all keys: the start of `positions` neighbouring positions. Their queries are to be written next.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`AttentionState::new`].
    pub fn reset(&mut self, group: usize, positions: usize, head_dim: usize) {
        let room = self.queries.len();
        assert!(
            group * positions <= room,
            "{group} heads at {positions} positions, room for {room}"
        );
        assert!(head_dim <= MAX_HEAD_DIM, "a head of {head_dim}");
        (self.group, self.positions, self.head_dim) = (group, positions, head_dim);
        self.fresh = true;
    }

    /// The query of a head of the group at the `position`th position, to be filled.
    pub fn query_mut(&mut self, position: usize, head: usize) -> &mut [f32] {
        assert!(
            position < self.positions && head < self.group,
            "head {head} of {} at position {position} of {}",
            self.group,
            self.positions
        );
        &mut self.queries[position * self.group + head].0[..self.head_dim]
    }

    /// g, as of the last [`AttentionState::reset`].
    #[must_use]
    pub fn group(&self) -> usize {
        self.group
    }

    /// How many positions, as of the last [`AttentionState::reset`].
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// d, as of the last [`AttentionState::reset`].
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// How many queries there are.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.positions * self.group
    }

    /// How many keys of a span query `row` sees, if the first position sees `visible`.
    #[inline(always)]
    pub(crate) fn seen(&self, row: usize, visible: usize) -> usize {
        (visible + row / self.group).min(SPAN_TOKENS)
    }

    /// The queries, and their products with the keys of the current span, to be filled.
    #[inline(always)]
    pub(crate) fn queries_and_scores_mut(&mut self) -> (&[Row], &mut [Row]) {
        let rows = self.rows();
        (&self.queries[..rows], &mut self.scores[..rows])
    }

    /// The weights that [`AttentionState::weigh_span`] made of the scores, and the weighted sums to be filled.
    #[inline(always)]
    pub(crate) fn weights_and_acc_mut(&mut self) -> (&[Row], &mut [Row]) {
        let rows = self.rows();
        (&self.scores[..rows], &mut self.span.acc[..rows])
    }

    /// The memory of panels, beside what [`AttentionState::queries_and_scores_mut`] gives.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn score_parts(&mut self) -> (&mut [PanelRow], &[Row], &mut [Row]) {
        let rows = self.rows();
        (
            &mut self.panel,
            &self.queries[..rows],
            &mut self.scores[..rows],
        )
    }

    /// The memory of panels, beside what [`AttentionState::weights_and_acc_mut`] gives.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn sum_parts(&mut self) -> (&mut [PanelRow], &[Row], &mut [Row]) {
        let rows = self.rows();
        (
            &mut self.panel,
            &self.scores[..rows],
            &mut self.span.acc[..rows],
        )
    }

    /// Turns products into weights: exp(score − largest) with score = product / sqrt(d); zero for the keys beyond those that a query sees.
    #[inline(always)]
    pub(crate) fn weigh_span(&mut self, visible: usize) {
        let factor = 1.0 / (self.head_dim as f32).sqrt();
        for row in 0..self.rows() {
            let seen = self.seen(row, visible);
            let scores = &mut self.scores[row].0[..seen.next_multiple_of(LANES)];
            scores[seen..].fill(f32::NEG_INFINITY);
            let chunks = scores.as_chunks_mut::<LANES>().0;
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for chunk in &*chunks {
                for (lane, &product) in lanes.iter_mut().zip(chunk) {
                    *lane = larger(product, *lane);
                }
            }
            // Rounding keeps order: the largest product becomes the largest score.
            let largest = factor * largest_lane(&lanes);
            let mut sums = [0.0; LANES];
            for chunk in chunks {
                for (sum, score) in sums.iter_mut().zip(chunk) {
                    *score = exp(*score * factor - largest);
                    *sum += *score;
                }
            }
            self.span.largest[row] = largest;
            self.span.sum[row] = sum_lanes(&sums);
        }
    }

    /// Adds the current span to the past ones. The first one is taken over as it is.
    #[inline(always)]
    pub(crate) fn merge_span(&mut self) {
        if std::mem::take(&mut self.fresh) {
            return std::mem::swap(&mut self.past, &mut self.span);
        }
        let (rows, columns) = (self.rows(), self.head_dim);
        for first in (0..rows).step_by(LANES) {
            let [keep, take] = self.past.join(&self.span, first);
            for row in first..rows.min(first + LANES) {
                let (keep, take) = (keep[row - first], take[row - first]);
                let past = &mut self.past.acc[row].0[..columns];
                for (past, span) in past.iter_mut().zip(&self.span.acc[row].0) {
                    *past = *past * keep + *span * take;
                }
            }
        }
    }

    /// The attention output `[position][g][d]`: weighted values over the sum of the weights.
    #[inline(always)]
    pub(crate) fn finish(&self, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(self.head_dim).enumerate() {
            for (out, acc) in out.iter_mut().zip(&self.past.acc[row].0) {
                *out = acc / self.past.sum[row];
            }
        }
    }
}

impl Reduced {
    fn new(rows: usize) -> Reduced {
        let lanes = rows.next_multiple_of(LANES);
        Reduced {
            largest: vec![f32::NEG_INFINITY; lanes],
            sum: vec![0.0; lanes],
            acc: vec![Row([0.0; SPAN_TOKENS]); rows],
        }
    }

    /// Joins the largest scores and the sums of sixteen rows. Returns the factors by which sums of the past and of the span shrink.
    #[inline(always)]
    fn join(&mut self, span: &Reduced, first: usize) -> [[f32; LANES]; 2] {
        let [mut keep, mut take] = [[0.0; LANES]; 2];
        let of_span = span.largest[first..][..LANES]
            .iter()
            .zip(&span.sum[first..][..LANES]);
        let of_past = self.largest[first..][..LANES]
            .iter_mut()
            .zip(&mut self.sum[first..][..LANES]);
        for (((past, sum), (&span, &span_sum)), (keep, take)) in
            of_past.zip(of_span).zip(keep.iter_mut().zip(&mut take))
        {
            let largest = if span > *past { span } else { *past };
            *keep = exp(*past - largest);
            *take = exp(span - largest);
            *past = largest;
            *sum = *sum * *keep + span_sum * *take;
        }
        [keep, take]
    }
}
