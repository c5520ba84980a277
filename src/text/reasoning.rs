//! Splits an answer into the model's reasoning, which is between `<think>` and `</think>`, and the
//! text after it.
//!
//! Reasoning comes first in an answer: only white space may stand before `<think>`. A chat template
//! can also open it at the end of the prompt. Reasoning that the model does not close is all of the
//! answer. Tags anywhere else are text, so a model can write about them.
//!
//! White space before the reasoning and line breaks after it belong to the tags. The text begins
//! behind them, because chat templates write earlier answers so.
//!
//! Invariant: the parts of all pieces together are the parts of the whole answer, however it is cut
//! into pieces.

use std::collections::VecDeque;
use std::ops::Range;

use tokenizers::AddedToken;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// How a checkpoint marks reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningTags {
    /// Each tag is a token of its own. The same text in other tokens is no tag.
    Tokens {
        /// `<think>`.
        open: u32,
        /// `</think>`.
        close: u32,
    },
    /// The tags are ordinary text.
    Text,
}

impl ReasoningTags {
    /// The text of the tag that opens reasoning.
    pub const OPEN: &'static str = OPEN;

    /// The text of the tag that closes reasoning.
    pub const CLOSE: &'static str = CLOSE;

    /// Returns the tags of a checkpoint; `None` if neither its added tokens nor its chat template
    /// have them.
    pub(super) fn find<'a>(
        added: impl Iterator<Item = (&'a u32, &'a AddedToken)> + Clone,
        chat_template: Option<&str>,
    ) -> Option<ReasoningTags> {
        let token = |tag| {
            let mut added = added.clone();
            added
                .find(|(_, token)| token.content == tag)
                .map(|(id, _)| *id)
        };
        let template = chat_template.unwrap_or_default();
        match (token(OPEN), token(CLOSE)) {
            (Some(open), Some(close)) => Some(ReasoningTags::Tokens { open, close }),
            _ if [OPEN, CLOSE].iter().any(|tag| template.contains(tag)) => {
                Some(ReasoningTags::Text)
            }
            _ => None,
        }
    }

    /// Returns whether `token` is a tag.
    pub fn contains(self, token: u32) -> bool {
        match self {
            ReasoningTags::Tokens { open, close } => [open, close].contains(&token),
            ReasoningTags::Text => false,
        }
    }
}

/// Where the reasoning of an answer begins, as the end of the prompt says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningStart {
    /// The prompt ends inside of reasoning.
    Opened,
    /// The model may open reasoning.
    Possible,
    /// The prompt has closed the reasoning, or the answer goes on after it.
    Over,
}

impl ReasoningStart {
    /// Returns how a prompt ends at which an answer begins.
    pub(super) fn of(prompt: &str) -> ReasoningStart {
        let prompt = prompt.trim_end();
        if prompt.ends_with(OPEN) {
            ReasoningStart::Opened
        } else if prompt.ends_with(CLOSE) {
            ReasoningStart::Over
        } else {
            ReasoningStart::Possible
        }
    }
}

/// A piece of an answer, split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitText {
    /// The part of the piece that is reasoning, without the tags.
    pub reasoning: String,
    /// The part that is not.
    pub answer: String,
}

/// Splits the text of one answer, piece by piece.
pub struct ReasoningSplitter {
    tags: ReasoningTags,
    is_opened: bool,
    place: Place,
    position: usize, // The characters that were pushed.
    /// The tokens that may be tags, with the characters of their text, if tags are tokens.
    tokens: VecDeque<(u32, Range<usize>)>,
    tag_end: usize, // Where the text of the last tag ends.
    held: String,   // The beginning of a tag, if tags are text.
    space: String,  // The white space at the start, until it is known whether a tag follows.
}

/// Where in the answer the splitter is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before everything except white space.
    Start,
    Reasoning,
    /// Behind the closing tag, before everything except line breaks.
    Closed,
    Answer,
}

impl ReasoningSplitter {
    /// Starts an answer. `is_opened` says that the prompt ends inside of reasoning.
    pub fn new(tags: ReasoningTags, is_opened: bool) -> ReasoningSplitter {
        ReasoningSplitter {
            tags,
            is_opened,
            place: Place::Start,
            position: 0,
            tokens: VecDeque::new(),
            tag_end: 0,
            held: String::new(),
            space: String::new(),
        }
    }

    /// Says that the answer has a token that may be a tag. `text` are the characters of the token's
    /// text, counted from the start of the answer. Must be called before they are pushed.
    pub fn token(&mut self, token: u32, text: Range<usize>) {
        if self.tags.contains(token) {
            self.tokens.push_back((token, text));
        }
    }

    /// Splits the next piece of text.
    pub fn push(&mut self, text: &str) -> SplitText {
        let mut split = SplitText::default();
        match self.tags {
            ReasoningTags::Tokens { .. } => self.push_beside_tokens(text, &mut split),
            ReasoningTags::Text => self.push_with_tags(text, &mut split),
        }
        split
    }

    /// Returns the text that was held, because it might have been the beginning of a tag.
    pub fn finish(&mut self) -> SplitText {
        let mut split = SplitText::default();
        let held = std::mem::take(&mut self.space) + &std::mem::take(&mut self.held);
        self.part(&mut split).push_str(&held);
        split
    }

    /// Returns the number of characters that are held.
    pub fn held_chars(&self) -> usize {
        self.held.chars().count() + self.space.chars().count()
    }

    fn push_beside_tokens(&mut self, text: &str, split: &mut SplitText) {
        for char in text.chars() {
            while let Some((token, text)) = self.tokens.front().cloned()
                && text.start <= self.position
            {
                self.tokens.pop_front();
                if self.is_tag(token, split) {
                    self.tag_end = text.end;
                }
            }
            if self.position >= self.tag_end {
                self.push_char(char, split);
            }
            self.position += 1;
        }
    }

    fn push_char(&mut self, char: char, split: &mut SplitText) {
        match self.place {
            Place::Start if char.is_whitespace() => self.space.push(char),
            Place::Closed if char == '\n' => {}
            _ => {
                self.leave_start(split);
                self.part(split).push(char);
            }
        }
    }

    /// Passes a token that may be a tag. Returns whether it is one at this place.
    fn is_tag(&mut self, token: u32, split: &mut SplitText) -> bool {
        let ReasoningTags::Tokens { open, close } = self.tags else {
            return false;
        };
        let may_close = match self.place {
            Place::Start => self.is_opened,
            Place::Reasoning => true,
            Place::Closed | Place::Answer => false,
        };
        if token == open && self.place == Place::Start {
            self.place = Place::Reasoning;
            self.space.clear();
            return true;
        }
        if token == close && may_close {
            self.leave_start(split);
            self.place = Place::Closed;
            return true;
        }
        false
    }

    fn push_with_tags(&mut self, text: &str, split: &mut SplitText) {
        let mut text = std::mem::take(&mut self.held) + text;
        if self.place == Place::Start {
            let rest = text.split_off(text.len() - text.trim_start().len());
            self.space.push_str(&text);
            text = rest;
            if let Some(rest) = text.strip_prefix(OPEN) {
                self.place = Place::Reasoning;
                self.space.clear();
                text = rest.to_owned();
            } else if OPEN.starts_with(&text) {
                self.held = text;
                return;
            } else {
                self.leave_start(split);
            }
        }
        if self.place == Place::Reasoning {
            let Some((reasoning, answer)) = text.split_once(CLOSE) else {
                let held = text.len() - tag_beginning(&text);
                self.held = text.split_off(held);
                split.reasoning.push_str(&text);
                return;
            };
            split.reasoning.push_str(reasoning);
            text = answer.to_owned();
            self.place = Place::Closed;
        }
        for char in text.chars() {
            self.push_char(char, split);
        }
    }

    /// Goes on after white space at the start or behind the closing tag: what follows is no tag.
    fn leave_start(&mut self, split: &mut SplitText) {
        self.place = match self.place {
            Place::Start if self.is_opened => Place::Reasoning,
            Place::Start | Place::Closed => Place::Answer,
            place => place,
        };
        let space = std::mem::take(&mut self.space);
        self.part(split).push_str(&space);
    }

    /// Returns the part to which text at this place belongs.
    fn part<'s>(&self, split: &'s mut SplitText) -> &'s mut String {
        match self.place {
            Place::Reasoning => &mut split.reasoning,
            Place::Start if self.is_opened => &mut split.reasoning,
            Place::Start | Place::Closed | Place::Answer => &mut split.answer,
        }
    }
}

/// Returns the length of the longest end of `text` that is the beginning of a closing tag.
fn tag_beginning(text: &str) -> usize {
    let mut lengths = (1..CLOSE.len()).rev();
    lengths
        .find(|length| text.ends_with(&CLOSE[..*length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: ReasoningTags = ReasoningTags::Tokens { open: 1, close: 2 };

    /// Splits a text that comes in these pieces, whose tags are text.
    fn split(pieces: &[&str], is_opened: bool) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(ReasoningTags::Text, is_opened);
        let mut whole = (String::new(), String::new());
        for piece in pieces {
            add(&mut whole, splitter.push(piece));
        }
        add(&mut whole, splitter.finish());
        whole
    }

    fn add(whole: &mut (String, String), split: SplitText) {
        whole.0 += &split.reasoning;
        whole.1 += &split.answer;
    }

    /// Splits a text whose tags are tokens. The text of each is released with all before it,
    /// `delay` characters late.
    fn split_tokens(text: &str, is_opened: bool, delay: usize, spelled: bool) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(TOKENS, is_opened);
        let mut whole = (String::new(), String::new());
        let (mut decoded, mut rest) = (Vec::new(), text);
        let mut released = 0;
        while let Some(first) = rest.chars().next() {
            let mut tags = [(1, OPEN), (2, CLOSE)].into_iter();
            let tag = tags.find(|(_, tag)| rest.starts_with(tag));
            let start = decoded.len();
            let length = tag.map_or(first.len_utf8(), |(_, tag)| tag.len());
            if spelled || tag.is_none() {
                decoded.extend(rest[..length].chars());
            }
            if let Some((token, _)) = tag {
                splitter.token(token, start..decoded.len());
            }
            rest = &rest[length..];
            let until = decoded.len().saturating_sub(delay).max(released);
            let piece: String = decoded[released..until].iter().collect();
            released = until;
            add(&mut whole, splitter.push(&piece));
        }
        let piece: String = decoded[released..].iter().collect();
        add(&mut whole, splitter.push(&piece));
        add(&mut whole, splitter.finish());
        whole
    }

    const CASES: [(&str, bool, &str, &str); 18] = [
        ("<think>a b</think>\n\nc", false, "a b", "c"),
        (" \n<think>ä</think>\n", false, "ä", ""),
        ("<think>never closed", false, "never closed", ""),
        ("<think></think>x", false, "", "x"),
        ("plain", false, "", "plain"),
        ("", false, "", ""),
        ("  ", true, "  ", ""),
        ("a</think>b", true, "a", "b"),
        ("</think>b", true, "", "b"),
        ("<think>a</think>b", true, "a", "b"),
        ("never closed", true, "never closed", ""),
        ("x <think>y</think>", false, "", "x <think>y</think>"),
        ("\n x\n\ny", false, "", "\n x\n\ny"),
        ("\n x</think>\n\n y\n\nz", true, "\n x", " y\n\nz"),
        ("\n</think>\ny", true, "\n", "y"),
        ("\n<think>x</think>\n</think>", true, "x", "</think>"),
        ("</think>x", false, "", "</think>x"),
        (
            "<think>a<think></think>b</think><think>",
            false,
            "a<think>",
            "b</think><think>",
        ),
    ];

    #[test]
    fn tags_in_text_split_it_wherever_it_is_cut() {
        for (text, is_opened, reasoning, answer) in CASES {
            let expected = (reasoning.to_owned(), answer.to_owned());
            for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
                let (a, b) = text.split_at(cut);
                assert_eq!(split(&[a, b], is_opened), expected, "{a:?} {b:?}");
            }
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            assert_eq!(split(&chars, is_opened), expected, "{text:?}");
        }
    }

    #[test]
    fn tags_as_tokens_split_the_text_however_late_it_comes() {
        for (text, is_opened, reasoning, answer) in CASES {
            let expected = (reasoning.to_owned(), answer.to_owned());
            for delay in 0..12 {
                let found = split_tokens(text, is_opened, delay, true);
                assert_eq!(found, expected, "{text:?}, {delay} late");
            }
        }
        // A special token has no text if the client skips such tokens.
        for delay in 0..5 {
            let text = "<think>a b</think>\n\nc";
            let expected = ("a b".to_owned(), "c".to_owned());
            assert_eq!(split_tokens(text, false, delay, false), expected);
        }
    }

    #[test]
    fn the_beginning_of_a_tag_at_the_end_is_text() {
        for (text, is_opened, reasoning, answer) in [
            ("<thi", false, "", "<thi"),
            ("<thi", true, "<thi", ""),
            ("<think>a</thin", false, "a</thin", ""),
            ("a</think", true, "a</think", ""),
            ("</thi", true, "</thi", ""),
            ("<think>a<</think>b", false, "a<", "b"),
            ("<think>a</</think>b", false, "a</", "b"),
            ("<thinking>a", false, "", "<thinking>a"),
        ] {
            let expected = (reasoning.to_owned(), answer.to_owned());
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            assert_eq!(split(&chars, is_opened), expected, "{text:?}");
            assert_eq!(split(&[text], is_opened), expected, "{text:?}");
        }
    }

    #[test]
    fn text_of_a_tag_in_other_tokens_is_no_tag() {
        let mut splitter = ReasoningSplitter::new(TOKENS, false);
        let answer = splitter.push("<think>a</think>b").answer;
        assert_eq!(answer, "<think>a</think>b");
    }

    #[test]
    fn the_last_tag_of_a_prompt_says_where_reasoning_begins() {
        for (prompt, start) in [
            ("<|im_start|>assistant\n<think>\n", ReasoningStart::Opened),
            ("assistant\n<think>\n\n</think>\n\n", ReasoningStart::Over),
            ("assistant\n", ReasoningStart::Possible),
        ] {
            assert_eq!(ReasoningStart::of(prompt), start, "{prompt}");
        }
    }
}
