//! How a model is loaded, and the limits of its steps.

use sterna_kernels::{Kernels, KvDtype};

/// How a screened output head computes the logits that decide what is drawn. Both ways give the
/// same logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadChoice {
    /// In the way that took less time before: all rows, or only the rows that can have these
    /// logits.
    Faster,
    /// From likely rows whenever these are few enough, for checks.
    LikelyRows,
}

/// How a model is loaded, and the limits of its steps.
#[derive(Clone, Copy)]
pub struct LoadOptions {
    /// The kernels of one instruction set.
    pub kernels: Kernels,
    /// The number of threads that compute, including the caller of
    /// [`Model::forward`](super::Model::forward).
    pub threads: usize,
    /// Whether to bind each thread except the caller to a core of its own, if there are enough
    /// cores.
    pub pin_threads: bool,
    /// The maximum number of tokens in a step.
    pub max_step_tokens: usize,
    /// The maximum number of tokens in a step that get logits. Each takes a row of logits.
    pub max_logits_rows: usize,
    /// The size from which on a float output head is screened: multiplied in 8 bits first, then the
    /// best rows of each token again from the floats.
    pub exact_head_bytes: usize,
    /// How a screened head computes the logits that decide what is drawn.
    pub head_choice: HeadChoice,
    /// The number format of keys and values.
    pub kv_dtype: KvDtype,
    /// Whether to show a progress bar while loading, if stderr is a terminal.
    pub progress: bool,
}

impl LoadOptions {
    /// Returns options for `threads` threads that are not bound to cores, steps of up to 512 tokens
    /// and 64 rows of logits, with keys and values in half precision, without a progress bar.
    pub fn new(kernels: Kernels, threads: usize) -> LoadOptions {
        LoadOptions {
            kernels,
            threads,
            pin_threads: false,
            max_step_tokens: 512,
            max_logits_rows: 64,
            // Heads below this size cost little: about half of one fits a cache.
            exact_head_bytes: 16 << 20,
            head_choice: HeadChoice::Faster,
            kv_dtype: KvDtype::F16,
            progress: false,
        }
    }
}
