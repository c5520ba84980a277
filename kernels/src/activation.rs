//! Activations of several tokens as int8, each token with its own scale.
//!
//! Always true: rows are padded with zeros to whole blocks of the weights, and `sum` is the sum of the row, which turns products with
//! codes (weight + 1) into products with weights: Σ w·q = Σ code·q − Σ q.

use crate::ternary::BLOCK_COLUMNS;

/// m tokens' activations, `[m][columns rounded up to 16]`, with a scale and a sum each. The buffers are reused from step to step.
pub struct QuantizedActivations {
    tokens: usize,
    columns: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl QuantizedActivations {
    /// Room for `max_tokens` rows of `max_columns`; holds no token yet.
    #[must_use]
    pub fn new(max_tokens: usize, max_columns: usize) -> QuantizedActivations {
        QuantizedActivations {
            tokens: 0,
            columns: 0,
            values: vec![0; max_tokens * max_columns.next_multiple_of(BLOCK_COLUMNS)],
            scales: vec![0.0; max_tokens],
            sums: vec![0; max_tokens],
        }
    }

    /// Sets the shape. What the tokens hold is unspecified until each has been quantized.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`QuantizedActivations::new`].
    pub fn reset(&mut self, tokens: usize, columns: usize) {
        assert!(
            tokens <= self.scales.len(),
            "{tokens} tokens, room for {}",
            self.scales.len()
        );
        (self.tokens, self.columns) = (tokens, columns);
        let (stride, room) = (self.stride(), self.values.len());
        assert!(
            tokens * stride <= room,
            "{tokens} × {stride} values, room for {room}"
        );
        for row in self.values.chunks_exact_mut(stride).take(tokens) {
            row[columns..].fill(0);
        }
    }

    /// The tokens, to be filled by [`Kernels::quantize`](crate::Kernels::quantize); each may go to another thread.
    pub fn tokens_mut(&mut self) -> impl Iterator<Item = QuantizedTokenMut<'_>> {
        let (columns, stride) = (self.columns, self.stride());
        let rows = self.values.chunks_exact_mut(stride).take(self.tokens);
        let labels = self.scales.iter_mut().zip(&mut self.sums);
        rows.zip(labels)
            .map(move |(row, (scale, sum))| QuantizedTokenMut {
                values: &mut row[..columns],
                scale,
                sum,
            })
    }

    /// m.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// k.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The scale of a token: activation ≈ q / scale.
    #[must_use]
    pub fn scale(&self, token: usize) -> f32 {
        self.scales[..self.tokens][token]
    }

    /// The sum of a token's quantized activations.
    #[must_use]
    pub fn sum(&self, token: usize) -> i32 {
        self.sums[..self.tokens][token]
    }

    /// A token's quantized activations, without the padding.
    #[must_use]
    pub fn row(&self, token: usize) -> &[i8] {
        &self.padded_row(token)[..self.columns]
    }

    /// A token's quantized activations with the zeros that fill the last block.
    #[inline]
    pub(crate) fn padded_row(&self, token: usize) -> &[i8] {
        &self.values[..self.tokens * self.stride()][token * self.stride()..][..self.stride()]
    }

    fn stride(&self) -> usize {
        self.columns
            .next_multiple_of(BLOCK_COLUMNS)
            .max(BLOCK_COLUMNS)
    }
}

/// One token's place in [`QuantizedActivations`].
pub struct QuantizedTokenMut<'a> {
    pub(crate) values: &'a mut [i8],
    pub(crate) scale: &'a mut f32,
    pub(crate) sum: &'a mut i32,
}
