//! Encodes text so that no control token results.
//!
//! The encoder for users' text does not look for control tokens, but its normalizer and its model
//! can still produce them: a Unigram model with `</s>` in its vocabulary reads `</s>` as one token.
//! The text of such a token is cut in the middle, and both sides are encoded on their own.
//!
//! Invariant: the work is proportional to the length of the text, because the text is cut at most
//! `MAX_CUTS` times before it is encoded character by character.

use tokenizers::{Encoding, NormalizedString, Normalizer};

use super::Tokenizer;
use crate::text::encoder::Encoder;
use crate::text::error::TextError;

const MAX_CUTS: u32 = 4;

impl Tokenizer {
    /// Encodes a part of a text with `encoder`, without control tokens and without a
    /// post-processor's tokens.
    pub(super) fn encode_without_controls(
        &self,
        text: &str,
        encoder: &Encoder,
    ) -> Result<Encoding, TextError> {
        self.check_length(text)?;
        let encoding = encoder.encode_fast(text, false).map_err(encoding_error)?;
        let clean = !encoding
            .get_ids()
            .iter()
            .any(|id| self.controls.contains(*id));
        if clean {
            return Ok(encoding);
        }
        let mut pieces = Vec::new();
        self.encode_in_pieces(text, encoder, MAX_CUTS, &mut pieces)?;
        Ok(Encoding::merge(pieces, false))
    }

    fn encode_in_pieces(
        &self,
        text: &str,
        encoder: &Encoder,
        cuts_left: u32,
        pieces: &mut Vec<Encoding>,
    ) -> Result<(), TextError> {
        let encoding = encoder.encode(text, false).map_err(encoding_error)?;
        let forbidden: Vec<usize> = (0..encoding.len())
            .filter(|index| self.is_forbidden(text, &encoding, *index))
            .collect();
        let Some(&first) = forbidden.first() else {
            pieces.push(encoding);
            return Ok(());
        };
        if text.chars().nth(1).is_none() {
            return Err(TextError::BecomesControl {
                text: text.to_owned(),
                token: encoding.get_tokens()[first].clone(),
            });
        }
        let mut cuts: Vec<usize> = forbidden
            .into_iter()
            .flat_map(|index| cuts_of(text, encoding.get_offsets()[index]))
            .filter(|cut| (1..text.len()).contains(cut))
            .collect();
        if cuts_left == 0 || cuts.is_empty() {
            cuts = text.char_indices().map(|(at, _)| at).collect();
        }
        cuts.sort_unstable();
        cuts.push(text.len());
        let mut start = 0;
        for end in cuts {
            if end > start {
                let piece = &text[start..end];
                self.encode_in_pieces(piece, encoder, cuts_left.saturating_sub(1), pieces)?;
                start = end;
            }
        }
        Ok(())
    }

    /// Returns whether a token of a user's text is a control token. The unknown token is not one
    /// where it stands for text that the model cannot spell.
    fn is_forbidden(&self, text: &str, encoding: &Encoding, index: usize) -> bool {
        let id = encoding.get_ids()[index];
        if Some(id) != self.plain.get_model().unknown_token() {
            return self.controls.contains(id);
        }
        let (start, end) = encoding.get_offsets()[index];
        let mut spelled = NormalizedString::from(text.get(start..end).unwrap_or(text));
        if let Some(normalizer) = self.plain.get_normalizer()
            && normalizer.normalize(&mut spelled).is_err()
        {
            return true;
        }
        self.controls.contains(id) && self.controls.occur_in(spelled.get())
    }
}

fn encoding_error(error: tokenizers::Error) -> TextError {
    TextError::Encoding(error.to_string())
}

/// Returns where to cut the text of a token: in its middle, or around a single character.
fn cuts_of(text: &str, (start, end): (usize, usize)) -> Vec<usize> {
    let inside = text.get(start..end).unwrap_or_default();
    let boundaries: Vec<usize> = inside.char_indices().map(|(at, _)| start + at).collect();
    match boundaries.len() {
        0 => Vec::new(),
        1 => vec![start, end],
        count => vec![boundaries[count / 2]],
    }
}
