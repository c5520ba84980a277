//! Prompts: the fields that hold them, and how their texts become tokens.

use serde::de::{Error, MapAccess, SeqAccess};
use serde_json::{Value, json};

use super::json_field::{Given, JsonField, Scalar, count_rest, deserialize_fields, must_be};
use super::token_ids::TokenList;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::engine::TokenId;
use crate::text::TextError;

/// The maximum number of choices of a request.
pub(in crate::api) const MAX_CHOICES: usize = 128;

/// A field of one prompt, or of at most `MAX` prompts.
pub(in crate::api) enum Prompt<const MAX: usize> {
    One(PromptText),
    Several(Vec<PromptItem>),
    TooMany(usize),
}

/// A prompt: text or tokens.
pub(in crate::api) enum PromptText {
    Text(String),
    Tokens(TokenList),
}

/// An item of the array in `prompt`, or the only prompt.
pub(in crate::api) enum PromptItem {
    Prompt(PromptText),
    Other(Given),
}

impl<'de> JsonField<'de> for PromptItem {
    const EXPECTED: &'static str = "a string or an array of token ids";

    fn schema() -> Value {
        json!({"anyOf": [{"type": "string"}, <TokenList as JsonField>::schema()]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<PromptItem, E> {
        Ok(match value {
            Scalar::Text(text) => PromptItem::Prompt(PromptText::Text(text.to_owned())),
            other => PromptItem::Other(Given::scalar(other)?),
        })
    }

    fn array<A: SeqAccess<'de>>(items: A) -> Result<PromptItem, A::Error> {
        let tokens = TokenList::array(items)?;
        Ok(PromptItem::Prompt(PromptText::Tokens(tokens)))
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<PromptItem, A::Error> {
        Given::object(entries).map(PromptItem::Other)
    }
}

impl<'de, const MAX: usize> JsonField<'de> for Prompt<MAX> {
    const EXPECTED: &'static str = PromptItem::EXPECTED;

    fn schema() -> Value {
        let mut tokens = <TokenList as JsonField>::schema();
        tokens["minItems"] = 1.into();
        let text = json!({"type": "string"});
        let prompt = json!({"anyOf": [text, tokens]});
        let prompts = json!({"type": "array", "items": prompt, "minItems": 1, "maxItems": MAX});
        json!({"anyOf": [text, tokens, prompts]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Self, E> {
        match value {
            Scalar::Text(text) => Ok(Prompt::One(PromptText::Text(text.to_owned()))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Self, A::Error> {
        let mut prompts: Vec<PromptItem> = Vec::new();
        while prompts.len() < MAX
            && let Some(item) = items.next_element()?
        {
            match item {
                PromptItem::Other(first) if prompts.is_empty() => {
                    let mut tokens = TokenList::default();
                    tokens.push(&first);
                    tokens.extend(&mut items)?;
                    return Ok(Prompt::One(PromptText::Tokens(tokens)));
                }
                item => prompts.push(item),
            }
        }
        let more = count_rest(&mut items)?;
        if more > 0 {
            return Ok(Prompt::TooMany(MAX + more));
        }
        Ok(match prompts.pop() {
            None => Prompt::One(PromptText::Tokens(TokenList::default())),
            Some(PromptItem::Prompt(only)) if prompts.is_empty() => Prompt::One(only),
            Some(last) => {
                prompts.push(last);
                Prompt::Several(prompts)
            }
        })
    }
}

deserialize_fields!({const MAX: usize} Prompt<MAX>, PromptItem);

/// Returns the tokens of each prompt in the field `param`.
pub(in crate::api) fn prompts<const MAX: usize>(
    prompt: Prompt<MAX>,
    param: &str,
    adds_special: bool,
    serving: &Serving,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let item = |(index, item): (usize, PromptItem)| {
        item.tokens(&format!("{param}[{index}]"), adds_special, serving)
    };
    match prompt {
        Prompt::One(prompt) => Ok(vec![prompt.tokens(param, adds_special, serving)?]),
        Prompt::Several(items) => items.into_iter().enumerate().map(item).collect(),
        Prompt::TooMany(count) => {
            let message = format!("'{param}' may contain at most {MAX} prompts; got {count}.");
            Err(ApiError::invalid_value(param, message))
        }
    }
}

impl PromptItem {
    /// Returns the tokens. `param` names the prompt.
    pub(in crate::api) fn tokens(
        self,
        param: &str,
        adds_special: bool,
        serving: &Serving,
    ) -> Result<Vec<TokenId>, ApiError> {
        match self {
            PromptItem::Prompt(prompt) => prompt.tokens(param, adds_special, serving),
            PromptItem::Other(got) => {
                let message = format!("'{param}' must be {}; got {got}.", PromptItem::EXPECTED);
                Err(ApiError::invalid_value(param, message))
            }
        }
    }
}

impl PromptText {
    /// Returns the tokens. `param` names the prompt.
    fn tokens(
        self,
        param: &str,
        adds_special: bool,
        serving: &Serving,
    ) -> Result<Vec<TokenId>, ApiError> {
        match self {
            PromptText::Tokens(tokens) if tokens.len() == 0 => {
                let message = format!("'{param}' must not be an empty array.");
                Err(ApiError::invalid_value(param, message))
            }
            PromptText::Tokens(tokens) => tokens.check(param, &serving.model),
            PromptText::Text(text) => encode(&text, param, adds_special, serving),
        }
    }
}

/// Returns the tokens of a text. `param` names the field that holds it.
///
/// # Errors
/// If the text cannot fit the context, or cannot be encoded.
pub(in crate::api) fn encode(
    text: &str,
    param: &str,
    adds_special: bool,
    serving: &Serving,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(text.len(), serving, param)?;
    let tokens = if adds_special {
        serving.tokenizer.encode_prompt(text)
    } else {
        serving.tokenizer.encode_plain(text)
    };
    tokens.map_err(|error| encoding_error(&error, param))
}

/// Checks the length of a text before it is tokenized, because tokenizing a hopelessly long text
/// would be wasted work.
///
/// # Errors
/// If `bytes` bytes of text cannot fit the context, whatever tokens they become.
pub(in crate::api) fn check_length(
    bytes: usize,
    serving: &Serving,
    param: &str,
) -> Result<(), ApiError> {
    let limit = serving.model.max_model_len;
    let min_tokens = bytes / serving.tokenizer.longest_token();
    if min_tokens <= limit as usize {
        return Ok(());
    }
    let found = too_long(bytes, min_tokens);
    Err(ApiError::context_length(param, limit, &found))
}

fn too_long(bytes: usize, min_tokens: usize) -> String {
    format!(
        "The prompt has {bytes} bytes, which are at least {min_tokens} tokens. Shorten the prompt: \
         the server does not encode a text that is far too long, not even to truncate it."
    )
}

/// Returns the error for a text that cannot be encoded. `param` names the field that holds it.
pub(in crate::api) fn encoding_error(error: &TextError, param: &str) -> ApiError {
    match error {
        TextError::BeyondVocabulary { vocabulary, .. } => {
            let message = format!(
                "'{param}' has text whose token the model does not know: its tokenizer has more \
                 tokens than the model's vocabulary of {vocabulary}. Change the text."
            );
            ApiError::invalid_value(param, message)
        }
        TextError::TooLong {
            bytes,
            min_tokens,
            context,
        } => ApiError::context_length(param, *context, &too_long(*bytes, *min_tokens)),
        TextError::BecomesControl { .. } => {
            ApiError::invalid_value(param, format!("'{param}': {error}."))
        }
        other => ApiError::internal(&other.to_string()),
    }
}
