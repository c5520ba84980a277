//! Attention over one span of keys: the state into which spans are merged, and everything except
//! the two matrix products. Each instruction set has its own matrix products.
//!
//! Keys and values are in pages of [`PAGE_TOKENS`] tokens anywhere in memory (PagedAttention, Kwon
//! et al., arXiv:2309.06180). Keys are processed in absolute spans of [`SPAN_TOKENS`] positions.
//! Each span is reduced on its own, and spans merge in ascending order (online softmax, Milakov and
//! Gimelshein, arXiv:1805.02867). Queries of neighbouring positions are processed together, so that
//! a key or value that is loaded once serves many queries.
//!
//! ```text
//! for each KV head, for up to 16 neighbouring positions of a sequence in one page:
//!     for each span of 256 keys, ascending:
//!         for each query (a position and a head of the group), over the keys k that it sees:
//!             product[k] = query · key[k]                # in ascending dimension
//!             score[k]   = product[k] / sqrt(head_dim)
//!             largest    = max score[k]
//!             weight[k]  = exp(score[k] − largest)
//!             sum        = Σ weight[k]
//!             acc        = Σ weight[k] · value[k]        # in ascending token
//!         merge with the past spans of the query, if there are any:
//!             both = max(past.largest, largest)
//!             keep = exp(past.largest − both), take = exp(largest − both)
//!             past.sum = past.sum · keep + sum · take
//!             past.acc = past.acc · keep + acc · take
//!             past.largest = both
//!     out = past.acc / past.sum
//! ```
//!
//! Formats of 8 bits multiply each product by the scale of its key, and each weight of `acc` by the
//! scale of its value. The format of 8-bit integers also rounds queries to 8 bits and weights to 14
//! (`int8_rows.rs`).
//!
//! The spans of one position may be divided among threads: one thread merges its spans as above,
//! the others keep the results of theirs as [`SavedSpans`], and these are merged after it, in the
//! same order.
//!
//! Two alternatives were rejected. If the keys were divided by the number of threads or at the ends
//! of chunks, as in Flash-Decoding, the result would depend on threads and chunks. If a query read
//! only the pages whose keys may matter most (Quest, arXiv:2406.10774), the outputs would change
//! far more than by 8-bit keys and values, for about the same gain (`benches/README.md`,
//! "Sparsity").
//!
//! Invariant: the result for a query depends on its position alone, not on chunks, batches or
//! threads. Its sums run as if it were the only query.
//!
//! Invariant: a key behind those that a query sees contributes nothing to it, whatever the key's
//! memory holds. A recycled page may hold NaN, a later token infinity. A key that is too far away,
//! in a layer whose tokens attend to a window, gets the weight 0: its page holds it still.

use std::ops::Range;

use crate::elementwise::{LANES, exp, larger, largest_lane, sum_lanes};
use crate::int8_rows::Int8Row;
use crate::kv_geometry::{MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS};
use crate::kv_page::SpanScales;

/// The pages of one span, and the pages that are read after it. A page is the bytes that
/// [`KvDtype`](crate::KvDtype) describes.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    /// The span's pages, up to the last one that a query sees.
    pub pages: &'a [&'a [u8]],
    /// At most as many pages as `pages`, which are read later and may belong to another sequence.
    /// The kernel prefetches their keys meanwhile, or all of them.
    pub next: &'a [&'a [u8]],
    /// The number of the span's keys that the first position sees. Each further position sees one
    /// more, up to the end of the span.
    pub visible: usize,
    /// The number of the span's first keys that are too far away for the first position to see. It
    /// may be negative. One more is too far away for each further position. The pages hold these
    /// keys and values, which must be finite: they get the weight 0.
    pub hidden: isize,
}

impl Span<'_> {
    /// What is hidden if no key is too far away.
    pub const NONE_HIDDEN: isize = isize::MIN / 2;
}

/// The parts into which [`AttentionState::weigh_int8_span`] divides its work on a row.
#[cfg(target_arch = "x86_64")]
pub(crate) const PARTS_OF_WEIGHING: usize = 4;

/// The values of one query, its products with the keys of a span, or its sums. The size is fixed,
/// so that a kernel is compiled with known distances between rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct AttentionRow(pub(crate) [f32; SPAN_TOKENS]);

impl AttentionRow {
    const ZERO: AttentionRow = AttentionRow([0.0; SPAN_TOKENS]);
}

/// Columns of a panel.
#[cfg(target_arch = "x86_64")]
pub(crate) const PANEL_COLUMNS: usize = 32;

/// One row of a panel of widened keys (a dimension of 32 tokens) or values (32 dimensions of a
/// token).
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct PanelRow(pub(crate) [f32; PANEL_COLUMNS]);

/// The buffers of one of the two products of attention, with a row for each query.
pub(crate) struct ProductBuffers<'a> {
    /// The queries, or the weights of the keys.
    pub(crate) input: &'a [AttentionRow],
    /// The products with the keys, or the weighted sums of the values.
    pub(crate) output: &'a mut [AttentionRow],
    /// Room for widened keys or values.
    #[cfg(target_arch = "x86_64")]
    pub(crate) panel: &'a mut [PanelRow],
}

/// Attention of the query heads that share one KV head, at some neighbouring positions of one
/// sequence, over the spans so far. The buffers are reused.
pub struct AttentionState {
    group: usize, // The number of these heads.
    positions: usize,
    head_dim: usize,
    is_empty: bool,             // No span was merged yet.
    queries: Vec<AttentionRow>, // [position][head]
    scores: Vec<AttentionRow>,  // [position][head], of the current span.
    int8: Vec<Int8Row>,         // [position][head], for 8-bit integers.
    past: PartialSoftmax,
    span: PartialSoftmax,
    #[cfg(target_arch = "x86_64")]
    panel: Vec<PanelRow>,
}

/// The results of some spans, which are merged later into the state that has the spans before them.
/// The memory is reused.
pub struct SavedSpans {
    rows: usize,      // Queries.
    columns: usize,   // Values of a head.
    values: Vec<f32>, // Of each span: the largest score and the sum of each query, then its `acc`.
}

impl SavedSpans {
    /// Allocates room for `max_spans` spans of `max_rows` queries of `max_head_dim` values.
    pub fn new(max_spans: usize, max_rows: usize, max_head_dim: usize) -> SavedSpans {
        SavedSpans {
            rows: 0,
            columns: 0,
            values: Vec::with_capacity(max_spans * max_rows * (2 + max_head_dim)),
        }
    }

    /// Forgets all spans.
    pub fn clear(&mut self) {
        self.values.clear();
    }

    /// # Panics
    /// If there are spans, and the state has none or another shape.
    #[track_caller]
    pub(crate) fn assert_continues(&self, state: &AttentionState) {
        let shape = (state.rows(), state.head_dim);
        assert!(
            self.values.is_empty() || !state.is_empty && (self.rows, self.columns) == shape,
            "saved spans of {} queries of {} values continue a state of {shape:?}",
            self.rows,
            self.columns
        );
    }

    /// Returns the values of each span.
    fn spans(&self) -> impl Iterator<Item = &[f32]> {
        let span = self.rows * (2 + self.columns);
        self.values.chunks_exact(span.max(1))
    }
}

/// The softmax of some keys for each `[position][head]`, ready to be merged with further keys.
struct PartialSoftmax {
    largest: Vec<f32>,      // The largest score.
    sum: Vec<f32>,          // The sum of the weights exp(score − largest).
    acc: Vec<AttentionRow>, // The sum of weight · value.
}

impl AttentionState {
    /// Allocates room for `max_group` query heads of `max_head_dim` values, at up to
    /// [`PAGE_TOKENS`] positions.
    ///
    /// # Panics
    /// If `max_head_dim` exceeds [`MAX_HEAD_DIM`].
    pub fn new(max_group: usize, max_head_dim: usize) -> AttentionState {
        assert!(max_head_dim <= MAX_HEAD_DIM, "a head of {max_head_dim}");
        let rows = max_group * PAGE_TOKENS;
        AttentionState {
            group: 0,
            positions: 0,
            head_dim: 0,
            is_empty: true,
            queries: vec![AttentionRow::ZERO; rows],
            scores: vec![AttentionRow::ZERO; rows],
            int8: vec![Int8Row::ZERO; rows],
            past: PartialSoftmax::new(rows),
            span: PartialSoftmax::new(rows),
            #[cfg(target_arch = "x86_64")]
            panel: vec![PanelRow([0.0; PANEL_COLUMNS]); SPAN_TOKENS],
        }
    }

    /// Forgets all keys and sets the shape. The caller writes the queries next.
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
        self.is_empty = true;
    }

    /// Returns the query of a head of the group at one of the positions, to be filled.
    ///
    /// # Panics
    /// If there is no such position or head.
    pub fn query_mut(&mut self, position: usize, head: usize) -> &mut [f32] {
        assert!(
            position < self.positions && head < self.group,
            "head {head} of {} at position {position} of {}",
            self.group,
            self.positions
        );
        &mut self.queries[position * self.group + head].0[..self.head_dim]
    }

    /// Returns the number of query heads, as of the last [`AttentionState::reset`].
    pub fn group(&self) -> usize {
        self.group
    }

    /// Returns the number of positions, as of the last [`AttentionState::reset`].
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns the number of values of a head, as of the last [`AttentionState::reset`].
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the number of queries.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.positions * self.group
    }

    /// Returns how many keys of a span query `row` sees, if the first position sees `visible`.
    #[inline(always)]
    pub(crate) fn seen(&self, row: usize, visible: usize) -> usize {
        (visible + row / self.group).min(SPAN_TOKENS)
    }

    /// Returns how many of the first keys of a span are too far away for query `row`, if `hidden`
    /// are for the first position.
    #[inline(always)]
    pub(crate) fn hidden(&self, row: usize, hidden: isize) -> usize {
        (hidden + (row / self.group) as isize).max(0) as usize
    }

    /// Returns the buffers of the first product: queries, and their products with the keys.
    #[inline(always)]
    pub(crate) fn score_buffers(&mut self) -> ProductBuffers<'_> {
        let rows = self.rows();
        ProductBuffers {
            input: &self.queries[..rows],
            output: &mut self.scores[..rows],
            #[cfg(target_arch = "x86_64")]
            panel: &mut self.panel,
        }
    }

    /// Returns the buffers of the second product: the weights that [`AttentionState::weigh_span`]
    /// made of the scores, and the weighted sums of the values.
    #[inline(always)]
    pub(crate) fn value_buffers(&mut self) -> ProductBuffers<'_> {
        let rows = self.rows();
        ProductBuffers {
            input: &self.scores[..rows],
            output: &mut self.span.acc[..rows],
            #[cfg(target_arch = "x86_64")]
            panel: &mut self.panel,
        }
    }

    /// Quantizes the queries, unless a span before did.
    #[inline(always)]
    pub(crate) fn quantize_queries(&mut self) {
        if self.is_empty {
            let rows = self.rows();
            for (int8, query) in self.int8[..rows].iter_mut().zip(&self.queries) {
                int8.set_query(&query.0[..self.head_dim]);
            }
        }
    }

    /// Returns the quantized queries, and the buffer of their products with the keys.
    #[inline(always)]
    pub(crate) fn int8_score_buffers(&mut self) -> (&[Int8Row], &mut [AttentionRow]) {
        let rows = self.rows();
        (&self.int8[..rows], &mut self.scores[..rows])
    }

    /// Returns the quantized weights, and the buffer of the weighted sums of the values.
    #[inline(always)]
    pub(crate) fn int8_value_buffers(&mut self) -> (&[Int8Row], &mut [AttentionRow]) {
        let rows = self.rows();
        (&self.int8[..rows], &mut self.span.acc[..rows])
    }

    /// Turns products into weights: exp(score − largest) with score = product / sqrt(head_dim). If
    /// there are scales, a product is first multiplied by the scale of its key, and a weight then
    /// by the scale of its value. The weights that the sum adds up have no scale.
    ///
    /// The weights of keys that are too far away are 0. Those of keys behind the last one that a
    /// query sees are unspecified.
    #[inline(always)]
    pub(crate) fn weigh_span(
        &mut self,
        (visible, hidden): (usize, isize),
        scales: Option<&SpanScales>,
    ) {
        let factor = 1.0 / (self.head_dim as f32).sqrt();
        for row in 0..self.rows() {
            let (seen, hidden) = (self.seen(row, visible), self.hidden(row, hidden));
            let scores = &mut self.scores[row].0[..seen.next_multiple_of(LANES)];
            if let Some(scales) = scales {
                multiply(scores, &scales.keys);
            }
            (self.span.largest[row], self.span.sum[row]) = weigh(scores, hidden..seen, factor);
            if let Some(scales) = scales {
                multiply(scores, &scales.values);
            }
        }
    }

    /// Turns products of quantized queries into quantized weights, as
    /// [`AttentionState::weigh_span`] does. The weight of a key that a query does not see is zero,
    /// up to the end of the pages. Calls `meanwhile`, which prefetches, [`PARTS_OF_WEIGHING`] times
    /// for each row.
    #[inline(always)]
    pub(crate) fn weigh_int8_span(
        &mut self,
        span: Span<'_>,
        scales: &SpanScales,
        mut meanwhile: impl FnMut(),
    ) {
        let factor = 1.0 / (self.head_dim as f32).sqrt();
        let end = span.pages.len() * PAGE_TOKENS;
        for row in 0..self.rows() {
            let (seen, hidden) = (self.seen(row, span.visible), self.hidden(row, span.hidden));
            let scores = &mut self.scores[row].0[..end];
            let int8 = &mut self.int8[row];
            multiply(scores, &scales.keys);
            meanwhile();
            let factor = factor * int8.query_scale;
            (self.span.largest[row], self.span.sum[row]) = weigh(scores, hidden..seen, factor);
            meanwhile();
            multiply(scores, &scales.values);
            scores[seen..].fill(0.0);
            meanwhile();
            int8.set_weights(scores);
            meanwhile();
        }
    }

    /// Appends the current span to `saved` instead of merging it.
    ///
    /// # Panics
    /// If `saved` has no room, or has spans of another shape.
    pub(crate) fn save_span(&self, saved: &mut SavedSpans) {
        let shape = (self.rows(), self.head_dim);
        if saved.values.is_empty() {
            (saved.rows, saved.columns) = shape;
        }
        assert_eq!((saved.rows, saved.columns), shape, "the shape of the spans");
        let (rows, columns) = shape;
        let free = saved.values.capacity() - saved.values.len();
        assert!(rows * (2 + columns) <= free, "no room for another span");
        saved.values.extend_from_slice(&self.span.largest[..rows]);
        saved.values.extend_from_slice(&self.span.sum[..rows]);
        for acc in &self.span.acc[..rows] {
            saved.values.extend_from_slice(&acc.0[..columns]);
        }
    }

    /// Merges the current span into the past ones. The first span is taken as it is.
    #[inline(always)]
    fn merge_span(&mut self) {
        if std::mem::take(&mut self.is_empty) {
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
}

/// Merges the current span into the past ones.
#[inline(always)]
pub(crate) fn attention_merge(state: &mut AttentionState) {
    state.merge_span();
}

/// Merges saved spans into the past ones, in their order.
#[inline(always)]
pub(crate) fn attention_resume(state: &mut AttentionState, saved: &SavedSpans) {
    for values in saved.spans() {
        let (largest, values) = values.split_at(saved.rows);
        let (sums, values) = values.split_at(saved.rows);
        state.span.largest[..saved.rows].copy_from_slice(largest);
        state.span.sum[..saved.rows].copy_from_slice(sums);
        let rows = values.chunks_exact(saved.columns);
        for (acc, values) in state.span.acc.iter_mut().zip(rows) {
            acc.0[..saved.columns].copy_from_slice(values);
        }
        state.merge_span();
    }
}

/// Multiplies scores by the scales of their keys or values.
///
/// The loop is not over chunks: the compiler would gather a lane of all chunks.
#[inline(always)]
fn multiply(scores: &mut [f32], scales: &[f32; SPAN_TOKENS]) {
    for (score, scale) in scores.iter_mut().zip(scales) {
        *score *= scale;
    }
}

/// Turns products, of which a query sees those of `seen`, into weights: exp(score − largest) with
/// score = product · factor. Returns the largest score and the sum of the weights.
#[inline(always)]
fn weigh(scores: &mut [f32], seen: Range<usize>, factor: f32) -> (f32, f32) {
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let chunks = scores.as_chunks_mut::<LANES>().0;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in &*chunks {
        for (lane, &product) in lanes.iter_mut().zip(chunk) {
            *lane = larger(product, *lane);
        }
    }
    // Rounding is monotonic: the largest product becomes the largest score.
    let largest = factor * largest_lane(&lanes);
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            *score = exp(*score * factor - largest);
            *sum += *score;
        }
    }
    (largest, sum_lanes(&sums))
}

/// Writes the attention output `[position][head][head_dim]`: the weighted sums of the values,
/// divided by the sum of the weights.
#[inline(always)]
pub(crate) fn attention_finish(state: &AttentionState, out: &mut [f32]) {
    for (row, out) in out.chunks_exact_mut(state.head_dim).enumerate() {
        for (out, acc) in out.iter_mut().zip(&state.past.acc[row].0) {
            *out = acc / state.past.sum[row];
        }
    }
}

impl PartialSoftmax {
    fn new(rows: usize) -> PartialSoftmax {
        let lanes = rows.next_multiple_of(LANES);
        PartialSoftmax {
            largest: vec![f32::NEG_INFINITY; lanes],
            sum: vec![0.0; lanes],
            acc: vec![AttentionRow::ZERO; rows],
        }
    }

    /// Merges the largest scores and the sums of sixteen rows. Returns the factors by which the
    /// weighted sums of the past and of the span shrink.
    #[inline(always)]
    fn join(&mut self, span: &PartialSoftmax, first: usize) -> [[f32; LANES]; 2] {
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
