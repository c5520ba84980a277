//! Attention over one span of keys: the state that spans are merged into, and all of it that is not a product.
//!
//! Keys are taken in absolute spans of [`SPAN_TOKENS`] positions. Each span is reduced on its own, from (largest −∞, sum 0, output 0), and
//! spans merge in ascending order. So what a query receives depends on its position alone: not on chunks, batches or threads.
//! Each instruction set multiplies keys and values in its own file; what stands between is here, compiled by each for itself.
//!
//! Always true: a key that the query may not see contributes nothing, whatever its memory holds (a recycled page may hold NaN).

use crate::elementwise::{LANES, exp, sum_lanes};

/// Tokens of a page of keys and values.
pub const PAGE_TOKENS: usize = 16;

/// Keys of a span, the unit of reduction.
pub const SPAN_TOKENS: usize = 256;

/// One KV head's keys and values of [`PAGE_TOKENS`] tokens, in half precision (as bits).
#[derive(Clone, Copy)]
pub struct KvPage<'a> {
    /// `[d][16]`: one dimension of all tokens is contiguous, so a token is a lane.
    pub keys: &'a [u16],
    /// `[16][d]`.
    pub values: &'a [u16],
}

/// Attention of g query heads at one position, over the spans so far. The buffers are reused from query to query.
pub struct AttentionState {
    group: usize,
    head_dim: usize,
    past: Reduced,
    span: Reduced,
    scores: Vec<f32>, // [g][SPAN_TOKENS], of the current span
}

/// Some keys, reduced: what softmax needs to go on with more of them.
struct Reduced {
    largest: Vec<f32>, // [g]: the largest score
    sum: Vec<f32>,     // [g]: of the weights exp(score − largest)
    acc: Vec<f32>,     // [g][d]: of weight · value
}

impl AttentionState {
    /// Room for `max_group` query heads of `max_head_dim` values.
    #[must_use]
    pub fn new(max_group: usize, max_head_dim: usize) -> AttentionState {
        AttentionState {
            group: 0,
            head_dim: 0,
            past: Reduced::new(max_group, max_head_dim),
            span: Reduced::new(max_group, max_head_dim),
            scores: vec![0.0; max_group * SPAN_TOKENS],
        }
    }

    /// Forgets all keys: the start of a query.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`AttentionState::new`].
    pub fn reset(&mut self, group: usize, head_dim: usize) {
        let (heads, values) = (self.past.largest.len(), self.past.acc.len());
        assert!(group <= heads, "a group of {group}, room for {heads}");
        assert!(
            group * head_dim <= values,
            "{group} heads of {head_dim}, room for {values} values"
        );
        (self.group, self.head_dim) = (group, head_dim);
        self.past.largest[..group].fill(f32::NEG_INFINITY);
        self.past.sum[..group].fill(0.0);
        self.past.acc[..group * head_dim].fill(0.0);
    }

    /// g, as of the last [`AttentionState::reset`].
    #[must_use]
    pub fn group(&self) -> usize {
        self.group
    }

    /// d, as of the last [`AttentionState::reset`].
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// The products of queries and keys of the current span, `[g][SPAN_TOKENS]`, to be filled.
    #[inline(always)]
    pub(crate) fn scores_mut(&mut self) -> &mut [f32] {
        &mut self.scores[..self.group * SPAN_TOKENS]
    }

    /// The weights that [`AttentionState::weigh_span`] made of the scores, and the weighted sums `[g][d]` to be filled.
    #[inline(always)]
    pub(crate) fn weights_and_acc_mut(&mut self) -> (&[f32], &mut [f32]) {
        (
            &self.scores[..self.group * SPAN_TOKENS],
            &mut self.span.acc[..self.group * self.head_dim],
        )
    }

    /// Turns products into weights: exp(score − largest) with score = product / sqrt(d); zero for the keys beyond `visible`.
    #[inline(always)]
    pub(crate) fn weigh_span(&mut self, visible: usize) {
        let factor = 1.0 / (self.head_dim as f32).sqrt();
        for (head, scores) in self
            .scores
            .as_chunks_mut::<SPAN_TOKENS>()
            .0
            .iter_mut()
            .take(self.group)
            .enumerate()
        {
            let scores = &mut scores[..visible.next_multiple_of(LANES)];
            scores[visible..].fill(f32::NEG_INFINITY);
            let chunks = scores.as_chunks_mut::<LANES>().0;
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for chunk in &mut *chunks {
                for (lane, score) in lanes.iter_mut().zip(chunk) {
                    *score *= factor;
                    *lane = if *score > *lane { *score } else { *lane };
                }
            }
            let largest = lanes
                .iter()
                .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            let mut sums = [0.0; LANES];
            for chunk in chunks {
                for (sum, score) in sums.iter_mut().zip(chunk) {
                    *score = exp(*score - largest);
                    *sum += *score;
                }
            }
            self.span.largest[head] = largest;
            self.span.sum[head] = sum_lanes(&sums);
        }
    }

    /// Adds the current span to the past ones. The first one is taken over as it is: exp(0) is exactly 1, exp(−∞) exactly 0.
    #[inline(always)]
    pub(crate) fn merge_span(&mut self) {
        let AttentionState { past, span, .. } = self;
        for head in 0..self.group {
            let largest = past.largest[head].max(span.largest[head]);
            let keep = exp(past.largest[head] - largest);
            let take = exp(span.largest[head] - largest);
            past.largest[head] = largest;
            past.sum[head] = past.sum[head] * keep + span.sum[head] * take;
            let values = head * self.head_dim..(head + 1) * self.head_dim;
            for (past, span) in past.acc[values.clone()].iter_mut().zip(&span.acc[values]) {
                *past = *past * keep + *span * take;
            }
        }
    }

    /// The attention output `[g][d]`: weighted values over the sum of the weights.
    #[inline(always)]
    pub(crate) fn finish(&self, out: &mut [f32]) {
        for head in 0..self.group {
            let values = head * self.head_dim..(head + 1) * self.head_dim;
            for (out, acc) in out[values.clone()].iter_mut().zip(&self.past.acc[values]) {
                *out = acc / self.past.sum[head];
            }
        }
    }
}

impl Reduced {
    fn new(max_group: usize, max_head_dim: usize) -> Reduced {
        Reduced {
            largest: vec![0.0; max_group],
            sum: vec![0.0; max_group],
            acc: vec![0.0; max_group * max_head_dim],
        }
    }
}
