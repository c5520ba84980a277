//! Steps of a model outside of an engine.

use sterna::model::{AlternatingSlabs, KvStore, Model};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, StateLimits, TokenId};

use super::fixture::Prompt;

/// The chunk size of prompts, in tokens. It is no multiple of a page or span.
pub(crate) const CHUNK: usize = 90;

/// A sequence's tokens and the pages that hold its keys and values.
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) computed: usize,
    pub(crate) pages: Vec<Page>,
    slabs: AlternatingSlabs,
}

impl Sequence {
    /// The pages of different `first_page`s must not overlap. `slabs` differs among the sequences
    /// of a store.
    pub(crate) fn new(first_page: usize, slabs: u32, tokens: Vec<TokenId>) -> Sequence {
        let pages = first_page..first_page + tokens.len().div_ceil(PAGE_TOKENS);
        let pages = pages
            .map(|page| Page::new(u32::try_from(page).unwrap()))
            .collect();
        Sequence {
            id: SequenceId::new(u32::try_from(first_page).unwrap(), 0),
            tokens,
            computed: 0,
            pages,
            slabs: AlternatingSlabs::new(slabs),
        }
    }

    /// Adds the next tokens to a step, at most `limit`, with logits after the last `logits` of
    /// them. Returns the position of the last one, or `None` if no token is left.
    pub(crate) fn push_row(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        logits: usize,
    ) -> Option<usize> {
        let end = self.tokens.len().min(self.computed.saturating_add(limit));
        if end == self.computed {
            return None;
        }
        let pages = &self.pages[..end.div_ceil(PAGE_TOKENS)];
        batch.push_row(
            self.id,
            self.computed,
            &self.tokens[self.computed..end],
            pages,
            logits,
        );
        batch.set_states(self.slabs.next_row());
        self.computed = end;
        Some(end - 1)
    }
}

/// Returns the logits after each prompt and after each token of its continuation except the last.
/// All prompts run side by side: the prompts in chunks, the continuations token by token.
pub(crate) fn follow(model: &mut Model, prompts: &[Prompt]) -> Vec<Vec<Vec<f32>>> {
    let mut pages = 0;
    let mut sequences = Vec::new();
    for Prompt {
        prompt,
        continuation,
        ..
    } in prompts
    {
        let tokens = [prompt.as_slice(), &continuation[..continuation.len() - 1]].concat();
        sequences.push(Sequence::new(pages, sequences.len() as u32, tokens));
        pages += sequences.last().unwrap().pages.len();
    }
    let states = StateLimits {
        slabs: 2 * prompts.len() as u32,
        in_place_tokens: 1,
        trial_interval: 2048,
    };
    let mut kv = model.new_kv_store_with_states(pages, states).unwrap();
    let mut rows = vec![Vec::new(); prompts.len()];
    let mut batch = Batch::new();
    loop {
        batch.clear();
        let mut computed = Vec::new();
        for (index, sequence) in sequences.iter_mut().enumerate() {
            let prompt_left = prompts[index]
                .prompt
                .len()
                .saturating_sub(sequence.computed);
            let last = sequence.push_row(&mut batch, prompt_left.clamp(1, CHUNK), 1);
            computed.extend(last.map(|last| (index, last)));
        }
        if computed.is_empty() {
            return rows;
        }
        step(model, &batch, &mut kv, |row, logits| {
            let (index, last) = computed[row];
            if last + 1 >= prompts[index].prompt.len() {
                rows[index].push(logits);
            }
        });
    }
}

/// Runs one layer on `hidden`, the hidden states of a sequence from its beginning.
pub(crate) fn run_layer(model: &mut Model, layer: usize, hidden: &mut [f32]) {
    let mut sequence = Sequence::new(0, 0, vec![0; hidden.len() / model.config().hidden]);
    let mut batch = Batch::new();
    sequence.push_row(&mut batch, usize::MAX, 1);
    let mut kv = model.new_kv_store(sequence.pages.len()).unwrap();
    model.run_layers(layer..layer + 1, hidden, &batch, &mut kv);
}

/// Computes one step and calls `each` with every row of logits.
pub(crate) fn step(
    model: &mut Model,
    batch: &Batch,
    kv: &mut KvStore,
    mut each: impl FnMut(usize, Vec<f32>),
) {
    let vocab = model.config().vocab;
    let logits = model.forward(batch, kv);
    for row in 0..logits.rows() {
        let mut values = vec![0.0; vocab];
        logits.copy_row(row, &mut values);
        each(row, values);
    }
}
