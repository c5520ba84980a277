//! Finds the order of the weights in an I2_S file.
//!
//! Three orders share one type number and one size, and the file does not say which it has. With a
//! wrong one the model says nonsense. So the model predicts a short plain text: with the right
//! order it does that far better than chance.

use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use crate::model::{I2sOrder, LoadError, LoadOptions, Model, Source};
use crate::text::Tokenizer;

/// The text that the model predicts.
const TEXT: &str =
    "The capital of France is Paris. The sun rises in the east and sets in the west.";

/// A trained model needs less than this share of the bits that chance needs.
const SHARE_OF_CHANCE: f64 = 0.75;

/// Loads the model. If its file has I2_S weights and `order` is `None`, tries the orders until the
/// model predicts text.
///
/// # Errors
/// If loading fails, or the model predicts no text with any order.
pub(super) fn load(
    source: Source,
    order: Option<I2sOrder>,
    tokenizer: &Tokenizer,
    options: LoadOptions,
) -> Result<Model, String> {
    let load = |order| {
        let source = source.clone().with_i2s_order(order);
        Model::load(&source, options).map_err(|error: LoadError| error.to_string())
    };
    if let Some(order) = order {
        return load(order);
    }
    if !source.has_i2s() {
        return load(I2sOrder::X86);
    }
    let tokens = tokenizer
        .encode_prompt(TEXT)
        .map_err(|error| error.to_string())?;
    let mut losses = Vec::new();
    for order in I2sOrder::ALL {
        let name = order.name();
        let mut model = match load(order) {
            Ok(model) => model,
            Err(why) if order == I2sOrder::X86 => return Err(why),
            Err(why) => {
                losses.push(format!("{name}: {why}"));
                continue;
            }
        };
        let chance = (model.config().vocab as f64).ln();
        let loss = loss(&mut model, &tokens);
        if loss < SHARE_OF_CHANCE * chance {
            tracing::info!(
                order = name,
                loss,
                chance,
                "found the order of I2_S weights"
            );
            return Ok(model);
        }
        losses.push(format!("{name} {loss:.1}"));
    }
    Err(format!(
        "the model predicts text no better than chance with any order of its I2_S weights (mean \
         loss: {}). If you know the order, give --i2s-order",
        losses.join(", ")
    ))
}

/// Returns the mean negative log-probability that the model gives to each token but the first, in
/// nats. NaN if a logit is NaN.
fn loss(model: &mut Model, tokens: &[TokenId]) -> f64 {
    let pages: Vec<Page> = (0..)
        .map(Page::new)
        .take(tokens.len().div_ceil(PAGE_TOKENS))
        .collect();
    let Ok(mut kv) = model.new_kv_store(pages.len()) else {
        return f64::NAN;
    };
    if tokens.len() < 2 {
        return f64::NAN;
    }
    let (mut batch, mut logits) = (Batch::new(), vec![0.0; model.config().vocab]);
    let mut sum = 0.0;
    for (position, pair) in tokens.windows(2).enumerate() {
        let pages = &pages[..position / PAGE_TOKENS + 1];
        batch.clear();
        batch.push_row(SequenceId::new(0, 0), position, &pair[..1], pages, 1);
        model.forward(&batch, &mut kv).copy_row(0, &mut logits);
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let shifted = |logit: f32| f64::from(logit) - f64::from(largest);
        let total: f64 = logits.iter().map(|logit| shifted(*logit).exp()).sum();
        sum += total.ln() - shifted(logits[pair[1] as usize]);
    }
    sum / (tokens.len() - 1) as f64
}
