//! A limit on the tokens of an answer's reasoning.
//!
//! After so many tokens of reasoning, the tokens of the closing tag are the only ones that may be
//! drawn. If a character is incomplete by then, its other tokens come first. This depends on
//! nothing but the tokens before, so that it is the same in any company, and with draft tokens as
//! without.

use std::fmt;
use std::sync::Arc;

use super::TokenId;
use crate::text::{ReasoningStart, ReasoningTags, Tokenizer};

/// The tag comes this many tokens later at most, so that it does not cut a character. A character
/// has at most four bytes, and a grammar of the answer lets none be cut.
const MAX_LATER: usize = 3;

/// No tokens of the model spell the closing tag, so that nothing could end its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnspelledTag;

/// A limit on the tokens of an answer's reasoning.
#[derive(Clone)]
pub struct ThinkingBudget {
    tokens: usize,
    start: ReasoningStart,
    tags: ReasoningTags,
    closing: Arc<[TokenId]>, // The tokens of the closing tag.
    tokenizer: Arc<Tokenizer>,
}

impl ThinkingBudget {
    /// Returns a limit of `tokens`, for an answer whose reasoning begins at `start`. Returns `None`
    /// if the answer has no reasoning.
    ///
    /// # Errors
    /// If no tokens spell the closing tag.
    pub fn new(
        tokens: u32,
        start: ReasoningStart,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Option<ThinkingBudget>, UnspelledTag> {
        let (Some(tags), false) = (tokenizer.reasoning_tags(), start == ReasoningStart::Over)
        else {
            return Ok(None);
        };
        let closing = match tags {
            ReasoningTags::Tokens { close, .. } => vec![close],
            ReasoningTags::Text => tokenizer.spell(ReasoningTags::CLOSE).ok_or(UnspelledTag)?,
        };
        Ok(Some(ThinkingBudget {
            tokens: tokens as usize,
            start,
            tags,
            closing: closing.into(),
            tokenizer: Arc::clone(tokenizer),
        }))
    }

    /// Returns the only token that may follow the first tokens of an answer; `None` if the budget
    /// leaves the choice.
    pub fn forced(&self, answer: &[TokenId]) -> Option<TokenId> {
        if answer.len() < self.tokens {
            return None; // Most calls end here.
        }
        let reasoning = &answer[self.opened(answer)?..];
        let end = (self.tokens..=self.tokens + MAX_LATER)
            .find(|end| *end == self.tokens + MAX_LATER || !self.cuts_character(reasoning, *end))?;
        let place = reasoning.len().checked_sub(end)?;
        let closing = self.closing.get(place)?;
        (!self.is_closed(&reasoning[..end])).then_some(*closing)
    }

    /// Returns whether the first `count` tokens of the reasoning end in the middle of a character.
    fn cuts_character(&self, reasoning: &[TokenId], count: usize) -> bool {
        let Some(reasoning) = reasoning.get(..count) else {
            return false; // The answer is not as long yet.
        };
        let bytes = reasoning.iter().rev().flat_map(|token| {
            let bytes = self.tokenizer.token_bytes(*token);
            bytes.iter().rev()
        });
        // The last byte that begins a character says how many bytes the character has.
        let mut bytes = bytes.take(4).zip(1..);
        let first = bytes.find(|(byte, _)| **byte & 0b1100_0000 != 0b1000_0000);
        first.is_some_and(|(byte, found)| byte.leading_ones().min(4) > found)
    }

    /// Returns the number of tokens before the reasoning; `None` if the answer has none.
    fn opened(&self, answer: &[TokenId]) -> Option<usize> {
        if self.start == ReasoningStart::Opened {
            return Some(0);
        }
        match self.tags {
            ReasoningTags::Tokens { open, .. } => {
                let is_space = |token: &TokenId| {
                    let bytes = self.tokenizer.token_bytes(*token);
                    std::str::from_utf8(bytes).is_ok_and(|text| text.trim().is_empty())
                };
                let first = answer.iter().position(|token| !is_space(token))?;
                (answer[first] == open).then_some(first + 1)
            }
            ReasoningTags::Text => {
                let mut bytes = Vec::new();
                for (place, token) in answer.iter().enumerate() {
                    bytes.extend_from_slice(self.tokenizer.token_bytes(*token));
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    match text.trim_start() {
                        "" => bytes.clear(),
                        begun if begun.starts_with(ReasoningTags::OPEN) => return Some(place + 1),
                        begun if !ReasoningTags::OPEN.starts_with(begun) => return None,
                        _ => {}
                    }
                }
                None
            }
        }
    }

    /// Returns whether the model has closed its reasoning itself.
    fn is_closed(&self, reasoning: &[TokenId]) -> bool {
        match self.tags {
            ReasoningTags::Tokens { close, .. } => reasoning.contains(&close),
            ReasoningTags::Text => {
                let bytes = reasoning.iter();
                let bytes = bytes.flat_map(|token| self.tokenizer.token_bytes(*token));
                let bytes: Vec<u8> = bytes.copied().collect();
                String::from_utf8_lossy(&bytes).contains(ReasoningTags::CLOSE)
            }
        }
    }
}

impl fmt::Debug for ThinkingBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThinkingBudget({})", self.tokens)
    }
}

impl PartialEq for ThinkingBudget {
    fn eq(&self, other: &ThinkingBudget) -> bool {
        let own = (self.tokens, self.start, self.tags);
        own == (other.tokens, other.start, other.tags)
            && Arc::ptr_eq(&self.tokenizer, &other.tokenizer)
    }
}

#[cfg(test)]
impl ThinkingBudget {
    /// Returns a limit for a model whose last two tokens are the tags of reasoning.
    pub(crate) fn of_last_tokens(tokens: u32, is_opened: bool, vocabulary: u32) -> ThinkingBudget {
        let json = crate::text::test_tokenizer::byte_level_json(&[]);
        let mut json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let words = json["model"]["vocab"].as_object_mut().unwrap();
        words.retain(|_, id| id.as_u64().unwrap() < u64::from(vocabulary) - 2);
        for (token, content) in [(0, "<think>"), (1, "</think>")] {
            let added = &mut json["added_tokens"][token];
            added["id"] = (vocabulary as usize - 2 + token).into();
            added["content"] = content.into();
        }
        let json = json.to_string();
        let files = crate::text::TextFiles {
            tokenizer: json.as_bytes(),
            config: None,
            chat_template: None,
            tool_template: None,
        };
        let tokenizer = Arc::new(files.load(vocabulary).unwrap().0);
        let start = match is_opened {
            true => ReasoningStart::Opened,
            false => ReasoningStart::Possible,
        };
        let budget = ThinkingBudget::new(tokens, start, &tokenizer).unwrap();
        budget.expect("the model reasons")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::TextFiles;
    use crate::text::test_tokenizer::byte_level_json;

    const OPEN: TokenId = 258;
    const CLOSE: TokenId = 259;

    /// Returns a tokenizer of bytes. `has_tokens` says whether the tags are tokens of their own.
    fn tokenizer(has_tokens: bool) -> Arc<Tokenizer> {
        let mut json: serde_json::Value = serde_json::from_slice(&byte_level_json(&[])).unwrap();
        if has_tokens {
            let added = json["added_tokens"].as_array_mut().unwrap();
            for (id, content) in [(OPEN, "<think>"), (CLOSE, "</think>")] {
                let mut token = added[0].clone();
                token["id"] = id.into();
                token["content"] = content.into();
                added.push(token);
            }
        }
        let json = json.to_string();
        let files = TextFiles {
            tokenizer: json.as_bytes(),
            config: None,
            chat_template: Some("<think></think>"),
            tool_template: None,
        };
        Arc::new(files.load(260).unwrap().0)
    }

    /// Returns what a model that writes `wanted` writes under a budget, up to the tag.
    fn written(has_tokens: bool, tokens: u32, start: ReasoningStart, wanted: &str) -> String {
        let tokenizer = tokenizer(has_tokens);
        let budget = ThinkingBudget::new(tokens, start, &tokenizer).unwrap();
        let wanted = tokenizer.encode_with_controls(wanted, false).unwrap();
        let mut answer: Vec<TokenId> = Vec::new();
        let mut wanted = wanted.into_iter();
        loop {
            let forced = budget.as_ref().and_then(|budget| budget.forced(&answer));
            let Some(token) = forced.or_else(|| wanted.next()) else {
                return tokenizer.decode(&answer, false);
            };
            answer.push(token);
        }
    }

    #[test]
    fn the_tag_comes_after_exactly_so_many_tokens_of_reasoning() {
        use ReasoningStart::{Opened, Over, Possible};
        for has_tokens in [true, false] {
            let check = |tokens, start, wanted: &str, expected: &str| {
                let found = written(has_tokens, tokens, start, wanted);
                assert_eq!(found, expected, "{tokens} {start:?} {wanted}");
            };
            check(3, Opened, "abcdef", "abc</think>def");
            check(0, Opened, "abc", "</think>abc");
            let closed = "ab</think>cdefghijklmno";
            check(12, Opened, closed, closed);
            check(3, Opened, "ab", "ab");
            check(2, Possible, "<think>abcd", "<think>ab</think>cd");
            check(2, Possible, " \n<think>abcd", " \n<think>ab</think>cd");
            check(2, Possible, "abcdef<think>", "abcdef<think>");
            check(0, Possible, "<think>abc", "<think></think>abc");
            check(2, Over, "<think>abcd", "<think>abcd");
        }
        // A character is not cut.
        for (budget, expected) in [(1, "a"), (2, "aé"), (3, "aé"), (4, "aé€"), (7, "aé€😀")]
        {
            let found = written(true, budget, Opened, "aé€😀bc");
            let expected = format!("{expected}</think>");
            assert!(found.starts_with(&expected), "{budget} {found}");
        }
        // The beginning of a tag is no tag.
        assert_eq!(written(false, 4, Opened, "a</tb"), "a</t</think>b");
    }
}
