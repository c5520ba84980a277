//! The arithmetic of a ternary language model: slices in, slices out, on the caller's thread.
//!
//! Letters, everywhere in this crate: **m** tokens, **n** rows (outputs), **k** columns (inputs), **g** query heads that share one key
//! and value head, **d** values a head.
//!
//! # Panels
//!
//! Rows are handled in panels of [`PANEL_ROWS`]. Every matrix product is written *panel-major*, `[panel][token][32]`: the value of row `r`
//! and token `t` of a whole product stands at `(r / 32) * m * 32 + t * 32 + r % 32`. So a range of panels is one contiguous slice of the
//! output, and threads that share a product share no cache line. A last panel that `n` does not fill is written whole; its surplus rows
//! are zero.
//!
//! # What always holds
//!
//! - Every instruction set computes exactly the integers of [`Isa::Scalar`], and the same float bits too: each float sum runs over
//!   sixteen fixed lanes (index mod 16) that one fixed tree adds up, and a multiplication is fused with an addition everywhere or nowhere.
//! - A result depends on its own row only: not on the other tokens of the call, nor on how panels are shared among threads.
//! - Nothing allocates, except the constructors.

mod activation;
mod attention;
mod dense;
mod dispatch;
mod elementwise;
mod huge;
mod int8;
mod prefetch;
mod scalar;
mod softmax;
mod ternary;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use activation::{
    QuantizedActivations, QuantizedTokenMut, QuantizedTokensMut, ScaledActivations,
};
pub use attention::{AttentionState, KvPage, MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS, Span};
pub use dense::{DenseMatrix, f16_from_f32, f32_from_f16};
pub use dispatch::{Isa, Kernels, UnknownIsa};
pub use elementwise::PanelScales;
pub use huge::HugeSlice;
pub use int8::{Int8Matrix, Int8PanelMut};
pub use prefetch::{PrefetchQueue, prefetch};
pub use softmax::{LOGITS_BLOCK, LogitScale};
pub use ternary::{MAX_COLUMNS, Packing, PanelMut, TernaryMatrix};

/// Rows of a panel: the unit in which matrices are packed and products are shared among threads.
pub const PANEL_ROWS: usize = 32;
