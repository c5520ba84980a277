//! Splits an answer whose calls are JSON.
//!
//! The grammar makes the arguments valid JSON, so the parser only looks for their end.

use super::frame::{CallFrame, PYTHON_TAG};
use super::parsed::{
    Beginning, CallDelta, MAX_HEAD_BYTES, ParsedText, begins_with, give_up_first, take_text,
};
use super::tool::{ToolChoice, ToolUse};

/// Splits one answer.
#[derive(Clone, Debug)]
pub(super) struct JsonCallParser {
    frame: &'static CallFrame,
    names: Vec<String>,
    is_forced: bool,
    place: CallPlace,
    held: String, // What is neither text nor a part of a call yet.
    complete: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallPlace {
    /// In text in which a call may begin. Without tags, that is the beginning of the answer.
    Text,
    /// In text in which no call may begin.
    Plain,
    /// From the beginning of a call to its arguments. `is_next` says that a separator came before.
    Head { is_next: bool },
    Arguments {
        depth: u32,
        in_string: bool,
        is_escaped: bool,
    },
    /// From the end of the arguments to the end of the call.
    Tail,
    /// After a call, inside of the tags.
    After,
}

impl JsonCallParser {
    /// Starts an answer that may call `tools`.
    pub(super) fn new(frame: &'static CallFrame, tools: &ToolUse) -> JsonCallParser {
        JsonCallParser {
            frame,
            names: tools.tools.iter().map(|tool| tool.name.clone()).collect(),
            is_forced: tools.choice != ToolChoice::Auto,
            place: CallPlace::Text,
            held: String::new(),
            complete: 0,
        }
    }

    /// Returns the number of calls that are complete.
    pub(super) fn complete_calls(&self) -> u32 {
        self.complete
    }

    /// Splits the next piece of the answer.
    pub(super) fn push(&mut self, text: &str) -> ParsedText {
        self.held += text;
        let mut parsed = ParsedText::default();
        while self.step(&mut parsed) {}
        parsed
    }

    /// Ends the answer. Returns the text that was held, because a call might have begun there.
    pub(super) fn finish(&mut self) -> ParsedText {
        let held = std::mem::take(&mut self.held);
        let is_rest = matches!(self.place, CallPlace::Tail | CallPlace::After);
        let text = match self.place {
            // An answer that has to be a call has no text, even if it ends before the call.
            _ if self.is_forced => String::new(),
            // The end of a call is cut off, or its closing tag is.
            _ if is_rest && !matches!(self.tail_of(&held), Beginning::No) => String::new(),
            CallPlace::Text if self.complete > 0 && held.trim().is_empty() => String::new(),
            _ => held,
        };
        ParsedText {
            text,
            calls: Vec::new(),
        }
    }

    fn tail_of(&self, held: &str) -> Beginning {
        let (end, close) = (self.frame.end, self.frame.close);
        match self.place {
            CallPlace::Tail => begins_with(held, &["}", end, close]),
            _ => begins_with(held, &[end, close]),
        }
    }

    /// Takes what can be decided from the beginning of the held text. Returns whether more can be.
    fn step(&mut self, parsed: &mut ParsedText) -> bool {
        match self.place {
            CallPlace::Plain => {
                parsed.text.push_str(&std::mem::take(&mut self.held));
                false
            }
            CallPlace::Text if self.frame.open.is_empty() => self.step_untagged(),
            CallPlace::Text => self.step_text(parsed),
            CallPlace::Head { is_next } => self.step_head(is_next, parsed),
            CallPlace::Arguments { .. } => self.step_arguments(parsed),
            CallPlace::Tail => match begins_with(&self.held, &["}"]) {
                Beginning::Whole(bytes) => {
                    self.held.drain(..bytes);
                    self.complete += 1;
                    self.place = CallPlace::After;
                    true
                }
                Beginning::Partial => false,
                Beginning::No => self.give_up(parsed),
            },
            CallPlace::After => self.step_after(parsed),
        }
    }

    /// Looks for the tag that opens a call.
    fn step_text(&mut self, parsed: &mut ParsedText) -> bool {
        let is_found = take_text(&mut self.held, self.frame.open, &mut parsed.text);
        if is_found {
            self.place = CallPlace::Head { is_next: false };
        }
        is_found
    }

    /// Looks whether the answer begins with a call.
    fn step_untagged(&mut self) -> bool {
        let text = self.held.trim_start();
        let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim_start();
        if text.is_empty() || PYTHON_TAG.starts_with(text) {
            return false;
        }
        self.place = match text.starts_with('{') {
            true => CallPlace::Head { is_next: false },
            false => CallPlace::Plain,
        };
        true
    }

    fn step_head(&mut self, is_next: bool, parsed: &mut ParsedText) -> bool {
        let mut may_follow = false;
        for name in &self.names {
            match self.head_of(name, is_next) {
                Beginning::Whole(bytes) => {
                    parsed.calls.push(CallDelta::Begins(name.clone()));
                    self.held.drain(..bytes);
                    self.place = CallPlace::Arguments {
                        depth: 0,
                        in_string: false,
                        is_escaped: false,
                    };
                    return true;
                }
                Beginning::Partial => may_follow = true,
                Beginning::No => {}
            }
        }
        if may_follow && self.held.len() <= MAX_HEAD_BYTES {
            return false;
        }
        self.give_up(parsed)
    }

    /// Matches the beginning of a call of `name`, up to the bracket that opens its arguments.
    fn head_of(&self, name: &str, is_next: bool) -> Beginning {
        let name = format!("\"{name}\"");
        let key = format!("\"{}\"", self.frame.arguments);
        let call = ["{", "\"name\"", ":", &name, ",", &key, ":"];
        let before = match self.frame.open {
            _ if is_next => ["", ""],
            "" if self.held.trim_start().starts_with(PYTHON_TAG) => [PYTHON_TAG, ""],
            open => [open, self.frame.begin],
        };
        let pieces = [before.as_slice(), &call].concat();
        let bytes = match begins_with(&self.held, &pieces) {
            Beginning::Whole(bytes) => bytes,
            other => return other,
        };
        match begins_with(&self.held[bytes..], &["{"]) {
            Beginning::Whole(until) => Beginning::Whole(bytes + until - 1),
            other => other,
        }
    }

    /// What began as a call is none. Its first character is text, and the rest is looked at again.
    fn give_up(&mut self, parsed: &mut ParsedText) -> bool {
        if self.frame.open.is_empty() {
            self.place = CallPlace::Plain;
            return true;
        }
        give_up_first(&mut self.held, &mut parsed.text);
        self.place = CallPlace::Text;
        true
    }

    /// Takes the arguments up to the bracket that closes them.
    fn step_arguments(&mut self, parsed: &mut ParsedText) -> bool {
        let CallPlace::Arguments {
            mut depth,
            mut in_string,
            mut is_escaped,
        } = self.place
        else {
            return false;
        };
        let mut end = None;
        for (index, byte) in self.held.bytes().enumerate() {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if in_string => is_escaped = true,
                b'"' => in_string = !in_string,
                _ if in_string => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' => {
                    depth -= 1;
                    if depth == 0 {
                        end = Some(index + 1);
                        break;
                    }
                }
                _ => {}
            }
        }
        self.place = match end {
            Some(_) => CallPlace::Tail,
            None => CallPlace::Arguments {
                depth,
                in_string,
                is_escaped,
            },
        };
        let bytes = end.unwrap_or(self.held.len());
        let arguments: String = self.held.drain(..bytes).collect();
        if arguments.is_empty() {
            return false;
        }
        match parsed.calls.last_mut() {
            Some(CallDelta::Arguments(last)) => last.push_str(&arguments),
            _ => parsed.calls.push(CallDelta::Arguments(arguments)),
        }
        end.is_some()
    }

    /// Looks for the next call, or for the end of the calls.
    fn step_after(&mut self, parsed: &mut ParsedText) -> bool {
        let separator = self
            .frame
            .separator
            .map(|text| begins_with(&self.held, &[text]));
        if let Some(Beginning::Whole(bytes)) = separator {
            self.held.drain(..bytes);
            self.place = CallPlace::Head { is_next: true };
            return true;
        }
        match begins_with(&self.held, &[self.frame.end, self.frame.close]) {
            Beginning::Whole(_) if self.frame.close.is_empty() => {
                // Calls without tags end with the answer.
                if self.held.trim().is_empty() {
                    return false;
                }
                self.give_up(parsed)
            }
            Beginning::Whole(bytes) => {
                self.held.drain(..bytes);
                self.place = CallPlace::Text;
                true
            }
            Beginning::Partial => false,
            Beginning::No => self.give_up(parsed),
        }
    }
}
