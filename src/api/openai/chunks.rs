//! The chunks of a stream of `/v1/completions` and `/v1/chat/completions`.
//!
//! Invariant: every stream ends with `data: [DONE]`, even after an error.

use serde::Serialize;

use super::envelope::{Envelope, PromptFields, UsageField};
use crate::api::error::ApiError;
use crate::api::generation::choices::Choices;
use crate::api::generation::request::StreamUsage;
use crate::api::generation::writer::Frames;

/// Writes what the chunks of both endpoints have in common.
pub(super) struct Chunks {
    pub(super) envelope: Envelope,
    pub(super) usage: StreamUsage,
}

impl Chunks {
    /// Writes a chunk of one choice.
    pub(super) fn push(&self, choice: impl Serialize, choices: &Choices, frames: &mut Frames) {
        self.push_with(choice, PromptFields::default(), choices, frames);
    }

    /// Writes a chunk of one choice, with what it says about the prompt.
    pub(super) fn push_with(
        &self,
        choice: impl Serialize,
        prompt: PromptFields<'_>,
        choices: &Choices,
        frames: &mut Frames,
    ) {
        let usage = match self.usage {
            StreamUsage::Omitted => UsageField::Omitted,
            StreamUsage::AtEnd => UsageField::Null,
            StreamUsage::InEveryChunk => UsageField::Counts(choices.usage()),
        };
        frames.push(&self.envelope.object(vec![choice], usage, prompt));
    }

    /// Writes the last chunk of a choice. If all choices have ended, writes the end of the stream
    /// too.
    pub(super) fn end(&self, choice: impl Serialize, choices: &Choices, frames: &mut Frames) {
        self.push(choice, choices, frames);
        if !choices.all_ended() {
            return;
        }
        if self.usage != StreamUsage::Omitted {
            let (usage, prompt) = (UsageField::Counts(choices.usage()), PromptFields::default());
            frames.push(&self.envelope.object(Vec::<()>::new(), usage, prompt));
        }
        frames.push_done();
    }

    /// Writes an error and the end of the stream.
    pub(super) fn fail(error: &ApiError, frames: &mut Frames) {
        frames.push(&error.body());
        frames.push_done();
    }
}
