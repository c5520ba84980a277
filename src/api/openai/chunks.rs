//! The chunks of a stream of `/v1/completions` and `/v1/chat/completions`.
//!
//! Invariant: every stream ends with `data: [DONE]`, even after an error.

use super::endpoint::Endpoint;
use super::envelope::{Envelope, PromptFields, UsageField};
use crate::api::error::ApiError;
use crate::api::generation::choice::ChoiceOutput;
use crate::api::generation::choices::Choices;
use crate::api::generation::request::StreamUsage;
use crate::api::generation::sse::{FrameWriter, Frames};

/// Writes the chunks of one response.
pub(super) struct ChunkWriter<E> {
    pub(in crate::api) envelope: Envelope,
    pub(in crate::api) endpoint: E,
    pub(in crate::api) usage: StreamUsage,
}

impl<E: Endpoint> FrameWriter for ChunkWriter<E> {
    fn begin(&mut self, choices: &Choices, frames: &mut Frames) {
        for index in 0..choices.count() {
            let Some(choice) = self.endpoint.opening(index) else {
                return;
            };
            let has_prompt = E::PROMPT_BESIDE_CHOICES && index == 0;
            let prompt = PromptFields {
                tokens: choices.prompt(index).filter(|_| has_prompt),
                logprobs: None,
            };
            let usage = self.chunk_usage(choices);
            frames.push_data(&self.envelope.json(vec![choice], usage, prompt));
        }
    }

    fn output(&mut self, index: u32, output: ChoiceOutput, choices: &Choices, frames: &mut Frames) {
        let chunks = match output {
            ChoiceOutput::Piece(piece) => self.endpoint.piece(index, piece, choices),
            ChoiceOutput::End(end) => vec![self.endpoint.end(index, end.finish_reason)],
        };
        for choice in chunks {
            let (usage, prompt) = (self.chunk_usage(choices), PromptFields::default());
            frames.push_data(&self.envelope.json(vec![choice], usage, prompt));
        }
        if choices.all_ended() {
            self.end(choices, frames);
        }
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.push_data(&error.body().to_string());
        finish(frames);
    }
}

impl<E: Endpoint> ChunkWriter<E> {
    fn end(&self, choices: &Choices, frames: &mut Frames) {
        if self.usage != StreamUsage::Omitted {
            let (usage, prompt) = (UsageField::Counts(choices.usage()), PromptFields::default());
            let chunk = self
                .envelope
                .json::<E::ChunkChoice>(Vec::new(), usage, prompt);
            frames.push_data(&chunk);
        }
        finish(frames);
    }

    /// Returns the `usage` of a chunk that has a choice.
    fn chunk_usage(&self, choices: &Choices) -> UsageField {
        match self.usage {
            StreamUsage::Omitted => UsageField::Omitted,
            StreamUsage::AtEnd => UsageField::Null,
            StreamUsage::InEveryChunk => UsageField::Counts(choices.usage()),
        }
    }
}

fn finish(frames: &mut Frames) {
    frames.push_data("[DONE]");
    frames.end();
}
