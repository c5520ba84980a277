//! Splits an answer whose calls are XML, as Qwen 3.5 writes them. The arguments become JSON.

use super::frame::CallFrame;
use super::parsed::{
    Beginning, CallDelta, MAX_HEAD_BYTES, ParsedText, beginning_at_end, begins_with, give_up_first,
    take_text,
};
use super::tool::{ToolChoice, ToolUse};
use super::xml_arguments::{VALUE_END, XmlArguments, XmlValue, escaped};

const PARAMETER: &str = "<parameter=";
const END: &str = "</function>";

/// Splits one answer.
#[derive(Clone, Debug)]
pub(super) struct XmlCallParser {
    frame: &'static CallFrame,
    tools: Vec<(String, XmlArguments)>,
    is_forced: bool,
    place: XmlPlace,
    held: String, // What is neither text nor a part of a call yet.
    complete: u32,
}

#[derive(Clone, Debug, PartialEq)]
enum XmlPlace {
    /// In text in which a call may begin.
    Text,
    /// From the beginning of a call to its first argument.
    Head,
    /// Between the arguments of a tool, so many of which have been written.
    Between { tool: usize, count: u32 },
    /// In a value, before its first character.
    Begun {
        tool: usize,
        count: u32,
        value: XmlValue,
    },
    /// Inside of a value that is a text, or JSON.
    Inside {
        tool: usize,
        count: u32,
        is_text: bool,
    },
    /// After a call, before its closing tag.
    After,
}

impl XmlCallParser {
    /// Starts an answer that may call `tools`.
    pub(super) fn new(frame: &'static CallFrame, tools: &ToolUse) -> XmlCallParser {
        let named = tools.tools.iter();
        let named = named.map(|tool| (tool.name.clone(), XmlArguments::of(tool)));
        XmlCallParser {
            frame,
            tools: named.collect(),
            is_forced: tools.choice != ToolChoice::Auto,
            place: XmlPlace::Text,
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
        let is_call = !matches!(self.place, XmlPlace::Text | XmlPlace::Head);
        let is_rest = self.complete > 0 && held.trim().is_empty();
        ParsedText {
            text: match is_call || is_rest || self.is_forced {
                true => String::new(),
                false => held,
            },
            calls: Vec::new(),
        }
    }

    /// Takes what can be decided from the beginning of the held text. Returns whether more can be.
    fn step(&mut self, parsed: &mut ParsedText) -> bool {
        match self.place.clone() {
            XmlPlace::Text => {
                let is_found = take_text(&mut self.held, self.frame.open, &mut parsed.text);
                if is_found {
                    self.place = XmlPlace::Head;
                }
                is_found
            }
            XmlPlace::Head => self.step_head(parsed),
            XmlPlace::Between { tool, count } => self.step_between((tool, count), parsed),
            XmlPlace::Begun { tool, count, value } => {
                self.step_begun((tool, count), &value, parsed)
            }
            XmlPlace::Inside {
                tool,
                count,
                is_text,
            } => self.step_inside((tool, count), is_text, parsed),
            XmlPlace::After => match begins_with(&self.held, &[self.frame.close]) {
                Beginning::Whole(bytes) => {
                    self.held.drain(..bytes);
                    self.place = XmlPlace::Text;
                    true
                }
                Beginning::Partial => false,
                Beginning::No => self.give_up(parsed),
            },
        }
    }

    fn step_head(&mut self, parsed: &mut ParsedText) -> bool {
        let mut may_follow = false;
        for (tool, (name, _)) in self.tools.iter().enumerate() {
            let function = format!("<function={name}>");
            match begins_with(&self.held, &[self.frame.open, &function]) {
                Beginning::Whole(bytes) => {
                    parsed.calls.push(CallDelta::Begins(name.clone()));
                    self.held.drain(..bytes);
                    self.place = XmlPlace::Between { tool, count: 0 };
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

    /// What began as a call is none. Its first character is text, and the rest is looked at again.
    fn give_up(&mut self, parsed: &mut ParsedText) -> bool {
        give_up_first(&mut self.held, &mut parsed.text);
        self.place = XmlPlace::Text;
        true
    }

    /// Looks for the next argument, or for the end of the arguments.
    fn step_between(&mut self, (tool, count): (usize, u32), parsed: &mut ParsedText) -> bool {
        match begins_with(&self.held, &[END]) {
            Beginning::Whole(bytes) => {
                self.held.drain(..bytes);
                add(parsed, if count == 0 { "{}" } else { "}" });
                self.complete += 1;
                self.place = XmlPlace::After;
                return true;
            }
            Beginning::Partial => return false,
            Beginning::No => {}
        }
        let Beginning::Whole(bytes) = begins_with(&self.held, &[PARAMETER]) else {
            return false;
        };
        let Some(length) = self.held[bytes..].find('>') else {
            return false;
        };
        let name = self.held[bytes..bytes + length].to_owned();
        self.held.drain(..bytes + length + 1);
        add(parsed, if count == 0 { "{" } else { ", " });
        add(parsed, &format!("\"{}\": ", escaped(&name)));
        let value = self.tools[tool].1.value_of(&name);
        let count = count + 1;
        self.place = XmlPlace::Begun { tool, count, value };
        true
    }

    /// Decides how a value is written.
    fn step_begun(
        &mut self,
        (tool, count): (usize, u32),
        value: &XmlValue,
        parsed: &mut ParsedText,
    ) -> bool {
        let whole = self.held.find(VALUE_END).map(|end| {
            let value = &self.held[..end];
            value.strip_prefix('\n').unwrap_or(value).to_owned()
        });
        let is_nullable = match value {
            XmlValue::Text { is_nullable } | XmlValue::Choice { is_nullable, .. } => *is_nullable,
            XmlValue::Json(_) => false,
            // The whole value says what it is.
            XmlValue::Any => {
                let Some(whole) = whole else { return false };
                let is_json = serde_json::from_str::<serde_json::Value>(&whole).is_ok();
                self.begin(tool, count, !is_json, parsed);
                return true;
            }
        };
        let may_be_null = is_nullable && {
            let begun = self.held.strip_prefix('\n').unwrap_or(&self.held);
            "null".starts_with(begun) || begun.starts_with("null")
        };
        let is_text = match (value, whole) {
            (XmlValue::Json(_), _) => false,
            (_, Some(whole)) => !(is_nullable && whole == "null"),
            (_, None) if may_be_null && self.held.len() <= "\nnull".len() + VALUE_END.len() => {
                return false;
            }
            (_, None) => true,
        };
        // The line break before the value, or the end of an empty one, has to be there.
        if self.held.is_empty()
            || (self.held.len() < VALUE_END.len() && VALUE_END.starts_with(&self.held))
        {
            return false;
        }
        self.begin(tool, count, is_text, parsed);
        true
    }

    fn begin(&mut self, tool: usize, count: u32, is_text: bool, parsed: &mut ParsedText) {
        if !self.held.starts_with(VALUE_END) && self.held.starts_with('\n') {
            self.held.remove(0);
        }
        if is_text {
            add(parsed, "\"");
        }
        self.place = XmlPlace::Inside {
            tool,
            count,
            is_text,
        };
    }

    /// Takes a value up to its end.
    fn step_inside(
        &mut self,
        (tool, count): (usize, u32),
        is_text: bool,
        parsed: &mut ParsedText,
    ) -> bool {
        let end = self.held.find(VALUE_END);
        let until = end.unwrap_or(self.held.len() - beginning_at_end(&self.held, VALUE_END));
        let part: String = self.held.drain(..until).collect();
        let part = if is_text { escaped(&part) } else { part };
        if !part.is_empty() {
            add(parsed, &part);
        }
        if end.is_some() {
            self.held.drain(..VALUE_END.len());
            add(parsed, if is_text { "\"" } else { "" });
            self.place = XmlPlace::Between { tool, count };
        }
        end.is_some()
    }
}

/// Adds a part of the arguments of the last call.
fn add(parsed: &mut ParsedText, part: &str) {
    match parsed.calls.last_mut() {
        Some(CallDelta::Arguments(last)) => last.push_str(part),
        _ if part.is_empty() => {}
        _ => parsed.calls.push(CallDelta::Arguments(part.to_owned())),
    }
}
