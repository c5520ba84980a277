//! A request that has been parsed and fits the model's context length.

use super::app::{ModelCard, Serving};
use super::error::ApiError;
use super::params::{MaxTokens, Params};
use crate::engine::TokenId;
use crate::text::{ReasoningTags, TextError};

/// A parsed request.
#[derive(Clone)]
pub(super) struct ParsedRequest {
    pub(super) prompt: Vec<TokenId>,
    pub(super) max_new_tokens: u32,
    pub(super) params: Params,
    /// How the answer is split, if it is.
    pub(super) reasoning: Option<ReasoningField>,
}

/// How an answer is split into reasoning and the text after it.
#[derive(Clone, Copy)]
pub(super) struct ReasoningField {
    pub(super) tags: ReasoningTags,
    /// Whether the prompt ends inside of reasoning.
    pub(super) is_opened: bool,
    /// Whether the client wants the reasoning.
    pub(super) is_wanted: bool,
}

impl ParsedRequest {
    /// Sets the maximum output length from the request, the endpoint's default and the context.
    ///
    /// Without `default`, the output may use the rest of the context. `param` names the field that
    /// holds the prompt.
    ///
    /// # Errors
    /// If the model's context is too short for the request, or the prompt is empty.
    pub(super) fn new(
        prompt: Vec<TokenId>,
        params: Params,
        model: &ModelCard,
        default: Option<u32>,
        param: &str,
    ) -> Result<ParsedRequest, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::empty_prompt(param));
        }
        let limit = model.max_model_len;
        let left = limit.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        let max_new_tokens = match params.max_tokens {
            _ if left == 0 => {
                let found = format!(
                    "The prompt has {} tokens, which leaves none for the output. \
                     Shorten the prompt.",
                    prompt.len()
                );
                return Err(ApiError::context_length(param, limit, &found));
            }
            Some(MaxTokens { field, tokens }) if tokens > left => {
                let found = format!(
                    "Your request needs {} tokens: {} for the prompt and {tokens} for the \
                     output. Shorten the prompt or reduce '{field}'.",
                    prompt.len() + tokens as usize,
                    prompt.len()
                );
                return Err(ApiError::context_length(field, limit, &found));
            }
            Some(MaxTokens { tokens, .. }) => tokens,
            None => default.map_or(left, |default| left.min(default)),
        };
        let min_tokens = params.min_tokens;
        if min_tokens > max_new_tokens {
            let message = format!(
                "'min_tokens' must be at most {max_new_tokens}, the maximum output length of this \
                 request; got {min_tokens}."
            );
            return Err(ApiError::invalid_value("min_tokens", message));
        }
        Ok(ParsedRequest {
            prompt,
            max_new_tokens,
            params,
            reasoning: None,
        })
    }
}

/// Checks the length of a text before it is tokenized, because tokenizing a hopelessly long text
/// would be wasted work.
///
/// # Errors
/// If `bytes` bytes of text cannot fit the context, whatever tokens they become.
pub(super) fn check_length(bytes: usize, serving: &Serving, param: &str) -> Result<(), ApiError> {
    let limit = serving.model.max_model_len;
    let min_tokens = bytes / serving.tokenizer.longest_token();
    if min_tokens <= limit as usize {
        return Ok(());
    }
    let found = format!(
        "The prompt has {bytes} bytes, which are at least {min_tokens} tokens. Shorten the prompt."
    );
    Err(ApiError::context_length(param, limit, &found))
}

/// Returns the error for a text that cannot be encoded. `param` names the field that holds it.
pub(super) fn encoding_error(error: &TextError, param: &str) -> ApiError {
    match error {
        TextError::BeyondVocabulary { vocabulary, .. } => {
            let message = format!(
                "'{param}' has text whose token the model does not know: its tokenizer has more \
                 tokens than the model's vocabulary of {vocabulary}. Change the text."
            );
            ApiError::invalid_value(param, message)
        }
        TextError::BecomesControl { .. } => {
            ApiError::invalid_value(param, format!("'{param}': {error}."))
        }
        other => ApiError::internal(&other.to_string()),
    }
}
