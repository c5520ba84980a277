//! A model without weights, and a tokenizer for it.
//!
//! The pages of its KV store hold tokens. Each next token is a function of all tokens that a row
//! reads through its page table. So a page that is stale, missing or another sequence's changes the
//! answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};
use sterna::engine::{Forward, LogitRows, TokenId};
use sterna_random::{GOLDEN, mix};
use sterna_scheduler::{Batch, Limits, PAGE_TOKENS};

/// The token that ends an answer.
pub(crate) const END: TokenId = 2;
/// The tokens from here to [`FIRST_PIECE`] stand for one byte each.
pub(crate) const FIRST_BYTE: TokenId = 3;
/// The tokens from here on stand for text.
pub(crate) const FIRST_PIECE: TokenId = FIRST_BYTE + 256;

/// The text of the tokens from [`FIRST_PIECE`] on. `▁` is a space.
const PIECES: [&str; 41] = [
    "▁", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r",
    "s", "t", "u", "v", "w", "x", "y", "z", "0", "1", "2", "3", "▁the", "ing", "▁▁", "é", "ß",
    "你", "好", "👩", "\u{200d}", "ab▁",
];

pub(crate) const VOCABULARY: u32 = FIRST_PIECE + PIECES.len() as u32;

/// The number of tokens that a row of logits makes likely.
const CANDIDATES: usize = 4;

/// How the next token follows from the tokens before it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// A hash of all tokens picks some likely ones. One in 64 is the end.
    Hash,
    /// The text repeats itself with this period.
    Repeat(usize),
    /// As [`Rule::Hash`], but three of four tokens repeat the text, so that drafts are accepted.
    Phrases,
}

impl Rule {
    fn candidates(self, history: &[TokenId]) -> [TokenId; CANDIDATES] {
        let repeated = |period| history[history.len().saturating_sub(period)];
        let hash = || {
            history.iter().fold(GOLDEN, |hash, &token| {
                mix(hash ^ u64::from(token).wrapping_mul(GOLDEN))
            })
        };
        match self {
            Rule::Repeat(period) => [repeated(period); CANDIDATES],
            Rule::Hash => likely(hash()),
            Rule::Phrases => {
                let hash = hash();
                let mut tokens = likely(hash);
                if !(hash >> 8).is_multiple_of(4) {
                    tokens[0] = repeated(7).max(FIRST_BYTE);
                }
                tokens
            }
        }
    }
}

/// Returns the tokens that a hash picks.
fn likely(hash: u64) -> [TokenId; CANDIDATES] {
    let spread = u64::from(VOCABULARY - FIRST_BYTE);
    let token = |index| FIRST_BYTE + (mix(hash ^ index as u64) % spread) as TokenId;
    let mut tokens = std::array::from_fn(token);
    if hash.is_multiple_of(64) {
        tokens[0] = END;
    }
    tokens
}

/// The model. It calls `on_step` before each step.
pub(crate) struct PageModel {
    rule: Rule,
    on_step: Box<dyn FnMut(&Batch) + Send>,
}

impl PageModel {
    pub(crate) fn new(rule: Rule) -> PageModel {
        PageModel::watched(rule, |_| ())
    }

    pub(crate) fn watched(rule: Rule, on_step: impl FnMut(&Batch) + Send + 'static) -> PageModel {
        PageModel {
            rule,
            on_step: Box::new(on_step),
        }
    }

    /// Returns a model that adds the tokens that it computes to the returned counter.
    pub(crate) fn counting(rule: Rule) -> (PageModel, Arc<AtomicU64>) {
        let computed = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&computed);
        let model = PageModel::watched(rule, move |batch| {
            counter.fetch_add(batch.token_count() as u64, Ordering::SeqCst);
        });
        (model, computed)
    }
}

pub(crate) struct PageLogits(Vec<[TokenId; CANDIDATES]>);

impl LogitRows for PageLogits {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        logits.fill(-20.0);
        for (rank, &token) in self.0[row].iter().enumerate().rev() {
            logits[token as usize] = 2.0 - rank as f32 / 2.0;
        }
    }
}

impl Forward for PageModel {
    type KvStore = Vec<[TokenId; PAGE_TOKENS]>;

    fn vocabulary(&self) -> usize {
        VOCABULARY as usize
    }

    fn new_kv_store(&self, limits: &Limits) -> std::io::Result<Self::KvStore> {
        Ok(vec![[0; PAGE_TOKENS]; limits.pages as usize])
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut Self::KvStore) -> impl LogitRows {
        (self.on_step)(batch);
        for copy in batch.copies() {
            kv_store[copy.to.index()] = kv_store[copy.from.index()];
        }
        for row in batch.rows() {
            let pages = batch.pages(row);
            for (position, &token) in (row.start as usize..).zip(batch.tokens(row)) {
                kv_store[pages[position / PAGE_TOKENS].index()][position % PAGE_TOKENS] = token;
            }
        }
        let mut candidates = Vec::with_capacity(batch.logits_count());
        for row in batch.rows() {
            let pages = batch.pages(row).iter();
            let history: Vec<TokenId> = pages.flat_map(|page| kv_store[page.index()]).collect();
            let ends = row.end() + 1 - row.logits as usize..=row.end();
            candidates.extend(ends.map(|end| self.rule.candidates(&history[..end])));
        }
        PageLogits(candidates)
    }
}

/// Returns a `tokenizer.json` of the SentencePiece kind, with byte fallback.
pub(crate) fn tokenizer_json() -> Vec<u8> {
    let special = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let pieces = PIECES.map(str::to_owned);
    let tokens = special.chain(bytes).chain(pieces).zip(0..);
    let vocabulary: Map<String, Value> = tokens.map(|(token, id)| (token, json!(id))).collect();
    let added = |(id, content): (u32, &str)| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let added = [(0, "<unk>"), (1, "<s>"), (END, "</s>")].map(added);
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocabulary, "merges": [],
        },
    });
    serde_json::to_vec(&file).unwrap()
}
