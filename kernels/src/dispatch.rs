//! Which instruction set runs: detected once, then one table of functions.
//!
//! Invariant: a [`Kernels`] exists only for an instruction set that this CPU has, so holding one is the proof that its functions may run.
//! Shapes are asserted here, once for all instruction sets.
#![expect(
    unsafe_code,
    reason = "calls functions compiled for a detected instruction set"
)]

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::activation::{QuantizedActivations, QuantizedTokenMut, ScaledActivations};
use crate::attention::{AttentionState, PAGE_TOKENS, SPAN_TOKENS, Span};
use crate::dense::DenseMatrix;
use crate::elementwise::PanelScales;
use crate::int8::Int8Matrix;
use crate::prefetch::PrefetchQueue;
use crate::softmax::{LOGITS_BLOCK, LogitScale};
use crate::ternary::{Packing, TernaryMatrix};
#[cfg(target_arch = "x86_64")]
use crate::x86_64::{avx2, avx512, avx512vbmi};
use crate::{PANEL_ROWS, scalar};

/// An instruction set, the better the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the definition of every kernel, on any machine.
    Scalar,
    /// AVX2, FMA and F16C: x86-64 since about 2013.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI: servers since 2019.
    Avx512,
    /// That and AVX-512 VBMI, which looks bytes up in registers: servers since 2021, Zen 4.
    Avx512Vbmi,
}

impl Isa {
    /// The best one that this CPU has.
    #[must_use]
    pub fn best() -> Isa {
        Isa::available().max().unwrap_or(Isa::Scalar)
    }

    /// All that this CPU has, in ascending order.
    pub fn available() -> impl Iterator<Item = Isa> {
        [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Vbmi]
            .into_iter()
            .filter(|isa| isa.is_available())
    }

    /// Does this CPU (and its operating system) have it?
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vbmi"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vbmi => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vbmi => "avx512vbmi",
        })
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Isa, UnknownIsa> {
        match name {
            "scalar" => Ok(Isa::Scalar),
            "avx2" => Ok(Isa::Avx2),
            "avx512" => Ok(Isa::Avx512),
            "avx512vbmi" => Ok(Isa::Avx512Vbmi),
            _ => Err(UnknownIsa(name.to_owned())),
        }
    }
}

/// A name that is no instruction set's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownIsa(String);

impl fmt::Display for UnknownIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown instruction set {:?}: expected scalar, avx2, avx512 or avx512vbmi",
            self.0
        )
    }
}

impl Error for UnknownIsa {}

/// The kernels of one instruction set. Having one proves that this CPU runs it.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
}

type TernaryMatmul = unsafe fn(
    &TernaryMatrix,
    Range<usize>,
    ScaledActivations<'_>,
    &mut [f32],
    &mut PrefetchQueue<'_, '_>,
);
type ScalePanel = unsafe fn(&[i32], PanelScales<'_>, &mut [f32], &mut [f32]);
type WeighLogits = unsafe fn(&[f32], LogitScale, &mut [f32], &mut [f32], &mut [f32]);
type WeightsFrom = unsafe fn(f32, &[f32], &[f32]) -> (f64, usize);
type StoreKv = unsafe fn(&[f32], &[f32], usize, &mut [u16], &mut [u16]);

/// The functions of an instruction set, by name. Unsafe to call where the CPU lacks it.
struct Table {
    quantize: unsafe fn(&[f32], &mut QuantizedTokenMut<'_>),
    ternary_matmul: TernaryMatmul,
    int8_matmul: unsafe fn(&Int8Matrix, Range<usize>, &QuantizedActivations, &mut [i32]),
    scale_panel: ScalePanel,
    dense_dots: unsafe fn(&DenseMatrix, &[u32], &[f32], &mut [f32]),
    dense_matmul: unsafe fn(&DenseMatrix, Range<usize>, &[f32], usize, &mut [f32]),
    dense_row: unsafe fn(&DenseMatrix, usize, &mut [f32]),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    rope: unsafe fn(&mut [f32], usize, &[f32], &[f32]),
    relu2_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    silu_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    attention_span: unsafe fn(Span<'_>, &mut AttentionState),
    attention_finish: unsafe fn(&AttentionState, &mut [f32]),
    store_kv: StoreKv,
    scan_logits: unsafe fn(&[f32], &mut [f32]) -> bool,
    weigh_logits: WeighLogits,
    sum_weights: unsafe fn(&[f32], LogitScale, &mut [f32]),
    weights_from: WeightsFrom,
    drop_weights: unsafe fn(f32, &mut [f32], &[f32], &mut [f32]),
    probe_read: unsafe fn(&[u8], bool),
    probe_int8: unsafe fn(u64) -> u64,
    probe_f32: unsafe fn(u64) -> u64,
}

static SCALAR: Table = Table {
    quantize: scalar::quantize,
    ternary_matmul: scalar::ternary_matmul,
    int8_matmul: scalar::int8_matmul,
    scale_panel: scalar::scale_panel,
    dense_dots: scalar::dense_dots,
    dense_matmul: scalar::dense_matmul,
    dense_row: scalar::dense_row,
    rms_norm: scalar::rms_norm,
    rope: scalar::rope,
    relu2_gate: scalar::relu2_gate,
    silu_gate: scalar::silu_gate,
    attention_span: scalar::attention_span,
    attention_finish: scalar::attention_finish,
    store_kv: scalar::store_kv,
    scan_logits: scalar::scan_logits,
    weigh_logits: scalar::weigh_logits,
    sum_weights: scalar::sum_weights,
    weights_from: scalar::weights_from,
    drop_weights: scalar::drop_weights,
    probe_read: scalar::probe_read,
    probe_int8: scalar::probe_int8,
    probe_f32: scalar::probe_f32,
};

#[cfg(target_arch = "x86_64")]
static AVX2: Table = Table {
    quantize: avx2::quantize,
    ternary_matmul: avx2::ternary_matmul,
    int8_matmul: avx2::int8_matmul,
    scale_panel: avx2::scale_panel,
    dense_dots: avx2::dense_dots,
    dense_matmul: avx2::dense_matmul,
    dense_row: avx2::dense_row,
    rms_norm: avx2::rms_norm,
    rope: avx2::rope,
    relu2_gate: avx2::relu2_gate,
    silu_gate: avx2::silu_gate,
    attention_span: avx2::attention::attention_span,
    attention_finish: avx2::attention::attention_finish,
    store_kv: avx2::attention::store_kv,
    scan_logits: avx2::scan_logits,
    weigh_logits: avx2::weigh_logits,
    sum_weights: avx2::sum_weights,
    weights_from: avx2::weights_from,
    drop_weights: avx2::drop_weights,
    probe_read: avx2::probe_read,
    probe_int8: avx2::probe_int8,
    probe_f32: avx2::attention::probe_f32,
};

#[cfg(target_arch = "x86_64")]
static AVX512: Table = Table {
    quantize: avx512::quantize,
    ternary_matmul: avx512::ternary_matmul,
    int8_matmul: avx512::int8_matmul,
    scale_panel: avx512::scale_panel,
    dense_dots: avx512::dense_dots,
    dense_matmul: avx512::dense_matmul,
    dense_row: avx512::dense_row,
    rms_norm: avx512::rms_norm,
    rope: avx512::rope,
    relu2_gate: avx512::relu2_gate,
    silu_gate: avx512::silu_gate,
    attention_span: avx512::attention::attention_span,
    attention_finish: avx512::attention::attention_finish,
    store_kv: avx512::attention::store_kv,
    scan_logits: avx512::scan_logits,
    weigh_logits: avx512::weigh_logits,
    sum_weights: avx512::sum_weights,
    weights_from: avx512::weights_from,
    drop_weights: avx512::drop_weights,
    probe_read: avx512::probe_read,
    probe_int8: avx512::probe_int8,
    probe_f32: avx512::attention::probe_f32,
};

#[cfg(target_arch = "x86_64")]
static AVX512_VBMI: Table = Table {
    ternary_matmul: avx512vbmi::ternary_matmul,
    ..AVX512
};

impl Kernels {
    /// The kernels of `isa`, or `None` if this CPU lacks it.
    #[must_use]
    pub fn new(isa: Isa) -> Option<Kernels> {
        let table = match isa {
            Isa::Scalar => &SCALAR,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => &AVX512_VBMI,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vbmi => return None,
        };
        isa.is_available().then_some(Kernels { isa, table })
    }

    /// Those of the best instruction set that this CPU has.
    #[must_use]
    pub fn best() -> Kernels {
        Kernels::new(Isa::best()).expect("it is available")
    }

    /// The instruction set.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The packing of ternary weights that this instruction set multiplies fastest.
    #[must_use]
    pub fn packing(&self) -> Packing {
        match self.isa {
            Isa::Scalar | Isa::Avx2 | Isa::Avx512 => Packing::TwoBit,
            Isa::Avx512Vbmi => Packing::FiveTrit,
        }
    }

    /// Can this instruction set multiply weights that are packed so?
    #[must_use]
    pub fn reads(&self, packing: Packing) -> bool {
        match self.isa {
            Isa::Scalar | Isa::Avx512Vbmi => true,
            Isa::Avx2 | Isa::Avx512 => packing == Packing::TwoBit,
        }
    }

    /// Quantizes one token: `s = 127 / max(max|x|, 1e-5)`, `q = x · s`, rounded to nearest even and clamped to −128..=127. Keeps `s` as
    /// the token's scale, and the sum of `q`. A value that is not finite makes some `q` of that range, and harms no other token.
    pub fn quantize(&self, x: &[f32], out: &mut QuantizedTokenMut<'_>) {
        assert_eq!(x.len(), out.values.len(), "the values of a token");
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.quantize)(x, out) }
    }

    /// Multiplies all m tokens by the rows of `panels`, exactly, and what comes out by each token's factor (the weights' scale over the
    /// activations'). `out` is panel-major: `[panel of the range][m][32]`. A kernel that waits for its multipliers may ask for what is
    /// `ahead` meanwhile.
    pub fn ternary_matmul(
        &self,
        weights: &TernaryMatrix,
        panels: Range<usize>,
        x: ScaledActivations<'_>,
        out: &mut [f32],
        prefetches: &mut PrefetchQueue<'_, '_>,
    ) {
        let tokens = x.activations.tokens();
        assert!(
            panels.start <= panels.end && panels.end <= weights.panels(),
            "no panels {panels:?}"
        );
        assert_eq!(
            x.activations.columns(),
            weights.columns(),
            "columns of activations and weights"
        );
        assert_eq!(
            out.len(),
            panels.len() * tokens * PANEL_ROWS,
            "the values of a product"
        );
        assert_eq!(x.factors.len(), tokens, "one factor a token");
        assert!(
            self.reads(weights.packing()),
            "{} does not read {:?}",
            self.isa,
            weights.packing()
        );
        if out.is_empty() {
            return;
        }
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.ternary_matmul)(weights, panels, x, out, prefetches) }
    }

    /// Multiplies all m tokens by the rows of `panels`, exactly, in whole numbers: without the rows' scales. `out` is panel-major:
    /// `[panel of the range][m][32]`.
    pub fn int8_matmul(
        &self,
        weights: &Int8Matrix,
        panels: Range<usize>,
        x: &QuantizedActivations,
        out: &mut [i32],
    ) {
        assert!(
            panels.start <= panels.end && panels.end <= weights.panels(),
            "no panels {panels:?}"
        );
        assert_eq!(
            x.columns(),
            weights.columns(),
            "columns of activations and weights"
        );
        assert_eq!(
            out.len(),
            panels.len() * x.tokens() * PANEL_ROWS,
            "the values of a product"
        );
        if out.is_empty() {
            return;
        }
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.int8_matmul)(weights, panels, x, out) }
    }

    /// `out = acc · (scale · factor)`: the rows of one panel, `[m][32]`, each row with its own scale, each of the m tokens with its own
    /// factor; and the largest output of each token, those that are no numbers passed over (−∞ if all are). Rows without a scale come out
    /// as zero.
    pub fn scale_panel(
        &self,
        acc: &[i32],
        scales: PanelScales<'_>,
        out: &mut [f32],
        largest: &mut [f32],
    ) {
        let (rows, tokens) = (scales.row_scales.len(), scales.token_factors.len());
        assert!(rows <= PANEL_ROWS, "{rows} rows");
        assert!(
            acc.len() == tokens * PANEL_ROWS && out.len() == acc.len() && largest.len() == tokens,
            "one output a sum, one largest a token"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.scale_panel)(acc, scales, out, largest) }
    }

    /// Some rows, in any order, by one token `x`, `[k]`, in f32: the values, to the bit, that [`Kernels::dense_matmul`] has for each of
    /// them and the token.
    pub fn dense_dots(&self, weights: &DenseMatrix, rows: &[u32], x: &[f32], out: &mut [f32]) {
        let last = rows.iter().max();
        assert!(
            last.is_none_or(|last| (*last as usize) < weights.rows()),
            "no row {last:?} of {}",
            weights.rows()
        );
        assert_eq!(x.len(), weights.columns(), "the values of a token");
        assert_eq!(out.len(), rows.len(), "one value a row");
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.dense_dots)(weights, rows, x, out) }
    }

    /// Multiplies the m tokens `x`, `[m][k]`, by the rows of `panels`, in f32. `out` is panel-major: `[panel of the range][m][32]`.
    pub fn dense_matmul(
        &self,
        weights: &DenseMatrix,
        panels: Range<usize>,
        x: &[f32],
        m: usize,
        out: &mut [f32],
    ) {
        assert!(
            panels.start <= panels.end && panels.end <= weights.panels(),
            "no panels {panels:?}"
        );
        assert_eq!(x.len(), m * weights.columns(), "the values of {m} tokens");
        assert_eq!(
            out.len(),
            panels.len() * m * PANEL_ROWS,
            "the values of a product"
        );
        if out.is_empty() {
            return;
        }
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.dense_matmul)(weights, panels, x, m, out) }
    }

    /// One row as f32: an embedding's vector.
    pub fn dense_row(&self, weights: &DenseMatrix, row: usize, out: &mut [f32]) {
        assert!(row < weights.rows(), "no row {row} of {}", weights.rows());
        assert_eq!(out.len(), weights.columns(), "the values of a row");
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.dense_row)(weights, row, out) }
    }

    /// `out = weight · (x / sqrt(mean(x²) + eps))`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), weight.len(), "one weight a value");
        assert_eq!(x.len(), out.len(), "one output a value");
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.rms_norm)(x, weight, eps, out) }
    }

    /// Rotates the heads of one token, `[heads][d]`: value i of a head pairs with value i + d/2 (half-split). `cos` and `sin` are those of
    /// the token's position, d/2 each.
    pub fn rope(&self, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "heads of {head_dim}"
        );
        assert!(
            x.len().is_multiple_of(head_dim),
            "{} values are no heads of {head_dim}",
            x.len()
        );
        assert!(
            cos.len() == head_dim / 2 && sin.len() == head_dim / 2,
            "one angle a pair"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.rope)(x, head_dim, cos, sin) }
    }

    /// `out = max(gate, 0)² · up`.
    pub fn relu2_gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(
            gate.len() == up.len() && gate.len() == out.len(),
            "one gate an output"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.relu2_gate)(gate, up, out) }
    }

    /// `out = gate · sigmoid(gate) · up`.
    pub fn silu_gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(
            gate.len() == up.len() && gate.len() == out.len(),
            "one gate an output"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.silu_gate)(gate, up, out) }
    }

    /// Attention of the queries of `state` over one span of keys, merged into the state. Scores are scaled by 1/sqrt(d).
    /// Spans must come in ascending order.
    pub fn attention_span(&self, span: Span<'_>, state: &mut AttentionState) {
        let head_dim = state.head_dim();
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(16),
            "heads of {head_dim}"
        );
        assert!(state.rows() > 0, "attention of a query");
        assert!(
            (1..=SPAN_TOKENS).contains(&span.visible),
            "{} keys of a span",
            span.visible
        );
        let seen = state.seen(state.rows() - 1, span.visible);
        assert_eq!(
            span.pages.len(),
            seen.div_ceil(PAGE_TOKENS),
            "the pages of {seen} keys"
        );
        for page in span.pages {
            assert_eq!(
                page.keys.len(),
                PAGE_TOKENS * head_dim,
                "the keys of a page"
            );
            assert_eq!(
                page.values.len(),
                PAGE_TOKENS * head_dim,
                "the values of a page"
            );
        }
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.attention_span)(span, state) }
    }

    /// What the queries receive after their last span, `[position][g][d]`.
    pub fn attention_finish(&self, state: &AttentionState, out: &mut [f32]) {
        assert_eq!(
            out.len(),
            state.rows() * state.head_dim(),
            "the values of the state's queries"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.attention_finish)(state, out) }
    }

    /// Stores one token of a KV head, rounded to half precision: its key (d values) in lane `slot` of a page's keys `[d][16]`, its value in
    /// row `slot` of the page's values `[16][d]`.
    pub fn store_kv(
        &self,
        key: &[f32],
        value: &[f32],
        slot: usize,
        k_page: &mut [u16],
        v_page: &mut [u16],
    ) {
        assert!(slot < PAGE_TOKENS, "no slot {slot}");
        assert_eq!(key.len(), value.len(), "key and value of a head");
        assert_eq!(k_page.len(), PAGE_TOKENS * key.len(), "the keys of a page");
        assert_eq!(
            v_page.len(),
            PAGE_TOKENS * value.len(),
            "the values of a page"
        );
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.store_kv)(key, value, slot, k_page, v_page) }
    }

    /// The largest of each block of [`LOGITS_BLOCK`] logits, what is no number passed over (−∞ if nothing is one); and whether all logits
    /// are finite.
    #[must_use]
    pub fn scan_logits(&self, logits: &[f32], peaks: &mut [f32]) -> bool {
        assert_blocks(logits.len(), peaks.len());
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.scan_logits)(logits, peaks) }
    }

    /// The weight of each logit, none of which is above the largest; and of each block of [`LOGITS_BLOCK`] the sum of the weights and the
    /// heaviest.
    pub fn weigh_logits(
        &self,
        logits: &[f32],
        scale: LogitScale,
        weights: &mut [f32],
        masses: &mut [f32],
        heaviest: &mut [f32],
    ) {
        assert_eq!(logits.len(), weights.len(), "one weight a logit");
        assert_blocks(logits.len(), masses.len());
        assert_blocks(logits.len(), heaviest.len());
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.weigh_logits)(logits, scale, weights, masses, heaviest) }
    }

    /// The sums of [`Kernels::weigh_logits`], to the bit, without the weights.
    pub fn sum_weights(&self, logits: &[f32], scale: LogitScale, masses: &mut [f32]) {
        assert_blocks(logits.len(), masses.len());
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.sum_weights)(logits, scale, masses) }
    }

    /// The sum of the weights from `bar` up, and how many there are; `heaviest` as [`Kernels::weigh_logits`] gave it.
    #[must_use]
    pub fn weights_from(&self, bar: f32, weights: &[f32], heaviest: &[f32]) -> (f64, usize) {
        assert_blocks(weights.len(), heaviest.len());
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.weights_from)(bar, weights, heaviest) }
    }

    /// Sets to zero what weighs less than `bar`, and sums up what is left of each block. What was heaviest in a block says which are left as
    /// they are, because nothing of them counts: their sum becomes zero.
    pub fn drop_weights(
        &self,
        bar: f32,
        weights: &mut [f32],
        heaviest: &[f32],
        masses: &mut [f32],
    ) {
        assert_blocks(weights.len(), heaviest.len());
        assert_blocks(weights.len(), masses.len());
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.drop_weights)(bar, weights, heaviest, masses) }
    }

    /// Reads `bytes` as fast as this instruction set can, prefetching `ahead` or not: the limit that a product of few tokens runs into.
    pub fn probe_read(&self, bytes: &[u8], ahead: bool) {
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.probe_read)(bytes, ahead) }
    }

    /// Multiplies and adds small integers in registers as fast as this instruction set can: the limit that a product of many tokens runs
    /// into. Returns the operations done, multiplications and additions.
    pub fn probe_int8(&self, rounds: u64) -> u64 {
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.probe_int8)(rounds) }
    }

    /// Multiplies and adds floats in registers as fast as this instruction set can: the limit that attention of many queries runs into.
    /// Returns the operations done, multiplications and additions.
    pub fn probe_f32(&self, rounds: u64) -> u64 {
        // SAFETY: `Kernels::new` found the table's instruction set on this CPU.
        unsafe { (self.table.probe_f32)(rounds) }
    }
}

fn assert_blocks(logits: usize, blocks: usize) {
    assert_eq!(blocks, logits.div_ceil(LOGITS_BLOCK), "one value a block");
}
