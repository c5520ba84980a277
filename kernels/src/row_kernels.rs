//! The kernels over single rows, compiled for one instruction set.
//!
//! `elementwise.rs`, `int8.rs`, `delta.rs`, `hadamard.rs`, `softmax.rs`, `draw.rs`,
//! `attention.rs` and `kv_store.rs` hold their bodies, which are the same for all instruction sets.

/// Defines these kernels with the given attribute, which enables the instruction set.
macro_rules! row_kernels {
    ($(#[$attribute:meta])?) => {
        $crate::row_kernels::forward_to_bodies! {
            [$(#[$attribute])?]
            elementwise::quantize(x: &[f32], out: &mut $crate::activation::QuantizedTokenMut<'_>);
            elementwise::rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
            elementwise::rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]);
            elementwise::relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]);
            elementwise::silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]);
            elementwise::sigmoid_gate(gate: &[f32], x: &[f32], out: &mut [f32]);
            elementwise::scale_panel(
                sums: &[i32],
                scales: $crate::PanelScales<'_>,
                out: &mut [f32],
                largest: &mut [f32]
            );
            int8::rounded_dot(weights: &[f32], step: f32, q: &[i8]) -> i32;
            delta::delta_step(
                state: &mut [f32],
                update: $crate::DeltaUpdate<'_>,
                key_and_query: [&[f32]; 2],
                sums: [&mut [f32]; 2]
            );
            delta::delta_finish(
                sums: [&[f32]; 2],
                value: &[f32],
                factors: [f32; 3],
                delta: &mut [f32],
                out: &mut [f32]
            );
            delta::convolve(inputs: &[&[f32]], weights: &[f32], out: &mut [f32]);
            hadamard::hadamard(x: &mut [f32], block: usize);
            softmax::scan_logits(logits: &[f32], peaks: &mut [f32]) -> bool;
            softmax::sum_weights(
                logits: &[f32],
                scale: $crate::LogitScale,
                end: $crate::Rank,
                peaks: &[f32],
                masses: &mut [f32]
            );
            draw::best_score(
                logits: &[f32],
                scores: $crate::DrawScores,
                end: $crate::Rank,
                peaks: &[f32],
                floor: f32
            ) -> (f32, u32);
            attention::attention_merge(state: &mut $crate::AttentionState);
            attention::attention_resume(
                state: &mut $crate::AttentionState,
                saved: &$crate::SavedSpans
            );
            attention::attention_finish(state: &$crate::AttentionState, out: &mut [f32]);
            kv_store::store_bf16(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]);
            kv_store::store_int8(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]);
            kv_store::store_e4m3(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]);
            kv_store::store_e5m2(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]);
        }
    };
}

/// Defines a function with the attribute for each body, which it calls.
macro_rules! forward_to_bodies {
    ($attribute:tt $($file:ident::$name:ident $arguments:tt $(-> $result:ty)?;)*) => {
        $($crate::row_kernels::forward_to_body! {
            $attribute $file::$name $arguments $(-> $result)?
        })*
    };
}

macro_rules! forward_to_body {
    (
        [$(#[$attribute:meta])?]
        $file:ident::$name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?
    ) => {
        $(#[$attribute])?
        pub(crate) fn $name($($argument: $type),*) $(-> $result)? {
            $crate::$file::$name($($argument),*)
        }
    };
}

pub(crate) use {forward_to_bodies, forward_to_body, row_kernels};
