//! Log-probabilities of tokens, in the shapes of both completion endpoints.

use serde::{Serialize, Serializer};

use crate::engine::TokenId;
use crate::text::Tokenizer;

/// Marks a token of the completions endpoint that is not valid UTF-8.
const BYTES: &str = "bytes:";
/// Replaces smaller log-probabilities, because JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// A token of the answer with its log-probability.
#[derive(Debug)]
pub(super) struct TokenLogprob {
    /// The position of the token's text in the answer, in characters.
    pub(super) start: usize,
    pub(super) token: TokenId,
    pub(super) logprob: f32,
    /// The most likely tokens at this position, most likely first.
    pub(super) top: Vec<(TokenId, f32)>,
}

/// The log-probabilities of a chat choice or chunk.
#[derive(Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatLogprob>,
}

#[derive(Serialize)]
struct ChatLogprob {
    #[serde(flatten)]
    chosen: TokenLikelihood,
    top_logprobs: Vec<TokenLikelihood>,
}

#[derive(Serialize)]
struct TokenLikelihood {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(super) fn new(logprobs: &[TokenLogprob], tokenizer: &Tokenizer) -> ChatLogprobs {
        let likelihood = |&(token, logprob): &(TokenId, f32)| TokenLikelihood {
            token: spelled(tokenizer, token, ""),
            logprob: logprob.max(MIN_LOGPROB),
            bytes: tokenizer.token_bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprob| ChatLogprob {
            chosen: likelihood(&(entry.token, entry.logprob)),
            top_logprobs: entry.top.iter().map(likelihood).collect(),
        };
        ChatLogprobs {
            content: logprobs.iter().map(entry).collect(),
        }
    }
}

/// The log-probabilities of a completion choice or chunk: four arrays of the same length.
#[derive(Default, Serialize)]
pub(super) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<TopLogprobs>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub(super) fn new(logprobs: &[TokenLogprob], tokenizer: &Tokenizer) -> CompletionLogprobs {
        let mut arrays = CompletionLogprobs::default();
        for entry in logprobs {
            let token = spelled(tokenizer, entry.token, BYTES);
            arrays.tokens.push(token);
            arrays.token_logprobs.push(entry.logprob.max(MIN_LOGPROB));
            arrays.top_logprobs.push(TopLogprobs::new(entry, tokenizer));
            arrays.text_offset.push(entry.start);
        }
        arrays
    }
}

/// The most likely tokens and the chosen token, most likely first, as one JSON object. If two
/// tokens are spelled alike, only the more likely one stays.
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(entry: &TokenLogprob, tokenizer: &Tokenizer) -> TopLogprobs {
        let mut top: Vec<(String, f32)> = Vec::new();
        let chosen = (entry.token, entry.logprob);
        for (token, logprob) in entry.top.iter().copied().chain([chosen]) {
            let token = spelled(tokenizer, token, BYTES);
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
