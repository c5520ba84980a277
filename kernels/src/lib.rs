//! The arithmetic of a ternary language model: slices in, slices out, on the caller's thread.
//!
//! A [`Kernels`] value stands for one instruction set. It has a method for each kernel:
//!
//! | Kernels | Arithmetic | Used for |
//! |---|---|---|
//! | `quantize`, `ternary_matmul` | int8 activations × ternary weights, exact | linear layers |
//! | the same, with groups | exact in a group, f32 over the groups | the same, ternary `lm_head` |
//! | `int8_matmul`, `scale_panel` | int8 activations × int8 weights, exact | screening `lm_head` |
//! | `four_bit_matmul`, `rounded_dot` | int8 × 4-bit or rounded weights, exact | the same |
//! | `dense_matmul`, `dense_dots`, `dense_row` | f32 × f16 or f32 | `lm_head`, embeddings |
//! | `rms_norm`, `rope`, `relu2_gate`, `silu_gate` | f32 | single rows of a layer |
//! | `store_kv`, `attention_span`, …, `attention_finish` | f32 × f16, bf16 or FP8 | attention |
//! | the same, with 8-bit integers | exact in a span, f32 over the spans | attention |
//! | `scan_logits`, `best_score`, … | f32 | sampling |
//! | `probe_…` | | measuring what the machine can do |
//!
//! # Scales
//!
//! The weights of a [`TernaryMatrix`] have one scale, which the caller puts into the factors of the
//! tokens, or a scale for each row and group of columns ([`GroupSize`]), which the matrix stores.
//! Activations are quantized in the same groups ([`QuantizedActivations::reset_groups`]); the
//! factor of a token and group is 1 / s. One method multiplies both kinds, so a linear layer can
//! hold either. [`TernaryMatrix::copy_row`] looks up an embedding in either.
//!
//! # Shapes
//!
//! Doc comments write a shape as `[outer][inner]`. A weight matrix is `[rows][columns]`: a row is
//! an output of the product, a column an input.
//!
//! Rows are handled in panels of [`PANEL_ROWS`] (32). Every matrix product is written
//! *panel-major*, `[panel][token][32]`: the value of row `r` and token `t` of a product with
//! `tokens` tokens is at `(r / 32) * tokens * 32 + t * 32 + r % 32`. So a range of panels is one
//! contiguous slice of the output, and threads that share a product share no cache line. If the
//! rows do not fill the last panel, its surplus rows are written as zeros. Only `four_bit_matmul`
//! leaves them unspecified: its weights are odd, so none is zero.
//!
//! # Invariants
//!
//! Invariant: every instruction set gives the integers and the float bits of [`Isa::Scalar`]. Each
//! float sum runs over sixteen fixed lanes (index mod 16) that one fixed tree adds up. A
//! multiplication is fused with an addition on every instruction set, or on none. The sum over the
//! groups of a row adds them in ascending order.
//!
//! Invariant: a result depends on its own row and token only. The other tokens of the call, and how
//! panels are shared among threads, do not change it.
//!
//! Invariant: only constructors allocate.

mod activation;
mod attention;
mod block;
mod delta;
mod dense;
mod dispatch;
mod draw;
mod elementwise;
mod four_bit;
mod groups;
mod hadamard;
mod huge;
mod int8;
mod int8_rows;
mod isa;
mod kv_dtype;
mod kv_geometry;
mod kv_page;
mod kv_store;
mod packing;
mod prefetch;
mod row_kernels;
mod scalar;
mod small_floats;
mod softmax;
mod ternary;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use activation::{
    QuantizedActivations, QuantizedTokenMut, QuantizedTokensMut, ScaledActivations,
};
pub use attention::{AttentionState, SavedSpans, Span};
pub use block::PANEL_ROWS;
pub use delta::{DELTA_COLUMNS, DeltaUpdate};
pub use dense::{DenseMatrix, f16_from_f32, f32_from_f16};
pub use dispatch::Kernels;
pub use draw::{DrawNoise, DrawScores};
pub use elementwise::PanelScales;
pub use four_bit::{FourBitMatrix, FourBitPanelMut};
pub use groups::{GroupSize, PartialGroup};
pub use huge::HugeSlice;
pub use int8::{Int8Matrix, Int8PanelMut};
pub use isa::Isa;
pub use kv_dtype::KvDtype;
pub use kv_geometry::{MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS};
pub use packing::Packing;
pub use prefetch::{PrefetchQueue, prefetch};
pub use small_floats::{bf16_from_f32, e4m3_from_f32, e5m2_from_f32, f32_from_bf16};
pub use softmax::{LOGITS_BLOCK, LogitScale, Rank};
pub use ternary::{MAX_COLUMNS, PanelMut, TernaryMatrix};
