//! The JSON around the choices of a response, and what each endpoint adds to it.

use serde::Serialize;

use super::app::ModelCard;
use super::choices::{Choices, FinishedChoice, Usage};
use super::generation::Piece;
use super::request_id::{random_id, unix_seconds};

/// How an endpoint writes its choices.
pub(super) trait ChoiceFormat: Send + 'static {
    /// The prefix of the response's id.
    const ID_PREFIX: &'static str;
    /// The `object` of a response in one piece.
    const OBJECT: &'static str;
    /// The `object` of a chunk.
    const CHUNK_OBJECT: &'static str;
    /// Whether the ids of the prompt's tokens stand beside the choices, in a stream in its first
    /// chunk. Otherwise each choice has them, in a stream its first chunk.
    const PROMPT_BESIDE_CHOICES: bool;

    /// Writes the complete choice `index`.
    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> impl Serialize;

    /// Writes the chunk that comes before all text of choice `index`, if the endpoint has one.
    fn opening(&self, index: u32) -> Option<impl Serialize>;

    /// Writes a piece of the text of choice `index`.
    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize;

    /// Writes the end of choice `index`.
    fn end(&self, index: u32, finish_reason: &'static str) -> impl Serialize;
}

/// The fields that are the same in all chunks of a response.
#[derive(Clone)]
pub(super) struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// Creates the envelope of a response in one piece.
    pub(super) fn of_whole<F: ChoiceFormat>(model: &ModelCard) -> Envelope {
        Envelope::new(F::ID_PREFIX, F::OBJECT, model)
    }

    /// Creates the envelope of the chunks of a stream.
    pub(super) fn of_chunks<F: ChoiceFormat>(model: &ModelCard) -> Envelope {
        Envelope::new(F::ID_PREFIX, F::CHUNK_OBJECT, model)
    }

    fn new(id_prefix: &str, object: &'static str, model: &ModelCard) -> Envelope {
        Envelope {
            id: random_id(id_prefix),
            object,
            created: unix_seconds(),
            model: model.name.clone(),
        }
    }

    /// Returns the JSON of a response or of a chunk.
    pub(super) fn json<C: Serialize>(
        &self,
        choices: C,
        usage: UsageField,
        prompt: Option<&[u32]>,
    ) -> String {
        let object = ResponseObject {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
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
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "UsageField::is_omitted")]
    usage: UsageField,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}
