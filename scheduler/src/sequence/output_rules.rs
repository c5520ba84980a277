//! When a request's output ends.
//!
//! Invariant: only this file decides whether a token ends its sequence.

use crate::{FinishReason, TokenId};

/// The bounds of a request's output, in tokens, and the tokens that end it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputRules {
    /// A stop token does not end a shorter output.
    pub min_new_tokens: usize,
    /// The output ends at this length.
    pub max_new_tokens: usize,
    /// Each of these tokens ends the output.
    pub stop_tokens: Vec<TokenId>,
}

impl OutputRules {
    /// Returns whether the token after `token` may be drawn in the same step: `token` equals the
    /// draft token in its place, and it does not end the output. `output_tokens` includes `token`.
    #[inline]
    pub fn accepts_draft(
        &self,
        draft: Option<&TokenId>,
        token: TokenId,
        output_tokens: usize,
    ) -> bool {
        draft == Some(&token) && self.ending(token, output_tokens).is_none()
    }

    /// Returns the tokens that must not be drawn next after `output_tokens` tokens: the stop
    /// tokens while the output is too short.
    pub fn forbidden_tokens(&self, output_tokens: usize) -> &[TokenId] {
        if output_tokens < self.min_new_tokens {
            &self.stop_tokens
        } else {
            &[]
        }
    }

    /// Returns how the output ends with `token`, or `None` if it goes on. `output_tokens` includes
    /// `token`.
    #[inline]
    pub(crate) fn ending(&self, token: TokenId, output_tokens: usize) -> Option<FinishReason> {
        if output_tokens >= self.min_new_tokens && self.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (output_tokens >= self.max_new_tokens).then_some(FinishReason::Length)
    }
}
