//! Activations of several tokens as int8. Each token has its own scale, or one for each group of
//! columns if the weights have groups.
//!
//! Invariant: rows are padded with zeros to whole blocks of the weights, in every packing.
//!
//! Invariant: `sums` has the sum of each group, or of the row. It turns products with codes
//! (weight + 1) into products with weights: Σ weight · q = Σ code · q − Σ q.

use std::ops::Range;

use crate::groups::{GroupSize, PartialGroup};
use crate::huge::HugeSlice;
use crate::packing::{FIVE_TRIT_COLUMNS, TWO_BIT_COLUMNS};

/// The activations of some tokens, `[token][columns rounded up]`, with a scale and a sum for each
/// token, or `[token][group]`. The buffers are reused from step to step.
pub struct QuantizedActivations {
    max_tokens: usize,
    tokens: usize,
    columns: usize,
    group: Option<GroupSize>,
    groups: usize, // 1 if there are no groups.
    values: HugeSlice<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl QuantizedActivations {
    /// Allocates room for `max_tokens` rows of `max_columns`, in groups or not. There are no tokens
    /// yet.
    pub fn new(max_tokens: usize, max_columns: usize) -> QuantizedActivations {
        let values = max_tokens * stride(max_columns);
        let groups = max_tokens.max(values / GroupSize::G64.columns());
        QuantizedActivations {
            max_tokens,
            tokens: 0,
            columns: 0,
            group: None,
            groups: 1,
            values: HugeSlice::new(values),
            scales: vec![0.0; groups],
            sums: vec![0; groups],
        }
    }

    /// Sets the shape: one scale for each token. The contents of a token are unspecified until it
    /// is quantized.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`QuantizedActivations::new`].
    pub fn reset(&mut self, tokens: usize, columns: usize) {
        (self.group, self.groups) = (None, 1);
        self.set_shape(tokens, columns);
    }

    /// Sets the shape: one scale for each token and group of columns. The contents of a token are
    /// unspecified until it is quantized.
    ///
    /// # Errors
    /// If the columns are not whole groups.
    ///
    /// # Panics
    /// If the shape is larger than the room given to [`QuantizedActivations::new`].
    pub fn reset_groups(
        &mut self,
        tokens: usize,
        columns: usize,
        group: GroupSize,
    ) -> Result<(), PartialGroup> {
        (self.group, self.groups) = (Some(group), group.count(columns)?);
        self.set_shape(tokens, columns);
        Ok(())
    }

    /// Sets the shape as [`QuantizedActivations::reset`] or [`QuantizedActivations::reset_groups`]
    /// does.
    ///
    /// # Panics
    /// If the columns are not whole groups, or the shape is larger than the room.
    pub fn reset_as(&mut self, tokens: usize, columns: usize, group: Option<GroupSize>) {
        match group {
            None => self.reset(tokens, columns),
            Some(group) => {
                let whole = self.reset_groups(tokens, columns, group);
                whole.expect("the columns are whole groups");
            }
        }
    }

    /// Becomes some tokens of `from`, in the order of `tokens`.
    ///
    /// # Panics
    /// If there is no such token, or the shape is larger than the room.
    pub fn gather(
        &mut self,
        from: &QuantizedActivations,
        tokens: impl ExactSizeIterator<Item = usize>,
    ) {
        self.reset_as(tokens.len(), from.columns, from.group);
        let (stride, groups) = (self.stride(), self.groups);
        for (place, token) in tokens.enumerate() {
            assert!(token < from.tokens, "token {token} of {}", from.tokens);
            let row = &mut self.values[place * stride..][..stride];
            row.copy_from_slice(from.padded_row(token));
            let (own, other) = (place * groups, token * groups);
            self.scales[own..own + groups].copy_from_slice(&from.scales[other..other + groups]);
            self.sums[own..own + groups].copy_from_slice(&from.sums[other..other + groups]);
        }
    }

    fn set_shape(&mut self, tokens: usize, columns: usize) {
        assert!(
            tokens <= self.max_tokens,
            "no room for {tokens} tokens, only for {}",
            self.max_tokens
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
        let (columns, stride, groups) = (self.columns, self.stride(), self.groups);
        let mut values = &mut self.values[..self.tokens * stride];
        let mut scales = &mut self.scales[..self.tokens * groups];
        let mut sums = &mut self.sums[..self.tokens * groups];
        let mut at = 0;
        ranges.into_iter().map(move |range| {
            assert_eq!(range.start, at, "parts follow each other");
            at = range.end;
            QuantizedTokensMut {
                columns,
                stride,
                groups,
                values: values
                    .split_off_mut(..range.len() * stride)
                    .expect("a part has tokens of the whole"),
                scales: scales
                    .split_off_mut(..range.len() * groups)
                    .expect("a part has tokens of the whole"),
                sums: sums
                    .split_off_mut(..range.len() * groups)
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

    /// Returns the size of the groups of columns that have a scale of their own, if any have.
    pub fn group(&self) -> Option<GroupSize> {
        self.group
    }

    /// Returns the scale of each token, or of each token and group, `[token][group]`:
    /// activation ≈ q / scale.
    pub fn scales(&self) -> &[f32] {
        &self.scales[..self.tokens * self.groups]
    }

    /// Returns the sum of a token's quantized activations.
    ///
    /// # Panics
    /// If the activations have groups.
    pub fn sum(&self, token: usize) -> i32 {
        assert!(self.group.is_none(), "one sum for each token, no groups");
        self.sums[..self.tokens][token]
    }

    /// Returns the sums of a token's quantized activations, one for each group.
    #[inline(always)]
    pub fn sums(&self, token: usize) -> &[i32] {
        &self.sums[..self.tokens * self.groups][token * self.groups..][..self.groups]
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

/// Activations, and the factor by which a product's sums are multiplied: the scale of the weights,
/// or 1 if the weights have groups, over the scale of the activations.
#[derive(Clone, Copy)]
pub struct ScaledActivations<'a> {
    /// The activations.
    pub activations: &'a QuantizedActivations,
    /// One factor for each scale of the activations: `[token]`, or `[token][group]`.
    pub factors: &'a [f32],
}

impl<'a> ScaledActivations<'a> {
    /// Returns the factors of a token, one for each group.
    #[inline(always)]
    pub(crate) fn factors_of(&self, token: usize) -> &'a [f32] {
        let groups = self.activations.groups;
        &self.factors[token * groups..][..groups]
    }

    /// Returns the same as slices.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn slices(&self) -> ActivationSlices<'a> {
        let x = self.activations;
        ActivationSlices {
            groups: x.groups,
            stride: x.stride(),
            values: &x.values,
            sums: &x.sums,
            factors: self.factors,
        }
    }
}

/// Scaled activations as slices: a kernel that divides them for every panel takes them once.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct ActivationSlices<'a> {
    groups: usize,
    stride: usize,
    values: &'a [i8],
    sums: &'a [i32],
    factors: &'a [f32],
}

/// What the groups of one token are multiplied by.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct TokenGroups<'a> {
    /// The activations, group by group.
    pub(crate) values: &'a [i8],
    /// The sum of the activations of each group.
    pub(crate) sums: &'a [i32],
    /// The factor of each group.
    pub(crate) factors: &'a [f32],
}

#[cfg(target_arch = "x86_64")]
impl<'a> ActivationSlices<'a> {
    /// Returns the groups of a token. Each has `columns` columns.
    #[inline(always)]
    pub(crate) fn token(&self, token: usize, columns: usize) -> TokenGroups<'a> {
        let first = token * self.groups;
        TokenGroups {
            values: &self.values[token * self.stride..][..self.groups * columns],
            sums: &self.sums[first..][..self.groups],
            factors: &self.factors[first..][..self.groups],
        }
    }
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
    groups: usize,
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
            scales: self.scales.split_off_mut(..self.groups)?,
            sums: self.sums.split_off_mut(..self.groups)?,
        })
    }
}

/// One token's place in [`QuantizedActivations`].
pub struct QuantizedTokenMut<'a> {
    pub(crate) values: &'a mut [i8],
    /// One for each group. Without groups there is one.
    pub(crate) scales: &'a mut [f32],
    pub(crate) sums: &'a mut [i32],
}

impl QuantizedTokenMut<'_> {
    /// Returns the quantized values.
    pub fn values(&self) -> &[i8] {
        self.values
    }

    /// Returns the scale: value ≈ q / scale.
    ///
    /// # Panics
    /// If there are groups, which have scales of their own.
    pub fn scale(&self) -> f32 {
        assert_eq!(self.scales.len(), 1, "scales of a token without groups");
        self.scales[0]
    }
}
