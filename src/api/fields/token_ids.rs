//! Token ids that a client sends: in a prompt, as stop tokens and as keys of `logit_bias`.
//!
//! Invariant: an id that leaves this file is in the model's vocabulary.
//!
//! Reading a body needs no model. So the fields keep the ids and the first fault, and `check`
//! compares them with a model.

use serde::de::{IgnoredAny, MapAccess, SeqAccess};
use serde_json::{Value, json};

use super::json_field::{Given, JsonField, deserialize_fields};
use crate::api::app::ModelCard;
use crate::api::error::{ApiError, quoted};
use crate::engine::TokenId;

const MAX_LOGIT_BIASES: usize = 1024;
/// The limit for a bias, in both directions.
const MAX_BIAS: f64 = 100.0;

/// An array of token ids.
#[derive(Debug, Default)]
pub(in crate::api) struct TokenList {
    ids: Vec<TokenId>, // Up to the first fault.
    count: usize,
    fault: Option<String>, // A description of the first item that cannot be a token id.
}

impl TokenList {
    /// Returns the number of items.
    pub(in crate::api) fn len(&self) -> usize {
        self.count
    }

    pub(in crate::api) fn push(&mut self, item: &Given) {
        self.count += 1;
        match item.integer().map(TokenId::try_from) {
            _ if self.fault.is_some() => {}
            Some(Ok(id)) => self.ids.push(id),
            _ => self.fault = Some(item.to_string()),
        }
    }

    /// Adds the rest of an array.
    pub(in crate::api) fn extend<'de, A: SeqAccess<'de>>(
        &mut self,
        items: &mut A,
    ) -> Result<(), A::Error> {
        while let Some(item) = items.next_element::<Given>()? {
            self.push(&item);
        }
        Ok(())
    }

    /// Returns the ids.
    ///
    /// # Errors
    /// If an item of `param` is no token id of the model.
    pub(in crate::api) fn check(
        self,
        param: &str,
        model: &ModelCard,
    ) -> Result<Vec<TokenId>, ApiError> {
        let unknown = self.ids.iter().find(|id| **id >= model.vocabulary);
        match unknown.map(|id| format!("the number {id}")).or(self.fault) {
            None => Ok(self.ids),
            Some(got) => {
                let last = model.vocabulary - 1;
                let message = format!(
                    "'{param}' must contain token ids, integers from 0 to {last}; got {got}."
                );
                Err(ApiError::invalid_value(param, message))
            }
        }
    }
}

impl<'de> JsonField<'de> for TokenList {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        let token = json!({"type": "integer", "minimum": 0, "maximum": TokenId::MAX});
        json!({"type": "array", "items": token})
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<TokenList, A::Error> {
        let mut list = TokenList::default();
        list.extend(&mut items)?;
        Ok(list)
    }
}

/// The biases of `logit_bias`.
#[derive(Debug)]
pub(super) struct LogitBias {
    biases: Vec<(TokenId, f32)>, // Up to the first fault.
    count: usize,
    fault: Option<BiasFault>,
}

/// What is wrong with an entry of `logit_bias`.
#[derive(Debug)]
enum BiasFault {
    /// The key is not a token id as JSON writes one: digits without a leading zero.
    Key(String),
    /// The token has a bias already.
    Duplicate(TokenId),
    /// The value is not a number within the limits. The string describes it.
    Value(TokenId, String),
}

impl LogitBias {
    /// Returns the biases.
    ///
    /// # Errors
    /// If there are too many, or if an entry is no token id of the model with a bias.
    pub(in crate::api) fn check(self, model: &ModelCard) -> Result<Vec<(TokenId, f32)>, ApiError> {
        let last = model.vocabulary - 1;
        let unknown = |key: &str| {
            let key = quoted(key);
            format!("'logit_bias' has the key {key}; its keys must be token ids from 0 to {last}.")
        };
        let message = if self.count > MAX_LOGIT_BIASES {
            let count = self.count;
            format!("'logit_bias' may contain at most {MAX_LOGIT_BIASES} entries; got {count}.")
        } else if let Some((token, _)) = self.biases.iter().find(|(token, _)| *token > last) {
            unknown(&token.to_string())
        } else {
            match self.fault {
                None => return Ok(self.biases),
                Some(BiasFault::Key(key)) => unknown(&key),
                Some(BiasFault::Value(token, _)) if token > last => unknown(&token.to_string()),
                Some(BiasFault::Value(token, got)) => format!(
                    "'logit_bias' must map token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}; \
                     token {token} has {got}."
                ),
                Some(BiasFault::Duplicate(token)) => format!(
                    "'logit_bias' has the key '{token}' more than once. Send each token once."
                ),
            }
        };
        Err(ApiError::invalid_value("logit_bias", message))
    }

    fn push(&mut self, key: &str, value: &Given) -> Result<(), BiasFault> {
        let token = canonical(key).ok_or_else(|| BiasFault::Key(key.to_owned()))?;
        if self.biases.iter().any(|(known, _)| *known == token) {
            return Err(BiasFault::Duplicate(token));
        }
        let bias = match value {
            Given::Number(number) => number.as_f64(),
            _ => None,
        };
        match bias {
            Some(bias) if bias.abs() <= MAX_BIAS => {
                self.biases.push((token, bias as f32));
                Ok(())
            }
            _ => Err(BiasFault::Value(token, value.to_string())),
        }
    }
}

/// Returns the token id that `key` spells. Only one spelling is valid, so that two keys never mean
/// the same token.
fn canonical(key: &str) -> Option<TokenId> {
    let token: TokenId = key.parse().ok()?;
    (token.to_string() == key).then_some(token)
}

impl<'de> JsonField<'de> for LogitBias {
    const EXPECTED: &'static str = "an object";

    fn schema() -> Value {
        json!({
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_LOGIT_BIASES,
        })
    }

    fn object<A: MapAccess<'de>>(mut entries: A) -> Result<LogitBias, A::Error> {
        let mut all = LogitBias {
            biases: Vec::new(),
            count: 0,
            fault: None,
        };
        while all.count < MAX_LOGIT_BIASES
            && all.fault.is_none()
            && let Some((key, value)) = entries.next_entry::<String, Given>()?
        {
            all.count += 1;
            all.fault = all.push(&key, &value).err();
        }
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            all.count += 1;
        }
        Ok(all)
    }
}

deserialize_fields!(TokenList, LogitBias);
