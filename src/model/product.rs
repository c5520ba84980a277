//! The product of one linear with the rows of all tokens.
//!
//! Products are panel-major, `[panel][token][PANEL_ROWS]`, as the kernels write them.

use std::ops::Range;

use sterna_kernels::{PANEL_ROWS, prefetch};

/// How many panels ahead a token's values are prefetched. With many tokens, panels are far apart.
const PANELS_AHEAD: usize = 4;

/// A view of the product of one linear with the rows of `tokens` tokens.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) values: &'a [f32],
    /// The rows of the linear: the values that each token has.
    pub(super) rows: usize,
    pub(super) tokens: usize,
}

impl<'a> Product<'a> {
    /// Adds the values of `tokens` to `out`, `[token][row]`.
    pub(super) fn add_to(self, tokens: Range<usize>, out: &mut [f32]) {
        self.for_each_piece(tokens, out, |out, piece| {
            out.iter_mut().zip(piece).for_each(|(out, x)| *out += x);
        });
    }

    /// Copies the values of `tokens` to `out`, `[token][row]`.
    pub(super) fn copy_to(self, tokens: Range<usize>, out: &mut [f32]) {
        self.for_each_piece(tokens, out, <[f32]>::copy_from_slice);
    }

    /// Copies a token's values from `first_row` on to fill `out`.
    pub(super) fn copy_rows(self, token: usize, first_row: usize, out: &mut [f32]) {
        assert!(first_row + out.len() <= self.rows, "rows of the product");
        let mut done = 0;
        while done < out.len() {
            let row = first_row + done;
            let piece = &self.piece(token, row / PANEL_ROWS)[row % PANEL_ROWS..];
            let count = piece.len().min(out.len() - done);
            let out = &mut out[done..done + count];
            on_piece(out, &piece[..count], <[f32]>::copy_from_slice);
            done += count;
        }
    }

    /// Returns a token's values in a panel.
    fn piece(self, token: usize, panel: usize) -> &'a [f32] {
        let rows = (self.rows - panel * PANEL_ROWS).min(PANEL_ROWS);
        &self.values[(panel * self.tokens + token) * PANEL_ROWS..][..rows]
    }

    /// Calls `each(out, values)` for every token and panel, in the order of the values in memory.
    fn for_each_piece(
        self,
        tokens: Range<usize>,
        out: &mut [f32],
        each: impl Fn(&mut [f32], &[f32]),
    ) {
        assert_eq!(
            out.len(),
            tokens.len() * self.rows,
            "`out` has one place per value"
        );
        let panels = self.values.chunks_exact(self.tokens * PANEL_ROWS);
        let tokens = tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS;
        for (panel, values) in panels.enumerate() {
            let first = panel * PANEL_ROWS;
            let rows = (self.rows - first).min(PANEL_ROWS);
            let ahead = (panel + PANELS_AHEAD) * self.tokens * PANEL_ROWS;
            if let Some(values) = self.values.get(ahead + tokens.start..ahead + tokens.end) {
                prefetch(values);
            }
            let pieces = values[tokens.clone()].chunks_exact(PANEL_ROWS);
            for (out, piece) in out.chunks_exact_mut(self.rows).zip(pieces) {
                on_piece(&mut out[first..][..rows], &piece[..rows], &each);
            }
        }
    }
}

/// Calls `each` with both slices. A whole piece, the usual case, is passed with a length that the
/// compiler knows, so `each` is inlined without a call to `memcpy`.
#[inline(always)]
fn on_piece(out: &mut [f32], piece: &[f32], each: impl Fn(&mut [f32], &[f32])) {
    if out.len() == PANEL_ROWS {
        each(&mut out[..PANEL_ROWS], &piece[..PANEL_ROWS]);
    } else {
        each(out, piece);
    }
}
