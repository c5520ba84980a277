//! Kernels by instruction set: one table of functions for each.
//!
//! Invariant: a [`Kernels`] exists only for an instruction set that this CPU has, so having one is
//! the proof that its functions may run.
//!
//! Invariant: shapes are checked here, once for all instruction sets.
#![expect(
    unsafe_code,
    reason = "calls functions compiled for a detected instruction set"
)]

use std::ops::Range;

use crate::activation::{QuantizedActivations, QuantizedTokenMut, ScaledActivations};
use crate::attention::{AttentionState, SavedSpans, Span};
use crate::block::PANEL_ROWS;
use crate::delta::{DELTA_COLUMNS, DeltaUpdate};
use crate::dense::DenseMatrix;
use crate::draw::DrawScores;
use crate::elementwise::PanelScales;
use crate::four_bit::FourBitMatrix;
use crate::int8::Int8Matrix;
use crate::isa::Isa;
use crate::kv_dtype::KvDtype;
use crate::kv_geometry::{MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS};
use crate::kv_page::{Bf16Chunk, E4m3Chunk, E5m2Chunk, F16Chunk};
use crate::packing::Packing;
use crate::prefetch::PrefetchQueue;
use crate::scalar;
use crate::softmax::{LOGITS_BLOCK, LogitScale, Rank};
use crate::ternary::TernaryMatrix;
#[cfg(target_arch = "x86_64")]
use crate::x86_64::{avx2, avx512, avxvnni};

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static KernelTable,
}

/// The functions of an instruction set, some of them by [`KvDtype`]. It is undefined behaviour to
/// call them on a CPU that lacks the instruction set.
#[expect(
    clippy::type_complexity,
    reason = "a table of signatures reads best with the signatures in it"
)]
struct KernelTable {
    quantize: unsafe fn(&[f32], &mut QuantizedTokenMut<'_>),
    ternary_matmul: unsafe fn(
        &TernaryMatrix,
        Range<usize>,
        ScaledActivations<'_>,
        &mut [f32],
        &mut PrefetchQueue<'_, '_>,
    ),
    grouped_matmul: unsafe fn(
        &TernaryMatrix,
        Range<usize>,
        ScaledActivations<'_>,
        &mut [f32],
        &mut PrefetchQueue<'_, '_>,
    ),
    int8_matmul: unsafe fn(&Int8Matrix, Range<usize>, &QuantizedActivations, &mut [i32]),
    four_bit_matmul: unsafe fn(&FourBitMatrix, Range<usize>, &QuantizedActivations, &mut [i32]),
    rounded_dot: unsafe fn(&[f32], f32, &[i8]) -> i32,
    scale_panel: unsafe fn(&[i32], PanelScales<'_>, &mut [f32], &mut [f32]),
    dense_dots: unsafe fn(&DenseMatrix, &[u32], &[f32], &mut [f32]),
    dense_matmul: unsafe fn(&DenseMatrix, Range<usize>, &[f32], usize, &mut [f32]),
    dense_row: unsafe fn(&DenseMatrix, usize, &mut [f32]),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    rope: unsafe fn(&mut [f32], usize, &[f32], &[f32]),
    hadamard: unsafe fn(&mut [f32], usize),
    relu2_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    silu_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    sigmoid_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    delta_step: unsafe fn(&mut [f32], DeltaUpdate<'_>, [&[f32]; 2], [&mut [f32]; 2]),
    delta_finish: unsafe fn([&[f32]; 2], &[f32], [f32; 3], &mut [f32], &mut [f32]),
    convolve: unsafe fn(&[&[f32]], &[f32], &mut [f32]),
    attention_span: [unsafe fn(Span<'_>, &mut AttentionState); KvDtype::ALL.len()],
    attention_merge: unsafe fn(&mut AttentionState),
    attention_resume: unsafe fn(&mut AttentionState, &SavedSpans),
    attention_finish: unsafe fn(&AttentionState, &mut [f32]),
    store_kv: [unsafe fn(&[f32], &[f32], usize, &mut [u8]); KvDtype::ALL.len()],
    scan_logits: unsafe fn(&[f32], &mut [f32]) -> bool,
    sum_weights: unsafe fn(&[f32], LogitScale, Rank, &[f32], &mut [f32]),
    best_score: unsafe fn(&[f32], DrawScores, Rank, &[f32], f32) -> (f32, u32),
    probe_read: unsafe fn(&[u8], bool),
    probe_int8: unsafe fn(u64) -> u64,
    probe_f32: unsafe fn(u64) -> u64,
}

/// Makes the table of a module that has a function of each kernel's name.
macro_rules! table_of {
    ($isa:ident) => {
        KernelTable {
            quantize: $isa::quantize,
            ternary_matmul: $isa::ternary_matmul,
            grouped_matmul: $isa::grouped_matmul,
            int8_matmul: $isa::int8_matmul,
            four_bit_matmul: $isa::four_bit_matmul,
            rounded_dot: $isa::rounded_dot,
            scale_panel: $isa::scale_panel,
            dense_dots: $isa::dense_dots,
            dense_matmul: $isa::dense_matmul,
            dense_row: $isa::dense_row,
            rms_norm: $isa::rms_norm,
            rope: $isa::rope,
            hadamard: $isa::hadamard,
            relu2_gate: $isa::relu2_gate,
            silu_gate: $isa::silu_gate,
            sigmoid_gate: $isa::sigmoid_gate,
            delta_step: $isa::delta_step,
            delta_finish: $isa::delta_finish,
            convolve: $isa::convolve,
            attention_span: [
                $isa::attention_span::<F16Chunk>,
                $isa::attention_span::<Bf16Chunk>,
                $isa::int8_attention_span,
                $isa::attention_span::<E4m3Chunk>,
                $isa::attention_span::<E5m2Chunk>,
            ],
            attention_merge: $isa::attention_merge,
            attention_resume: $isa::attention_resume,
            attention_finish: $isa::attention_finish,
            store_kv: [
                $isa::store_f16,
                $isa::store_bf16,
                $isa::store_int8,
                $isa::store_e4m3,
                $isa::store_e5m2,
            ],
            scan_logits: $isa::scan_logits,
            sum_weights: $isa::sum_weights,
            best_score: $isa::best_score,
            probe_read: $isa::probe_read,
            probe_int8: $isa::probe_int8,
            probe_f32: $isa::probe_f32,
        }
    };
}

static SCALAR: KernelTable = table_of!(scalar);

#[cfg(target_arch = "x86_64")]
static AVX2: KernelTable = table_of!(avx2);

#[cfg(target_arch = "x86_64")]
static AVX_VNNI: KernelTable = KernelTable {
    ternary_matmul: avxvnni::ternary_matmul,
    grouped_matmul: avxvnni::grouped_matmul,
    int8_matmul: avxvnni::int8_matmul,
    four_bit_matmul: avxvnni::four_bit_matmul,
    attention_span: {
        let mut spans = AVX2.attention_span;
        spans[KvDtype::Int8 as usize] = avxvnni::int8_attention_span;
        spans
    },
    probe_int8: avxvnni::probe_int8,
    ..AVX2
};

#[cfg(target_arch = "x86_64")]
static AVX512: KernelTable = table_of!(avx512);

#[cfg(target_arch = "x86_64")]
static AVX512_VBMI: KernelTable = KernelTable {
    ternary_matmul: avx512::five_trit::ternary_matmul,
    grouped_matmul: avx512::five_trit::grouped_matmul,
    ..AVX512
};

/// Calls a function of the table.
macro_rules! call {
    ($kernels:ident.$function:ident($($argument:ident),*)) => {
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { ($kernels.table.$function)($($argument),*) }
    };
    ($kernels:ident.$function:ident[$dtype:ident]($($argument:ident),*)) => {
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { ($kernels.table.$function[$dtype as usize])($($argument),*) }
    };
}

impl Kernels {
    /// Returns the kernels of `isa`, or `None` if this CPU lacks it.
    pub fn new(isa: Isa) -> Option<Kernels> {
        let table = match isa {
            Isa::Scalar => &SCALAR,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &AVX_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => &AVX512_VBMI,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Avx512Vbmi => return None,
        };
        isa.is_available().then_some(Kernels { isa, table })
    }

    /// Returns the kernels of this CPU's best instruction set.
    pub fn best() -> Kernels {
        Kernels::new(Isa::best()).expect("the best instruction set is available")
    }

    /// Returns the instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns the packing of ternary weights that this instruction set multiplies fastest.
    pub fn packing(&self) -> Packing {
        match self.isa {
            Isa::Scalar | Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 => Packing::TwoBit,
            Isa::Avx512Vbmi => Packing::FiveTrit,
        }
    }

    /// Returns whether this instruction set can multiply weights in `packing`.
    pub fn reads(&self, packing: Packing) -> bool {
        match self.isa {
            Isa::Scalar | Isa::Avx512Vbmi => true,
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 => packing == Packing::TwoBit,
        }
    }

    /// Quantizes one token, or each of its groups if `out` has groups:
    /// `s = 127 / max(max|x|, 1e-5)`, `q = x · s`, rounded to nearest even and clamped to
    /// −128..=127. Stores `s` as the scale, and the sum of `q`. For a value that is not finite, `q`
    /// is an unspecified number in that range; other tokens are not affected. `s` ignores NaN, and
    /// is 0 if a value is infinite.
    pub fn quantize(&self, x: &[f32], out: &mut QuantizedTokenMut<'_>) {
        assert_eq!(x.len(), out.values.len(), "values of a token");
        call!(self.quantize(x, out))
    }

    /// Multiplies all tokens by the rows of `panels`, exactly, and each output by the factor of its
    /// token. `out` is panel-major, `[panel of the range][token][32]`. A kernel that is limited by
    /// multiplication prefetches memory from `prefetches` meanwhile.
    ///
    /// If the weights have groups, the sum of each group is exact, and `out` is the f32 sum over
    /// the groups, in ascending order, of `group's sum · (weights' scale · factor)`. The
    /// multiplication by the group's sum is fused with the addition.
    ///
    /// # Panics
    /// If shapes differ, the weights and the activations have different groups, or the packing is
    /// one that this instruction set does not read.
    pub fn ternary_matmul(
        &self,
        weights: &TernaryMatrix,
        panels: Range<usize>,
        x: ScaledActivations<'_>,
        out: &mut [f32],
        prefetches: &mut PrefetchQueue<'_, '_>,
    ) {
        let (tokens, packing) = (x.activations.tokens(), weights.packing());
        assert_product(&panels, weights.panels(), tokens, out);
        assert_columns(x.activations.columns(), weights.columns());
        let (groups, scales) = (x.activations.group(), x.activations.scales());
        assert_eq!(groups, weights.group(), "groups of activations and weights");
        assert_eq!(x.factors.len(), scales.len(), "factors of the tokens");
        assert!(
            self.reads(packing),
            "{} cannot multiply weights in the packing {packing:?}",
            self.isa
        );
        if out.is_empty() {
            return;
        }
        match groups {
            None => call!(self.ternary_matmul(weights, panels, x, out, prefetches)),
            Some(_) => call!(self.grouped_matmul(weights, panels, x, out, prefetches)),
        }
    }

    /// Multiplies all tokens by the rows of `panels`, exactly, without the scales of the rows.
    /// `out` is panel-major, `[panel of the range][token][32]`.
    pub fn int8_matmul(
        &self,
        weights: &Int8Matrix,
        panels: Range<usize>,
        x: &QuantizedActivations,
        out: &mut [i32],
    ) {
        assert_product(&panels, weights.panels(), x.tokens(), out);
        assert_columns(x.columns(), weights.columns());
        assert_eq!(x.group(), None, "groups of activations of 8-bit weights");
        if !out.is_empty() {
            call!(self.int8_matmul(weights, panels, x, out));
        }
    }

    /// Multiplies all tokens by the rows of `panels`, exactly, without the scales of the rows.
    /// `out` is panel-major, `[panel of the range][token][32]`. What it has for rows that only fill
    /// the last panel is unspecified.
    pub fn four_bit_matmul(
        &self,
        weights: &FourBitMatrix,
        panels: Range<usize>,
        x: &QuantizedActivations,
        out: &mut [i32],
    ) {
        assert_product(&panels, weights.panels(), x.tokens(), out);
        assert_columns(x.columns(), weights.columns());
        assert_eq!(x.group(), None, "groups of activations of 4-bit weights");
        if !out.is_empty() {
            call!(self.four_bit_matmul(weights, panels, x, out));
        }
    }

    /// Multiplies the quantized activations `q` of a token by a row of floats, exactly, after
    /// rounding the row to multiples of `step` as an [`Int8Matrix`] does: the sum that
    /// [`Kernels::int8_matmul`] computes if `step` is the scale of the row.
    ///
    /// # Panics
    /// If the lengths differ, or exceed [`Int8Matrix::MAX_COLUMNS`].
    pub fn rounded_dot(&self, weights: &[f32], step: f32, q: &[i8]) -> i32 {
        assert_columns(q.len(), weights.len());
        assert!(q.len() <= Int8Matrix::MAX_COLUMNS, "sums fit an i32");
        call!(self.rounded_dot(weights, step, q))
    }

    /// Turns the sums of one panel, `[token][32]`, into floats: `out = sum · (row scale · token
    /// factor)`. Rows without a scale become zero. `largest` receives the largest output of each
    /// token, ignoring NaN (−∞ if all are NaN).
    pub fn scale_panel(
        &self,
        sums: &[i32],
        scales: PanelScales<'_>,
        out: &mut [f32],
        largest: &mut [f32],
    ) {
        let (rows, tokens) = (scales.row_scales.len(), scales.token_factors.len());
        assert!(rows <= PANEL_ROWS, "{rows} rows in a panel");
        assert!(
            sums.len() == tokens * PANEL_ROWS && out.len() == sums.len() && largest.len() == tokens,
            "one output for each sum, one largest output for each token"
        );
        call!(self.scale_panel(sums, scales, out, largest))
    }

    /// Multiplies one token `x`, `[columns]`, by some rows in any order, in f32. The results have
    /// the same bits as the results of [`Kernels::dense_matmul`].
    pub fn dense_dots(&self, weights: &DenseMatrix, rows: &[u32], x: &[f32], out: &mut [f32]) {
        let last = rows.iter().max();
        assert!(
            last.is_none_or(|last| (*last as usize) < weights.rows()),
            "no row {last:?} in a matrix of {}",
            weights.rows()
        );
        assert_columns(x.len(), weights.columns());
        assert_eq!(out.len(), rows.len(), "outputs of the rows");
        call!(self.dense_dots(weights, rows, x, out))
    }

    /// Multiplies the tokens `x`, `[token][columns]`, by the rows of `panels`, in f32. `out` is
    /// panel-major, `[panel of the range][token][32]`.
    pub fn dense_matmul(
        &self,
        weights: &DenseMatrix,
        panels: Range<usize>,
        x: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) {
        assert_product(&panels, weights.panels(), tokens, out);
        assert_eq!(x.len(), tokens * weights.columns(), "values of the tokens");
        if !out.is_empty() {
            call!(self.dense_matmul(weights, panels, x, tokens, out));
        }
    }

    /// Copies one row as f32, for example the embedding of a token.
    pub fn dense_row(&self, weights: &DenseMatrix, row: usize, out: &mut [f32]) {
        let rows = weights.rows();
        assert!(row < rows, "no row {row} in a matrix of {rows}");
        assert_columns(out.len(), weights.columns());
        call!(self.dense_row(weights, row, out))
    }

    /// Computes `out = weight · (x / sqrt(mean(x²) + eps))`. If a value of x or the sum of the
    /// squares is not finite, every output is infinite, and [`quantize`](Self::quantize) then
    /// stores a scale of 0.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), weight.len(), "weights of the values");
        assert_eq!(x.len(), out.len(), "outputs of the values");
        call!(self.rms_norm(x, weight, eps, out))
    }

    /// Rotates the heads of one token, `[head][head_dim]`. Value i of a head pairs with value
    /// i + head_dim / 2 (half-split). `cos` and `sin`, `[head_dim / 2]`, belong to the token's
    /// position.
    pub fn rope(&self, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "a head of {head_dim} values"
        );
        let values = x.len();
        assert!(
            values.is_multiple_of(head_dim),
            "{values} values are not whole heads of {head_dim}"
        );
        assert!(
            cos.len() == head_dim / 2 && sin.len() == head_dim / 2,
            "one cosine and one sine for each pair"
        );
        call!(self.rope(x, head_dim, cos, sin))
    }

    /// Multiplies each block of `block` values by the normalized Walsh–Hadamard matrix in
    /// Sylvester's order, `H[i][j] = (−1)^popcount(i & j) / sqrt(block)`.
    ///
    /// # Panics
    /// If the block is not a power of two, or does not divide the values.
    pub fn hadamard(&self, x: &mut [f32], block: usize) {
        assert!(block.is_power_of_two(), "a block of {block} values");
        let values = x.len();
        assert!(
            values.is_multiple_of(block),
            "{values} values are not whole blocks of {block}"
        );
        call!(self.hadamard(x, block))
    }

    /// Computes `out = max(gate, 0)² · up`.
    pub fn relu2_gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_gates(gate, up, out);
        call!(self.relu2_gate(gate, up, out))
    }

    /// Computes `out = gate · sigmoid(gate) · up`.
    pub fn silu_gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_gates(gate, up, out);
        call!(self.silu_gate(gate, up, out))
    }

    /// Computes `out = x · sigmoid(gate)`.
    pub fn sigmoid_gate(&self, gate: &[f32], x: &[f32], out: &mut [f32]) {
        assert_gates(gate, x, out);
        call!(self.sigmoid_gate(gate, x, out))
    }

    /// Applies the update of the token before to the state of a recurrent head, and takes the sums
    /// of the next token, whose key and query are `inputs`: Sᵀ·key and Sᵀ·query. The state is
    /// `[block of DELTA_COLUMNS columns][row][DELTA_COLUMNS]`, with a row for each value of the key
    /// and a column for each value of a sum.
    ///
    /// Source: Gated DeltaNet, arXiv:2412.06464.
    ///
    /// # Panics
    /// If the sizes disagree, or the columns are not whole blocks.
    pub fn delta_step(
        &self,
        state: &mut [f32],
        update: DeltaUpdate<'_>,
        inputs: [&[f32]; 2],
        sums: [&mut [f32]; 2],
    ) {
        let (rows, columns) = (inputs[0].len(), sums[0].len());
        assert!(
            columns.is_multiple_of(DELTA_COLUMNS),
            "{columns} columns are not whole blocks"
        );
        assert_eq!(state.len(), rows * columns, "values of the state");
        assert_eq!([update.key.len(), inputs[1].len()], [rows; 2], "rows");
        let of_columns = [update.delta.len(), sums[1].len()];
        assert_eq!(of_columns, [columns; 2], "columns");
        call!(self.delta_step(state, update, inputs, sums))
    }

    /// Completes a token after [`delta_step`](Self::delta_step), from its sums by key and by query,
    /// and from the decay, the strength, and the product of key and query. Sets `delta` to what the
    /// token leaves, and `out` to its output.
    ///
    /// # Panics
    /// If the sizes disagree.
    pub fn delta_finish(
        &self,
        sums: [&[f32]; 2],
        value: &[f32],
        factors: [f32; 3],
        delta: &mut [f32],
        out: &mut [f32],
    ) {
        let columns = value.len();
        assert_eq!(sums.map(<[f32]>::len), [columns; 2], "sums");
        assert_eq!([delta.len(), out.len()], [columns; 2], "outputs");
        call!(self.delta_finish(sums, value, factors, delta, out))
    }

    /// Computes the causal convolution of one token and its activation, channel by channel:
    /// `out = silu(Σ weights[i] · inputs[i])`. The last input is the token's own. The weights are
    /// `[input][channel]`.
    ///
    /// # Panics
    /// If the sizes disagree.
    pub fn convolve(&self, inputs: &[&[f32]], weights: &[f32], out: &mut [f32]) {
        let channels = out.len();
        assert_eq!(weights.len(), inputs.len() * channels, "weights");
        assert!(inputs.iter().all(|input| input.len() == channels), "inputs");
        call!(self.convolve(inputs, weights, out))
    }

    /// Adds one span of keys and values to the attention of the state's queries. Scores are scaled
    /// by 1 / sqrt(head_dim). Spans must come in ascending order and have one format.
    pub fn attention_span(&self, dtype: KvDtype, span: Span<'_>, state: &mut AttentionState) {
        self.reduce_span(dtype, span, state);
        call!(self.attention_merge(state))
    }

    /// Computes one span of keys and values for the state's queries, but appends the result to
    /// `saved`, for [`Kernels::attention_resume`].
    ///
    /// # Panics
    /// If `saved` has no room, or spans of another shape.
    pub fn attention_span_apart(
        &self,
        dtype: KvDtype,
        span: Span<'_>,
        state: &mut AttentionState,
        saved: &mut SavedSpans,
    ) {
        self.reduce_span(dtype, span, state);
        state.save_span(saved);
    }

    /// Adds saved spans to the attention of the state's queries. The state has all the spans before
    /// them, at least one, and computed the same queries.
    ///
    /// # Panics
    /// If the state and the spans have different shapes.
    pub fn attention_resume(&self, state: &mut AttentionState, saved: &SavedSpans) {
        saved.assert_continues(state);
        call!(self.attention_resume(state, saved))
    }

    fn reduce_span(&self, dtype: KvDtype, span: Span<'_>, state: &mut AttentionState) {
        let (head_dim, visible) = (state.head_dim(), span.visible);
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(16),
            "a head of {head_dim} values"
        );
        assert!(state.rows() > 0, "attention without a query");
        assert!(
            (1..=SPAN_TOKENS).contains(&visible),
            "{visible} visible keys of a span"
        );
        let seen = state.seen(state.rows() - 1, visible);
        for row in [0, state.rows() - 1] {
            let (hidden, seen) = (state.hidden(row, span.hidden), state.seen(row, visible));
            assert!(hidden < seen, "{hidden} of {seen} keys are too far away");
        }
        assert_eq!(
            span.pages.len(),
            seen.div_ceil(PAGE_TOKENS),
            "pages of {seen} keys"
        );
        let page_bytes = dtype.page_bytes(head_dim);
        for page in span.pages.iter().chain(span.next) {
            assert_eq!(page.len(), page_bytes, "bytes of a page");
        }
        call!(self.attention_span[dtype](span, state))
    }

    /// Writes the attention output of all queries after their last span,
    /// `[position][head][head_dim]`.
    pub fn attention_finish(&self, state: &AttentionState, out: &mut [f32]) {
        let values = state.rows() * state.head_dim();
        assert_eq!(out.len(), values, "outputs of the queries");
        call!(self.attention_finish(state, out))
    }

    /// Stores the key and the value of one token in slot `slot` of a page of a KV head.
    pub fn store_kv(
        &self,
        dtype: KvDtype,
        key: &[f32],
        value: &[f32],
        slot: usize,
        page: &mut [u8],
    ) {
        let head_dim = key.len();
        assert!(slot < PAGE_TOKENS, "no slot {slot} in a page");
        assert_eq!(head_dim, value.len(), "key and value of a head");
        assert!(
            head_dim.is_multiple_of(16) && head_dim <= MAX_HEAD_DIM,
            "a head of {head_dim} values"
        );
        assert_eq!(page.len(), dtype.page_bytes(head_dim), "bytes of a page");
        call!(self.store_kv[dtype](key, value, slot, page))
    }

    /// Writes the largest logit of each block of [`LOGITS_BLOCK`] to `peaks`, ignoring NaN (−∞ if
    /// all are NaN). Returns whether all logits are finite.
    #[must_use]
    pub fn scan_logits(&self, logits: &[f32], peaks: &mut [f32]) -> bool {
        assert_blocks(logits.len(), peaks.len());
        call!(self.scan_logits(logits, peaks))
    }

    /// Writes the sum of the weights of each block of [`LOGITS_BLOCK`] logits to `masses`, of the
    /// tokens before `end`. No logit may be greater than `scale.largest`. `peaks` are the largest
    /// logits of the blocks.
    pub fn sum_weights(
        &self,
        logits: &[f32],
        scale: LogitScale,
        end: Rank,
        peaks: &[f32],
        masses: &mut [f32],
    ) {
        assert_blocks(logits.len(), peaks.len());
        assert_blocks(logits.len(), masses.len());
        call!(self.sum_weights(logits, scale, end, peaks, masses))
    }

    /// Returns the largest score above `floor` and its token, of the tokens before `end`; the first
    /// of equal ones. Returns `floor` and `u32::MAX` if there is none. `peaks` are the largest
    /// logits of the blocks of [`LOGITS_BLOCK`].
    #[must_use]
    pub fn best_score(
        &self,
        logits: &[f32],
        scores: DrawScores,
        end: Rank,
        peaks: &[f32],
        floor: f32,
    ) -> (f32, u32) {
        assert_blocks(logits.len(), peaks.len());
        call!(self.best_score(logits, scores, end, peaks, floor))
    }

    /// Reads `bytes` as fast as this instruction set can, with or without prefetches: the limit of
    /// a product of few tokens.
    pub fn probe_read(&self, bytes: &[u8], prefetches: bool) {
        call!(self.probe_read(bytes, prefetches))
    }

    /// Multiplies and adds small integers in registers as fast as this instruction set can: the
    /// limit of a product of many tokens. Returns the number of multiplications and additions.
    pub fn probe_int8(&self, rounds: u64) -> u64 {
        call!(self.probe_int8(rounds))
    }

    /// Multiplies and adds floats in registers as fast as this instruction set can: the limit of
    /// attention of many queries. Returns the number of multiplications and additions.
    pub fn probe_f32(&self, rounds: u64) -> u64 {
        call!(self.probe_f32(rounds))
    }
}

#[track_caller]
fn assert_product<T>(panels: &Range<usize>, matrix_panels: usize, tokens: usize, out: &[T]) {
    assert!(
        panels.start <= panels.end && panels.end <= matrix_panels,
        "no panels {panels:?} in a matrix of {matrix_panels}"
    );
    let values = panels.len() * tokens * PANEL_ROWS;
    assert_eq!(out.len(), values, "outputs of the product");
}

#[track_caller]
fn assert_gates(gate: &[f32], up: &[f32], out: &[f32]) {
    let is_each = gate.len() == up.len() && gate.len() == out.len();
    assert!(is_each, "one gate for each output");
}

#[track_caller]
fn assert_columns(values: usize, columns: usize) {
    assert_eq!(values, columns, "values of a token or row, and columns");
}

#[track_caller]
fn assert_blocks(logits: usize, blocks: usize) {
    assert_eq!(blocks, logits.div_ceil(LOGITS_BLOCK), "values of blocks");
}
