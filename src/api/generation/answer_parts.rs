//! Splits the text of an answer into reasoning, text and calls of tools.

use std::ops::Range;

use super::request::AnswerShape;
use crate::engine::TokenId;
use crate::text::{ReasoningSplitter, SplitText};
use crate::tools::{CallDelta, CallParser};

/// The parts of a piece of an answer, in their order.
#[derive(Debug, Default)]
pub(super) struct AnswerParts {
    pub(in crate::api) reasoning: String,
    pub(in crate::api) text: String,
    pub(in crate::api) calls: Vec<CallDelta>,
}

impl AnswerParts {
    pub(in crate::api) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty() && self.calls.is_empty()
    }
}

/// Splits one answer, piece by piece.
#[derive(Default)]
pub(super) struct AnswerSplitter {
    reasoning: Option<ReasoningSplitter>,
    drops_reasoning: bool,
    calls: Option<CallParser>,
}

impl AnswerSplitter {
    /// Starts an answer of this shape.
    pub(in crate::api) fn new(shape: &AnswerShape) -> AnswerSplitter {
        let reasoning = shape.reasoning;
        AnswerSplitter {
            reasoning: reasoning.map(|field| ReasoningSplitter::new(field.tags, field.is_opened)),
            drops_reasoning: reasoning.is_some_and(|field| !field.is_wanted),
            calls: shape.calls.clone(),
        }
    }

    /// Says that the answer has a token. `text` are the characters of its text. Must be called
    /// before they are pushed.
    pub(in crate::api) fn token(&mut self, token: TokenId, text: Range<usize>) {
        if let Some(splitter) = &mut self.reasoning {
            splitter.token(token, text);
        }
    }

    /// Returns the number of characters that are held, because they may be a tag of reasoning.
    pub(super) fn held_chars(&self) -> usize {
        let splitter = self.reasoning.as_ref();
        splitter.map_or(0, ReasoningSplitter::held_chars)
    }

    /// Returns whether the answer has a complete call.
    pub(super) fn has_calls(&self) -> bool {
        let parser = self.calls.as_ref();
        parser.is_some_and(|parser| parser.complete_calls() > 0)
    }

    /// Splits the next piece of text, which may be the last.
    pub(in crate::api) fn push(&mut self, text: &str, is_last: bool) -> AnswerParts {
        let SplitText { reasoning, answer } = self.split(text, is_last);
        let mut parts = AnswerParts {
            reasoning,
            ..AnswerParts::default()
        };
        let Some(parser) = &mut self.calls else {
            parts.text = answer;
            return parts;
        };
        let parsed = parser.push(&answer);
        (parts.text, parts.calls) = (parsed.text, parsed.calls);
        if is_last {
            parts.text += &parser.finish().text;
        }
        parts
    }

    fn split(&mut self, text: &str, is_last: bool) -> SplitText {
        let Some(splitter) = &mut self.reasoning else {
            return SplitText {
                answer: text.to_owned(),
                ..SplitText::default()
            };
        };
        let mut split = splitter.push(text);
        if is_last {
            let rest = splitter.finish();
            split.reasoning += &rest.reasoning;
            split.answer += &rest.answer;
        }
        if self.drops_reasoning {
            split.reasoning.clear();
        }
        split
    }
}
