//! The JSON around the choices of a response or a chunk.

use serde::Serialize;

use super::app::ModelCard;
use super::choices::Usage;
use super::request_id::{random_id, unix_seconds};

/// The fields that are the same in all chunks of a response.
#[derive(Serialize)]
pub(super) struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// Creates the envelope of a new response of `model`.
    pub(super) fn new(id_prefix: &str, object: &'static str, model: &ModelCard) -> Envelope {
        Envelope {
            id: random_id(id_prefix),
            object,
            created: unix_seconds(),
            model: model.name.clone(),
        }
    }

    /// Returns the JSON of a response or of a chunk.
    pub(super) fn json(
        &self,
        choices: impl Serialize,
        usage: UsageField,
        prompt: Option<&[u32]>,
    ) -> String {
        let object = ResponseObject {
            envelope: self,
            choices,
            usage,
            prompt_token_ids: prompt,
        };
        serde_json::to_string(&object).expect("all keys are strings and all numbers are finite")
    }
}

/// The `usage` of a response or of a chunk.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum UsageField {
    /// The field is absent.
    Omitted,
    /// The field is `null`.
    Null,
    /// The field has the token counts.
    Counts(Usage),
}

impl UsageField {
    fn is_omitted(&self) -> bool {
        matches!(self, UsageField::Omitted)
    }
}

#[derive(Serialize)]
struct ResponseObject<'a, C> {
    #[serde(flatten)]
    envelope: &'a Envelope,
    choices: C,
    #[serde(skip_serializing_if = "UsageField::is_omitted")]
    usage: UsageField,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}
