//! The fields that say whether and how long a model reasons.

use std::sync::Arc;

use serde::de::Error;
use serde_json::{Value, json};

use super::json_field::{Integer, JsonField, Scalar, deserialize_fields, must_be};
use crate::api::error::ApiError;
use crate::constraint::{ThinkingBudget, UnspelledTag};
use crate::text::{ReasoningStart, ReasoningTags, TemplateArguments, TemplateValue, Tokenizer};

/// The variable with which templates switch reasoning on and off.
pub(in crate::api) const ENABLE_THINKING: &str = "enable_thinking";

/// The variable with which templates choose among levels of reasoning.
const REASONING_EFFORT: &str = "reasoning_effort";

/// The maximum number of tokens of reasoning. -1 is no limit.
pub(in crate::api) type ThinkingTokens = Integer<-1, { u32::MAX as i64 }>;

/// Returns the limit that a field gives, if it gives one.
pub(in crate::api) fn given_limit(
    field: &'static str,
    tokens: Option<ThinkingTokens>,
) -> Option<(u32, &'static str)> {
    let Integer(tokens) = tokens?;
    Some((u32::try_from(tokens).ok()?, field))
}

/// How much a model reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct Effort(&'static str);

/// The efforts of all APIs, the least first.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

impl Effort {
    /// Sets the template's variables, unless the request has set them itself. A template without
    /// levels does not read them. `none` switches reasoning off.
    pub(in crate::api) fn set(self, arguments: &mut TemplateArguments) {
        if self.0 == EFFORTS[0] {
            let off = TemplateValue::Bool(false);
            arguments.entry(ENABLE_THINKING.to_owned()).or_insert(off);
        }
        let level = TemplateValue::Text(self.0.to_owned());
        arguments
            .entry(REASONING_EFFORT.to_owned())
            .or_insert(level);
    }
}

impl JsonField<'_> for Effort {
    const EXPECTED: &'static str = "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'";

    fn schema() -> Value {
        json!({"enum": EFFORTS})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Effort, E> {
        let known = |text: &str| EFFORTS.into_iter().find(|effort| *effort == text);
        match value {
            Scalar::Text(text) if let Some(effort) = known(text) => Ok(Effort(effort)),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

deserialize_fields!(Effort);

/// What a client wants of the reasoning of an answer.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct ReasoningWish {
    /// Whether the answer has the reasoning.
    pub(in crate::api) is_shown: bool,
    /// After how many tokens the reasoning is ended, and the field that says so.
    pub(in crate::api) budget: Option<(u32, &'static str)>,
}

impl ReasoningWish {
    /// Returns the limit of reasoning that begins at `start`.
    ///
    /// # Errors
    /// If the tokenizer cannot write the end of reasoning.
    pub(in crate::api) fn limit(
        &self,
        start: ReasoningStart,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Option<ThinkingBudget>, ApiError> {
        let Some((tokens, field)) = self.budget else {
            return Ok(None);
        };
        ThinkingBudget::new(tokens, start, tokenizer).map_err(|UnspelledTag| {
            let message = format!(
                "'{field}' cannot be kept: no tokens of the model spell '{}'. Omit the field.",
                ReasoningTags::CLOSE
            );
            ApiError::unsupported(field, message)
        })
    }
}
