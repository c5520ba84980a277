//! Finds the order of the weights in an I2_S file.
//!
//! Three orders share one type number and one size, and the file does not say which it has. With a
//! wrong one the model says nonsense. So the model predicts a short plain text: with the right
//! order it does that far better than chance.

use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use super::OpenCheckpoint;
use crate::checkpoint::I2sOrder;
use crate::model::{LoadOptions, Model};

/// The text that the model predicts.
const TEXT: &str =
    "The capital of France is Paris. The sun rises in the east and sets in the west.";

/// A trained model's loss, as a share of the loss of chance, is below this.
const TRAINED: f64 = 0.75;
/// The right order's share is lower than any other order's share by at least this.
const MARGIN: f64 = 0.1;

/// Loads the model, and returns the order of its I2_S weights too. If its file has I2_S weights,
/// does not state their order, and `order` is `None`, tries the orders until the model predicts
/// text. A model without an output head gets the order of x86, without a trial.
///
/// # Errors
/// If loading fails, or the model predicts no text with any order.
pub(super) fn load(
    checkpoint: &OpenCheckpoint,
    order: Option<I2sOrder>,
    options: LoadOptions,
) -> Result<(Model, I2sOrder), String> {
    let source = &checkpoint.source;
    let load = |order| {
        let model = Model::load(&source.clone().with_i2s_order(order), options);
        Ok((model.map_err(|error| error.to_string())?, order))
    };
    if let Some(order) = order.or(source.stated_i2s_order()) {
        return load(order);
    }
    if !source.has_i2s() {
        return load(I2sOrder::X86);
    }
    if !checkpoint.config.has_head {
        // Such a model predicts no text. The one program that writes such files, Microsoft's
        // converter for BitNet-embedding, has the order of x86.
        tracing::info!("a model without an output head: its I2_S weights are in the order of x86");
        return load(I2sOrder::X86);
    }
    let tokenizer = &checkpoint.text.tokenizer;
    let tokens = tokenizer
        .encode_prompt(TEXT)
        .map_err(|error| error.to_string())?;
    let mut shares = Vec::new();
    for order in I2sOrder::ALL {
        let (mut model, _) = match load(order) {
            Ok(model) => model,
            Err(why) if order == I2sOrder::X86 => return Err(why),
            Err(_) => continue, // The order cannot store these shapes.
        };
        let share = loss(&mut model, &tokens) / (model.config().vocab as f64).ln();
        tracing::info!(
            order = order.name(),
            share,
            "tried an order of I2_S weights"
        );
        if share < TRAINED - MARGIN {
            return Ok((model, order)); // The others are no better than chance.
        }
        shares.push((share, order));
    }
    shares.sort_by(|a, b| a.0.total_cmp(&b.0));
    let next = shares.get(1).map_or(1.0, |(share, _)| *share);
    if let Some((share, order)) = shares.first()
        && *share < TRAINED
        && next - share >= MARGIN
    {
        return load(*order);
    }
    let shares = shares.iter();
    let shares = shares.map(|(share, order)| format!("{} {share:.2}", order.name()));
    let shares = shares.collect::<Vec<_>>().join(", ");
    Err(format!(
        "no I2_S weight order predicts text clearly better than the others (loss as a share of \
         chance: {shares}). If you know the order, give --i2s-order"
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
