//! The embedding of a text: its hidden states after the last norm, pooled, with length 1.
//!
//! Invariant: the embedding of a text depends on its tokens alone. Neither chunks nor the other
//! rows of a step change it.

use std::io;

use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use super::forward::Model;
use super::state_store::AlternatingSlabs;
use crate::checkpoint::{ModelConfig, Pooling};

/// The embedding of a text while its tokens are computed, in chunks of any size.
pub struct TextEmbedding {
    pooling: Pooling,
    sum: Vec<f64>,
    tokens: usize,
}

impl TextEmbedding {
    /// Begins the embedding of a text.
    pub fn new(config: &ModelConfig) -> TextEmbedding {
        TextEmbedding::of(config.pooling, config.hidden)
    }

    /// Begins the embedding of a text from states of this width.
    pub fn of(pooling: Pooling, width: usize) -> TextEmbedding {
        TextEmbedding {
            pooling,
            sum: vec![0.0; width],
            tokens: 0,
        }
    }

    /// Returns how many tokens at the end of a chunk must ask for their states. `is_last` says that
    /// the text ends with the chunk.
    pub fn wanted_states(&self, chunk_tokens: usize, is_last: bool) -> usize {
        match self.pooling {
            Pooling::LastToken => usize::from(is_last),
            Pooling::Mean => chunk_tokens,
        }
    }

    /// Adds the next wanted state.
    ///
    /// # Panics
    /// If it has another width than the model.
    pub fn add(&mut self, state: &[f32]) {
        assert_eq!(state.len(), self.sum.len(), "the width of a hidden state");
        for (sum, value) in self.sum.iter_mut().zip(state) {
            *sum += f64::from(*value);
        }
        self.tokens += 1;
    }

    /// Returns the embedding, or `None` if a state is NaN or infinite. All zeros stay zeros.
    ///
    /// # Panics
    /// If no state was added.
    pub fn finish(self) -> Option<Vec<f32>> {
        assert!(self.tokens > 0, "a text has a token");
        // The length divides the number of tokens of a mean out.
        let square: f64 = self.sum.iter().map(|value| value * value).sum();
        let factor = match square {
            0.0 => 0.0,
            square => 1.0 / square.sqrt(),
        };
        let values = self.sum.into_iter().map(|value| (value * factor) as f32);
        square.is_finite().then(|| values.collect())
    }
}

impl Model {
    /// Computes the embedding of a text, in steps of the largest size. Returns `None` if the model
    /// computes NaN or infinities.
    ///
    /// # Errors
    /// If the system does not have enough memory for the keys and values.
    ///
    /// # Panics
    /// If the text has no token, more tokens than the model has positions, or one that does not
    /// exist.
    pub fn embed_text(&mut self, text: &[TokenId]) -> io::Result<Option<Vec<f32>>> {
        let limit = self.config().max_position;
        assert!(text.len() <= limit, "a text of at most {limit} tokens");
        let pages = (0..).map(Page::new).take(text.len().div_ceil(PAGE_TOKENS));
        let pages: Vec<Page> = pages.collect();
        let mut kv = self.new_kv_store(pages.len())?;
        let mut embedding = TextEmbedding::new(self.config());
        let mut batch = Batch::new();
        let (mut computed, mut slabs) = (0, AlternatingSlabs::new(0));
        for chunk in text.chunks(self.max_step_tokens()) {
            let end = computed + chunk.len();
            let wanted = embedding.wanted_states(chunk.len(), end == text.len());
            let pages = &pages[..end.div_ceil(PAGE_TOKENS)];
            batch.clear();
            batch.push_row(SequenceId::new(0, 0), computed, chunk, pages, wanted);
            batch.set_states(slabs.next_row());
            let states = self.forward_states(&batch, &mut kv);
            states.iter().for_each(|state| embedding.add(state));
            computed = end;
        }
        Ok(embedding.finish())
    }
}
