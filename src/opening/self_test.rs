//! Tests the loaded model before the server is ready: its kernels against plain Rust, and its
//! tokens against the tokens that a trusted run recorded.

use std::time::Instant;

use sterna_kernels::Isa;

use super::OpenCheckpoint;
use super::golden_tokens::GoldenTokens;
use crate::model::{LoadOptions, Model};

/// The text that both kernels compute.
const TEXT: &str = "The capital of France is Paris.";

/// The products of a weight and an activation that plain Rust computes on one core in about a
/// second.
const PRODUCTS: u64 = 300_000_000;

/// Tests the model, which was loaded from `checkpoint` with `options`.
///
/// # Errors
/// If the kernels compute anything else than plain Rust, or the model says other tokens than the
/// checkpoint recorded.
pub(super) fn run(
    model: &mut Model,
    checkpoint: &OpenCheckpoint,
    options: &LoadOptions,
) -> Result<(), String> {
    let (started, isa) = (Instant::now(), options.kernels.isa());
    if isa != Isa::Scalar {
        let text = checkpoint.text.tokenizer.encode_prompt(TEXT);
        let mut text = text.map_err(|error| format!("the text of the self-test: {error}"))?;
        if text.is_empty() {
            text.push(0); // A tokenizer may drop what it does not know.
        }
        let products = PRODUCTS * model.threads() as u64;
        let part = model.compare_with_scalar(&text, products);
        let part = part.map_err(|error| {
            format!(
                "the self-test failed: {error}. The processor, its memory or an emulator may be \
                 faulty. Start on another machine, or with --isa scalar, which is slow"
            )
        })?;
        let milliseconds = started.elapsed().as_millis() as u64;
        tracing::info!(
            milliseconds,
            layers = part.layers,
            head = part.head,
            "{isa} computes the same bits as plain Rust"
        );
    }
    if let Some(golden) = GoldenTokens::read(&checkpoint.source, model)? {
        let max_step = options.max_step_tokens.min(options.max_logits_rows);
        golden.check(model, max_step)?;
        let cases = golden.cases();
        tracing::info!(
            cases,
            "the model says the recorded tokens of its checkpoint"
        );
    }
    Ok(())
}
