//! Attention of many queries at once: how a span is cut into panels and tiles. What a tile computes is each instruction set's own.
//!
//! Keys and values are widened to single precision a panel at a time; then all queries meet the panel while it is in the first-level
//! cache, a tile of them at a time, with sums in registers. Each query's sums run in the order of the definition.

use std::ops::Range;

use super::blocks;
use crate::attention::{AttentionState, KvPage, PAGE_TOKENS, Row, SPAN_TOKENS, Span};

/// Columns of a panel.
pub(crate) const PANEL_COLUMNS: usize = 32;

/// One row of a panel of widened keys (a dimension of 32 tokens) or values (32 dimensions of a token).
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct PanelRow(pub(crate) [f32; PANEL_COLUMNS]);

impl PanelRow {
    pub(crate) const ZERO: PanelRow = PanelRow([0.0; PANEL_COLUMNS]);
}

/// Values are widened for this many tokens at once: with 32 columns, half of a first-level cache.
const VALUES_AT_ONCE: usize = 128;

/// A product of some rows: `tile(a, k, panel, c, column, fresh)` makes 32 columns of `c`, from `column` on, the product of `a`, from its
/// column `k` on, and the panel; or adds it to what stands there, unless `fresh`.
pub(crate) trait Tile: Fn(&[Row], usize, &[PanelRow], &mut [Row], usize, bool) {}

impl<F: Fn(&[Row], usize, &[PanelRow], &mut [Row], usize, bool)> Tile for F {}

/// Multiplies all queries with a span's keys: `widen(pages, panel)` makes a panel of up to two pages.
#[inline(always)]
pub(crate) fn score_span(
    state: &mut AttentionState,
    pages: &[KvPage<'_>],
    tile_rows: usize,
    widen: impl Fn(&[KvPage<'_>], &mut [PanelRow]),
    tile: impl Tile,
) {
    let head_dim = state.head_dim();
    let (panel, queries, scores) = state.score_parts();
    let panel = &mut panel[..head_dim];
    for (index, pair) in pages.chunks(PANEL_COLUMNS / PAGE_TOKENS).enumerate() {
        widen(pair, panel);
        for rows in blocks(queries.len(), tile_rows) {
            let (queries, scores) = (&queries[rows.clone()], &mut scores[rows]);
            tile(queries, 0, panel, scores, index * PANEL_COLUMNS, true);
        }
    }
}

/// Adds up a span's values, weighted, for all queries: `widen(tokens, column, panel)` makes a panel of 32 dimensions of some tokens.
#[inline(always)]
pub(crate) fn sum_span(
    state: &mut AttentionState,
    visible: usize,
    tile_rows: usize,
    widen: impl Fn(Range<usize>, usize, &mut [PanelRow]),
    tile: impl Tile,
) {
    let (group, head_dim) = (state.group(), state.head_dim());
    let seen = |row: usize| (visible + row / group).min(SPAN_TOKENS);
    let (panel, weights, acc) = state.sum_parts();
    let all = seen(weights.len() - 1);
    for start in (0..all).step_by(VALUES_AT_ONCE) {
        let end = all.min(start + VALUES_AT_ONCE);
        let panel = &mut panel[..end - start];
        for column in (0..head_dim).step_by(PANEL_COLUMNS) {
            widen(start..end, column, panel);
            for rows in blocks(weights.len(), tile_rows) {
                let (weights, acc) = (&weights[rows.clone()], &mut acc[rows.clone()]);
                // What all of the tile see, then what only its later positions see, each for itself.
                let together = seen(rows.start).clamp(start, end);
                let shared = &panel[..together - start];
                tile(weights, start, shared, acc, column, start == 0);
                for (i, row) in rows.enumerate() {
                    let own = seen(row).clamp(start, end);
                    let panel = &panel[together - start..own - start];
                    if !panel.is_empty() {
                        let (weights, acc) = (&weights[i..=i], &mut acc[i..=i]);
                        tile(weights, together, panel, acc, column, false);
                    }
                }
            }
        }
    }
}

/// Which of the later keys to fetch while the values of the `index`th page are summed in the given dimensions: as many, so that all
/// are fetched once when all dimensions of whole pages are summed, in the order of memory, which the hardware's own prefetching goes along with.
#[inline(always)]
pub(crate) fn next_keys(span: Span<'_>, index: usize, dimensions: Range<usize>) -> *const u16 {
    let page = &span.pages[index];
    let steps_a_page = page.values.len() / PAGE_TOKENS / dimensions.len();
    let step = dimensions.start / dimensions.len() * span.pages.len() + index;
    let keys = span.next.get(step / steps_a_page).unwrap_or(page).keys;
    let at = step % steps_a_page * PAGE_TOKENS * dimensions.len();
    keys.as_ptr().wrapping_add(at)
}
