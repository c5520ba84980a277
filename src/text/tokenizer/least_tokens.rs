//! How few tokens a text can have. So a text that is far too long is refused before it is encoded,
//! in a time that depends on the context and not on the text.
//!
//! Every token of a text spells a part of it. So a text has at least as many tokens as the fewest
//! pieces of it that are texts of tokens, whatever the merges, the scores or the words of the
//! tokenizer are. Encoding in pieces was the alternative. It needs places where a cut cannot change
//! the tokens, and a text of digits or of one script has none for some tokenizers.
//!
//! Invariant: no encoding of a text has fewer tokens than this module says.

use std::borrow::Cow;

use serde::Serialize;
use tokenizers::{NormalizedString, Normalizer};

use super::automaton::Automaton;
use crate::text::encoder::{self, Encoder};
use crate::text::token_bytes::TokenBytes;

/// This many bytes of a text are read at once.
const CHUNK: usize = 64 << 10;
/// Each chunk may count so many tokens too many: at its beginning, for a token that begins before
/// it and for a space that the normalizer puts there.
const AT_BEGIN: usize = 2;
/// A longer token counts only if the tokenizer makes it of its own text, alone or inside a text. A
/// few long tokens that are never made would make the least number of tokens far too low.
const LONG: usize = 24;

/// What is known of the tokens of any text.
pub(super) struct LeastTokens {
    texts: Automaton,       // Of the tokens.
    stripping: Vec<String>, // Added tokens that take the white space beside them.
    strips_all: bool,       // The normalizer takes the white space beside any added token.
    marks_spaces: bool,     // A space may be `▁` in the text.
}

impl LeastTokens {
    /// Returns `None` if parts of a text become no token, or if a token can stand for any text.
    /// Then nothing is known of the tokens of a text.
    pub(super) fn new(
        encoder: &Encoder,
        tokens: &TokenBytes,
        vocabulary: u32,
    ) -> Option<LeastTokens> {
        if !spells_all(encoder)? {
            return None;
        }
        let is_fallback = |id: u32| {
            let spelled = encoder.id_to_token(id).unwrap_or_default();
            tokens.marks_spaces() && tokens.of(id).len() == 1 && spelled.starts_with("<0x")
        };
        let has_fallback = encoder.get_model().falls_back_to_bytes();
        let is_made = |id: u32| match str::from_utf8(tokens.of(id)) {
            _ if is_fallback(id) => has_fallback,
            Ok(text) if text.len() > LONG => {
                // The tokenizer may put a space before a text, but not inside of it.
                let without_space = text.strip_prefix(' ').unwrap_or(text);
                [text, without_space, &format!("\n{text}")]
                    .into_iter()
                    .filter_map(|text| encoder.encode_fast(text, false).ok())
                    .any(|encoding| encoding.get_ids().contains(&id))
            }
            _ => true,
        };
        let made = (0..vocabulary).filter(|id| is_made(*id));
        let mut texts: Vec<Vec<u8>> = made.map(|id| tokens.of(id).to_vec()).collect();
        let mut stripping = Vec::new();
        for token in encoder::added_tokens(encoder).into_values() {
            // The tokenizer finds it before or after it normalizes the text around it.
            for text in [&normalized(encoder, &token.content)?, &token.content] {
                texts.push(spaced(text, tokens.marks_spaces()).as_bytes().to_vec());
            }
            if token.lstrip || token.rstrip {
                stripping.push(token.content);
            }
        }
        // The tokenizer may have put the space there with which a token begins.
        let spaceless = texts.iter().filter_map(|text| text.strip_prefix(b" "));
        let spaceless: Vec<Vec<u8>> = spaceless.map(<[u8]>::to_vec).collect();
        texts.extend(spaceless);
        texts.retain(|text| !text.is_empty());
        Some(LeastTokens {
            texts: Automaton::new(texts),
            stripping,
            strips_all: file(encoder.get_normalizer())?.contains("Strip"),
            marks_spaces: tokens.marks_spaces(),
        })
    }

    /// Returns a number of tokens that `text` has at least. Stops as soon as this is over `limit`.
    pub(super) fn of(&self, text: &str, encoder: &Encoder, limit: usize) -> usize {
        let strips = self.strips_all || self.stripping.iter().any(|token| text.contains(token));
        let (mut rest, mut count) = (text, 0);
        while !rest.is_empty() && count <= limit {
            let (chunk, after) = rest.split_at(rest.floor_char_boundary(CHUNK));
            rest = after;
            let most = limit - count + AT_BEGIN;
            let of_chunk = normalized(encoder, chunk)
                .map_or(0, |chunk| self.of_normalized(&chunk, strips, most));
            count += of_chunk.saturating_sub(AT_BEGIN);
        }
        count
    }

    /// Counts the white space of `text` as no token if the tokenizer `strips` it.
    fn of_normalized(&self, text: &str, strips: bool, limit: usize) -> usize {
        let text = spaced(text, self.marks_spaces);
        // How far a token reaches that begins at each place. Of the tokens with the same end, the
        // longest one is enough.
        let mut reaches = vec![0; text.len()];
        for (end, longest) in (1..).zip(self.texts.longest_ends(text.as_bytes())) {
            if longest > 0 {
                reaches[end - longest] = end;
            }
        }
        let is_space = |at: usize| {
            let mut chars = text[text.floor_char_boundary(at)..].chars();
            chars.next().is_some_and(char::is_whitespace)
        };
        // `count` tokens reach `end` at most, and one more reaches `next`.
        let (mut count, mut end, mut next) = (0, 0, 0);
        for (at, reach) in reaches.into_iter().enumerate() {
            next = next.max(reach);
            if at < end {
                continue;
            }
            if next <= at || (strips && is_space(at)) {
                end = at + 1;
                next = next.max(end);
                continue;
            }
            count += 1;
            end = next;
            if count > limit {
                break;
            }
        }
        count
    }
}

/// Returns whether the tokens of any text spell all of it, and each token only its own text.
fn spells_all(encoder: &Encoder) -> Option<bool> {
    let (normalizer, splitter) = (
        file(encoder.get_normalizer())?,
        file(encoder.get_pre_tokenizer())?,
    );
    let removing = ["Removed", "Whitespace", "Bert", "CharDelimiterSplit"];
    let removes = removing.iter().any(|kind| splitter.contains(kind));
    // The normalizer `ByteLevel` writes a text in the alphabet of the vocabulary.
    Some(encoder.get_model().spells_text() && !removes && !normalizer.contains("ByteLevel"))
}

/// Returns a part of a tokenizer as `tokenizer.json` has it.
fn file<T: Serialize>(part: Option<&T>) -> Option<String> {
    serde_json::to_string(&part).ok()
}

fn normalized(encoder: &Encoder, text: &str) -> Option<String> {
    let mut normalized = NormalizedString::from(text);
    if let Some(normalizer) = encoder.get_normalizer() {
        normalizer.normalize(&mut normalized).ok()?;
    }
    Some(normalized.get().to_owned())
}

/// Returns `text` with spaces where it has `▁`, if this character stands for a space.
fn spaced(text: &str, marks_spaces: bool) -> Cow<'_, str> {
    match marks_spaces && text.contains('▁') {
        true => Cow::Owned(text.replace('▁', " ")),
        false => Cow::Borrowed(text),
    }
}
