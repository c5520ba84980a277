//! The JSON around the choices of a response or a chunk.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::app::ModelCard;
use crate::api::generation::choices::Usage;
use crate::api::generation::prompt_logprobs::PromptLogprobs;
use crate::api::ids::{random_id, unix_seconds};
use crate::api::openapi::{Components, Operation};

/// The fields that are the same in all chunks of a response.
pub(super) struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// Creates the envelope of a new response of `model`.
    pub(in crate::api) fn new(
        id_prefix: &str,
        object: &'static str,
        model: &ModelCard,
    ) -> Envelope {
        Envelope {
            id: random_id(id_prefix),
            object,
            created: unix_seconds(),
            model: model.name.clone(),
        }
    }

    /// Returns the id of the response.
    pub(in crate::api) fn id(&self) -> &str {
        &self.id
    }

    /// Returns a response or a chunk.
    pub(in crate::api) fn object<'a, C>(
        &'a self,
        choices: Vec<C>,
        usage: UsageField,
        prompt: PromptFields<'a>,
    ) -> ResponseObject<'a, C> {
        ResponseObject {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            prompt_token_ids: prompt.tokens,
            prompt_logprobs: prompt.logprobs,
        }
    }
}

/// What a response says about its prompt, beside the choices.
#[derive(Default)]
pub(super) struct PromptFields<'a> {
    pub(in crate::api) tokens: Option<&'a [u32]>,
    pub(in crate::api) logprobs: Option<PromptLogprobs>,
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

/// An answer, or a chunk of a stream.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ResponseObject<'a, C> {
    /// The id of the answer, the same in all chunks.
    id: &'a str,
    /// What the object is.
    object: &'a str,
    /// When the server received the request, in Unix seconds.
    created: u64,
    /// The name of the served model.
    model: &'a str,
    /// The choices. A chunk has one, and the last chunk with `usage` has none.
    choices: Vec<C>,
    /// The token counts. In chunks, they depend on `stream_options`.
    #[serde(skip_serializing_if = "UsageField::is_omitted")]
    #[schema(value_type = Option<Usage>)]
    usage: UsageField,
    /// The tokens of the prompt of a chat, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    /// The log-probabilities of the prompt of a chat, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

/// Describes a completion endpoint, whose answers are called `name`.
pub(super) fn describe<C: ToSchema, K: ToSchema>(
    components: &mut Components,
    summary: &'static str,
    name: &str,
    request: Value,
) -> Operation {
    components.schema::<C>();
    components.schema::<K>();
    let answer = components.schema_as::<ResponseObject<'_, C>>(name);
    let chunk = components.schema_as::<ResponseObject<'_, K>>(&format!("{name}Chunk"));
    Operation::new(summary)
        .reads(request)
        .answers(200, "application/json", answer)
        .streams(chunk)
        .fails(&[504])
}
