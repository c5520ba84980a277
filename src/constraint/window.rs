//! The next masks of an answer: one for each token that its grammar forces, and one for the token
//! after them.
//!
//! A forced token is the only one that its mask allows, so the parser can go on before it is drawn.

use std::fmt::Display;

use llguidance::Matcher;

use super::TokenId;
use super::time_limit::TimeLimit;

/// The largest number of forced tokens in a window.
pub(super) const MAX_FORCED: usize = 16;

/// The largest part of an error of `llguidance` that a client sees, in characters.
const MAX_ERROR_CHARS: usize = 200;

/// The masks that are known ahead.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// The forced tokens: each is the only token allowed in its place.
    pub(super) forced: Vec<TokenId>,
    /// The mask after the forced tokens.
    pub(super) last: LastMask,
}

/// The mask after the forced tokens.
#[derive(Clone, Debug)]
pub(super) enum LastMask {
    /// The tokens whose bit is set may be drawn. `may_end` says that the grammar may end here; then
    /// the stop tokens of the request may be drawn too.
    Allowed { bits: Box<[u32]>, may_end: bool },
    /// Nothing may be drawn, for this reason.
    DeadEnd(String),
}

impl Window {
    /// Computes the window after `token` was drawn. The parser has then consumed the forced tokens
    /// too.
    pub(super) fn after(token: TokenId, matcher: &mut Matcher, limit: &TimeLimit) -> Window {
        let consume = |matcher: &mut Matcher| matcher.consume_token(token).map_err(plain_error);
        match limit.run(matcher, consume) {
            Ok(()) => Window::next(matcher, limit),
            Err(why) => Window::dead_end(&why),
        }
    }

    /// Returns the window of an answer that cannot go on, for this reason.
    pub(super) fn dead_end(why: &str) -> Window {
        Window {
            forced: Vec::new(),
            last: LastMask::DeadEnd(why.to_owned()),
        }
    }

    /// Computes the next window. The parser has then consumed the forced tokens.
    pub(super) fn next(matcher: &mut Matcher, limit: &TimeLimit) -> Window {
        let mut forced = Vec::new();
        loop {
            let may_force = forced.len() < MAX_FORCED;
            match limit.run(matcher, |matcher| Window::step(matcher, may_force)) {
                Ok(NextMask::Forced(token)) => forced.push(token),
                Ok(NextMask::Last { bits, may_end }) => {
                    let last = LastMask::Allowed { bits, may_end };
                    return Window { forced, last };
                }
                Err(why) => {
                    let last = LastMask::DeadEnd(why);
                    return Window { forced, last };
                }
            }
        }
    }

    fn step(matcher: &mut Matcher, may_force: bool) -> Result<NextMask, String> {
        let mut mask = matcher.compute_mask_or_eos().map_err(plain_error)?;
        let may_end = matcher.is_accepting().map_err(plain_error)?;
        if may_force && !may_end && mask.num_set() == 1 {
            let token = mask.first_bit_set().expect("one bit is set") as TokenId;
            matcher.consume_token(token).map_err(plain_error)?;
            return Ok(NextMask::Forced(token));
        }
        if may_end {
            // The library allows the model's end tokens. A request may have other stop tokens.
            let environment = matcher.tok_env().map_err(plain_error)?;
            mask.sub(&environment.tok_trie().eos_token_set());
        }
        let bits = mask.as_slice().into();
        Ok(NextMask::Last { bits, may_end })
    }
}

enum NextMask {
    Forced(TokenId),
    Last { bits: Box<[u32]>, may_end: bool },
}

/// Returns the message of an error, of bounded length.
pub(super) fn plain_error(error: impl Display) -> String {
    let text = format!("{error:#}");
    let text = text.split("\n<").next().unwrap_or_default();
    let text: Vec<&str> = text.split_whitespace().collect();
    let text = text.join(" ");
    text.chars().take(MAX_ERROR_CHARS).collect()
}
