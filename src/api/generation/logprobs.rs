//! Log-probabilities of tokens, in the shapes of both completion endpoints.

use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::engine::TokenId;
use crate::text::Tokenizer;

/// Marks a token of the completions endpoint that is not valid UTF-8.
const BYTES: &str = "bytes:";
/// Replaces smaller log-probabilities, because JSON has no infinity.
pub(in crate::api) const MIN_LOGPROB: f32 = -9999.0;

/// A token of the answer with its log-probability.
#[derive(Debug)]
pub(in crate::api) struct TokenLogprob {
    /// The position of the token's text in the answer, in characters.
    pub(in crate::api) start: usize,
    pub(in crate::api) token: TokenId,
    /// `None` for the first token of a prompt, which follows nothing.
    pub(in crate::api) logprob: Option<f32>,
    /// The most likely tokens at this position, most likely first.
    pub(in crate::api) top: Vec<(TokenId, f32)>,
}

/// How log-probabilities show tokens.
#[derive(Clone, Copy)]
pub(in crate::api) enum TokenSpelling {
    Text,
    /// As `token_id:` and the id.
    Id,
}

/// Shows the tokens of a tokenizer.
#[derive(Clone, Copy)]
pub(in crate::api) struct SpelledTokens<'a> {
    pub(in crate::api) tokenizer: &'a Tokenizer,
    pub(in crate::api) spelling: TokenSpelling,
}

impl SpelledTokens<'_> {
    /// Returns what stands for a token. `prefix` precedes bytes that are not valid UTF-8.
    fn of(self, token: TokenId, prefix: &str) -> String {
        match self.spelling {
            TokenSpelling::Text => spelled(self.tokenizer, token, prefix),
            TokenSpelling::Id => format!("token_id:{token}"),
        }
    }
}

/// The log-probabilities of a chat choice or chunk.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ChatLogprobs {
    /// One entry for each token.
    content: Vec<ChatLogprob>,
}

/// A token of the answer, its log-probability and its alternatives.
#[derive(Serialize, ToSchema)]
struct ChatLogprob {
    /// The text of the token; `\\x` and two digits for each byte if it is not valid UTF-8.
    token: String,
    /// The model's own log-probability, at least -9999.
    logprob: f32,
    /// The bytes of the token.
    #[schema(value_type = Vec<u32>)]
    bytes: Vec<u8>,
    /// The most likely tokens at this position, most likely first.
    top_logprobs: Vec<TokenLikelihood>,
}

/// A token and its log-probability.
#[derive(Serialize, ToSchema)]
struct TokenLikelihood {
    /// The text of the token; `\\x` and two digits for each byte if it is not valid UTF-8.
    token: String,
    /// The model's own log-probability, at least -9999.
    logprob: f32,
    /// The bytes of the token.
    #[schema(value_type = Vec<u32>)]
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(in crate::api) fn new(
        logprobs: &[TokenLogprob],
        spelled: SpelledTokens<'_>,
    ) -> ChatLogprobs {
        let likelihood = |&(token, logprob): &(TokenId, f32)| TokenLikelihood {
            token: spelled.of(token, ""),
            logprob: logprob.max(MIN_LOGPROB),
            bytes: spelled.tokenizer.token_bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprob| {
            let chosen = likelihood(&(entry.token, entry.logprob.unwrap_or(0.0)));
            ChatLogprob {
                token: chosen.token,
                logprob: chosen.logprob,
                bytes: chosen.bytes,
                top_logprobs: entry.top.iter().map(likelihood).collect(),
            }
        };
        ChatLogprobs {
            content: logprobs.iter().map(entry).collect(),
        }
    }
}

/// The log-probabilities of a completion choice or chunk: four arrays of the same length.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::api) struct CompletionLogprobs {
    /// The texts of the tokens; `bytes:` and hexadecimal digits if one is not valid UTF-8.
    tokens: Vec<String>,
    /// The model's own log-probabilities, at least -9999.
    token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens and the chosen one, most likely first, with their log-probabilities.
    #[schema(value_type = Vec<Option<std::collections::HashMap<String, f32>>>)]
    top_logprobs: Vec<Option<TopLogprobs>>,
    /// The position of each token in the text, in characters.
    #[schema(value_type = Vec<u64>)]
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub(in crate::api) fn new(
        logprobs: &[TokenLogprob],
        spelled: SpelledTokens<'_>,
    ) -> CompletionLogprobs {
        let mut arrays = CompletionLogprobs::default();
        for entry in logprobs {
            arrays.tokens.push(spelled.of(entry.token, BYTES));
            let logprob = entry.logprob.map(|logprob| logprob.max(MIN_LOGPROB));
            let top = logprob.map(|logprob| TopLogprobs::new(entry, logprob, spelled));
            arrays.token_logprobs.push(logprob);
            arrays.top_logprobs.push(top);
            arrays.text_offset.push(entry.start);
        }
        arrays
    }
}

/// The most likely tokens and the chosen token, most likely first, as one JSON object. If two
/// tokens are spelled alike, only the more likely one stays.
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(entry: &TokenLogprob, logprob: f32, spelled: SpelledTokens<'_>) -> TopLogprobs {
        let mut top: Vec<(String, f32)> = Vec::new();
        let chosen = (entry.token, logprob);
        for (token, logprob) in entry.top.iter().copied().chain([chosen]) {
            let token = spelled.of(token, BYTES);
            if top.iter().all(|(other, _)| *other != token) {
                top.push((token, logprob.max(MIN_LOGPROB)));
            }
        }
        TopLogprobs(top)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// Returns the text of a token; `\x` and two digits for each byte if it is not valid UTF-8.
pub(in crate::api) fn token_text(tokenizer: &Tokenizer, token: TokenId) -> String {
    spelled(tokenizer, token, "")
}

/// Returns the text of a token. If its bytes are not valid UTF-8, returns `prefix` followed by the
/// bytes in hexadecimal.
fn spelled(tokenizer: &Tokenizer, token: TokenId, prefix: &str) -> String {
    let bytes = tokenizer.token_bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(prefix.to_owned(), |text, byte| {
            text + &format!("\\x{byte:02x}")
        }),
    }
}
