//! Splits an answer into its text and its calls, piece by piece.
//!
//! Invariant: the pieces together are the same, however the answer is cut into pieces.
//!
//! Invariant: no part of a call is text. What looks like the beginning of a call and does not go on
//! as one is text.

use super::format::CallFormat;
use super::json_parser::JsonCallParser;
use super::parsed::ParsedText;
use super::tool::ToolUse;
use super::xml_parser::XmlCallParser;

/// Splits one answer.
#[derive(Clone, Debug)]
pub struct CallParser {
    of_family: FamilyParser,
    tag_tokens: Vec<u32>,
}

#[derive(Clone, Debug)]
enum FamilyParser {
    Json(JsonCallParser),
    Xml(XmlCallParser),
}

impl CallParser {
    /// Starts an answer that may call `tools`.
    pub fn new(format: &CallFormat, tools: &ToolUse) -> CallParser {
        CallParser {
            of_family: match format.is_xml() {
                true => FamilyParser::Xml(XmlCallParser::new(format.frame(), tools)),
                false => FamilyParser::Json(JsonCallParser::new(format.frame(), tools)),
            },
            tag_tokens: format.tag_tokens(),
        }
    }

    /// Returns the tokens of the tags around calls.
    pub fn tag_tokens(&self) -> &[u32] {
        &self.tag_tokens
    }

    /// Returns the number of calls that are complete.
    pub fn complete_calls(&self) -> u32 {
        match &self.of_family {
            FamilyParser::Json(parser) => parser.complete_calls(),
            FamilyParser::Xml(parser) => parser.complete_calls(),
        }
    }

    /// Splits the next piece of the answer.
    pub fn push(&mut self, text: &str) -> ParsedText {
        match &mut self.of_family {
            FamilyParser::Json(parser) => parser.push(text),
            FamilyParser::Xml(parser) => parser.push(text),
        }
    }

    /// Ends the answer. Returns the text that was held, because a call might have begun there.
    pub fn finish(&mut self) -> ParsedText {
        match &mut self.of_family {
            FamilyParser::Json(parser) => parser.finish(),
            FamilyParser::Xml(parser) => parser.finish(),
        }
    }
}
