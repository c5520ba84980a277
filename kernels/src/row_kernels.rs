//! The kernels over single rows, compiled for one instruction set.
//!
//! `elementwise.rs`, `softmax.rs` and `attention.rs` hold their bodies, which are the same for all
//! instruction sets.

/// Defines these kernels with the given attribute, which enables the instruction set.
macro_rules! row_kernels {
    ($(#[$attribute:meta])?) => {
        $(#[$attribute])?
        pub(crate) fn quantize(x: &[f32], out: &mut $crate::activation::QuantizedTokenMut<'_>) {
            (*out.scale, *out.sum) = $crate::elementwise::quantize(x, out.values);
        }

        $(#[$attribute])?
        pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
            $crate::elementwise::rms_norm(x, weight, eps, out);
        }

        $(#[$attribute])?
        pub(crate) fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
            $crate::elementwise::rope(x, head_dim, cos, sin);
        }

        $(#[$attribute])?
        pub(crate) fn relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
            $crate::elementwise::relu2_gate(gate, up, out);
        }

        $(#[$attribute])?
        pub(crate) fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
            $crate::elementwise::silu_gate(gate, up, out);
        }

        $(#[$attribute])?
        pub(crate) fn scale_panel(
            sums: &[i32],
            scales: $crate::PanelScales<'_>,
            out: &mut [f32],
            largest: &mut [f32],
        ) {
            $crate::elementwise::scale_panel(sums, scales, out, largest);
        }

        $(#[$attribute])?
        pub(crate) fn scan_logits(logits: &[f32], peaks: &mut [f32]) -> bool {
            $crate::softmax::scan_logits(logits, peaks)
        }

        $(#[$attribute])?
        pub(crate) fn weigh_logits(
            logits: &[f32],
            scale: $crate::LogitScale,
            weights: &mut [f32],
            masses: &mut [f32],
            heaviest: &mut [f32],
        ) {
            $crate::softmax::weigh_logits(logits, scale, weights, masses, heaviest);
        }

        $(#[$attribute])?
        pub(crate) fn sum_weights(
            logits: &[f32],
            scale: $crate::LogitScale,
            masses: &mut [f32],
        ) {
            $crate::softmax::sum_weights(logits, scale, masses);
        }

        $(#[$attribute])?
        pub(crate) fn weights_from(
            threshold: f32,
            weights: &[f32],
            heaviest: &[f32],
        ) -> (f64, usize) {
            $crate::softmax::weights_from(threshold, weights, heaviest)
        }

        $(#[$attribute])?
        pub(crate) fn drop_weights(
            threshold: f32,
            weights: &mut [f32],
            heaviest: &[f32],
            masses: &mut [f32],
        ) {
            $crate::softmax::drop_weights(threshold, weights, heaviest, masses);
        }

        $(#[$attribute])?
        pub(crate) fn attention_finish(state: &$crate::AttentionState, out: &mut [f32]) {
            state.finish(out);
        }
    };
}

pub(crate) use row_kernels;
