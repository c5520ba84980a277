//! Activations of several tokens as int8, each token with its own scale.
//!
//! Invariant: rows are padded with zeros to whole blocks of the weights, in every packing.
//!
//! Invariant: `sum` is the sum of the row. It turns products with codes (weight + 1) into products
//! with weights: Σ weight · q = Σ code · q − Σ q.

use std::ops::Range;

use crate::HugeSlice;
use crate::packing::{FIVE_TRIT_COLUMNS, TWO_BIT_COLUMNS};

/// The activations of some tokens, `[token][columns rounded up]`, with a scale and a sum for each
/// token. The buffers are reused from step to step.
pub struct QuantizedActivations {
    tokens: usize,
    columns: usize,
    values: HugeSlice<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl QuantizedActivations {
    /// Allocates room for `max_tokens` rows of `max_columns`. There are no tokens yet.
    pub fn new(max_tokens: usize, max_columns: usize) -> QuantizedActivations {
        QuantizedActivations {
            tokens: 0,
            columns: 0,
            values: HugeSlice::new(max_tokens * stride(max_columns)),
            scales: vec![0.0; max_tokens],
            sums: vec![0; max_tokens],
        }
    }

    /// Sets the shape. The contents of a token are unspecified until it is quantized.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`QuantizedActivations::new`].
    pub fn reset(&mut self, tokens: usize, columns: usize) {
        assert!(
            tokens <= self.scales.len(),
            "no room for {tokens} tokens, only for {}",
            self.scales.len()
        );
        (self.tokens, self.columns) = (tokens, columns);
        let (stride, room) = (self.stride(), self.values.len());
        assert!(
            tokens * stride <= room,
            "no room for {tokens} × {stride} values, only for {room}"
        );
        for row in self.values.chunks_exact_mut(stride).take(tokens) {
            row[columns..].fill(0);
        }
    }

    /// Returns the tokens, to be filled by [`Kernels::quantize`](crate::Kernels::quantize). Each
    /// may be sent to another thread.
    pub fn tokens_mut(&mut self) -> impl Iterator<Item = QuantizedTokenMut<'_>> {
        let all = 0..self.tokens;
        let mut whole = self.parts_mut(std::iter::once(all));
        whole.next().into_iter().flatten()
    }

    /// Divides the tokens into contiguous parts, from the first token on. Each part may be sent to
    /// another thread.
    ///
    /// # Panics
    /// If the ranges do not follow each other from 0, or exceed the tokens.
    pub fn parts_mut(
        &mut self,
        ranges: impl IntoIterator<Item = Range<usize>>,
    ) -> impl Iterator<Item = QuantizedTokensMut<'_>> {
        let (columns, stride) = (self.columns, self.stride());
        let mut values = &mut self.values[..self.tokens * stride];
        let mut scales = &mut self.scales[..self.tokens];
        let mut sums = &mut self.sums[..self.tokens];
        let mut at = 0;
        ranges.into_iter().map(move |range| {
            assert_eq!(range.start, at, "parts follow each other");
            at = range.end;
            QuantizedTokensMut {
                columns,
                stride,
                values: values
                    .split_off_mut(..range.len() * stride)
                    .expect("a part has tokens of the whole"),
                scales: scales
                    .split_off_mut(..range.len())
                    .expect("a part has tokens of the whole"),
                sums: sums
                    .split_off_mut(..range.len())
                    .expect("a part has tokens of the whole"),
            }
        })
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of columns: the values of a token.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the scale of each token: activation ≈ q / scale.
    pub fn scales(&self) -> &[f32] {
        &self.scales[..self.tokens]
    }

    /// Returns the sum of a token's quantized activations.
    pub fn sum(&self, token: usize) -> i32 {
        self.sums[..self.tokens][token]
    }

    /// Returns a token's quantized activations, without the padding.
    pub fn row(&self, token: usize) -> &[i8] {
        &self.padded_row(token)[..self.columns]
    }

    /// Returns a token's quantized activations with the zeros that fill the last block.
    #[inline]
    pub(crate) fn padded_row(&self, token: usize) -> &[i8] {
        &self.values[..self.tokens * self.stride()][token * self.stride()..][..self.stride()]
    }

    fn stride(&self) -> usize {
        stride(self.columns)
    }
}

/// Activations, and the factor of each token by which a product's sums are multiplied: the scale of
/// the weights over the scale of the token's activations.
#[derive(Clone, Copy)]
pub struct ScaledActivations<'a> {
    /// The activations.
    pub activations: &'a QuantizedActivations,
    /// One factor for each token.
    pub factors: &'a [f32],
}

/// Rounds columns up to whole blocks of weights in every packing.
fn stride(columns: usize) -> usize {
    columns
        .max(1)
        .next_multiple_of(FIVE_TRIT_COLUMNS)
        .next_multiple_of(TWO_BIT_COLUMNS)
}

/// Neighbouring tokens of [`QuantizedActivations`], to be filled.
pub struct QuantizedTokensMut<'a> {
    columns: usize,
    stride: usize,
    values: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
}

impl<'a> Iterator for QuantizedTokensMut<'a> {
    type Item = QuantizedTokenMut<'a>;

    fn next(&mut self) -> Option<QuantizedTokenMut<'a>> {
        let row = self.values.split_off_mut(..self.stride)?;
        Some(QuantizedTokenMut {
            values: &mut row[..self.columns],
            scale: self.scales.split_off_first_mut()?,
            sum: self.sums.split_off_first_mut()?,
        })
    }
}

/// One token's place in [`QuantizedActivations`].
pub struct QuantizedTokenMut<'a> {
    pub(crate) values: &'a mut [i8],
    pub(crate) scale: &'a mut f32,
    pub(crate) sum: &'a mut i32,
}
