//! The masks of one answer: written by a grammar's thread, read by the threads that draw tokens.
//!
//! Invariant: the grammar's thread writes only after the token at the last written place was drawn,
//! so nobody reads what it writes. Everything is atomic anyway, and no reader waits.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::TokenId;
use super::window::{LastMask, MAX_FORCED, Window};

const BITS: usize = u32::BITS as usize;

/// The kinds of the mask after the forced tokens.
const ALLOWED: u64 = 0;
const DEAD_END: u64 = 1;
/// No mask will ever come.
const ABANDONED: u64 = 2;

/// Which tokens may come next at one place of an answer, or at several if the grammar forces
/// tokens.
pub struct TokenMasks {
    /// The first place, the number of forced tokens and the kind of the mask after them: 32, 16
    /// and 16 bits.
    header: AtomicU64,
    forced: [AtomicU32; MAX_FORCED],
    allowed: Box<[AtomicU32]>, // A bit for each token.
    failure: OnceLock<String>,
}

/// What is known of the mask at a place.
#[derive(Clone, Copy)]
pub enum MaskState<'a> {
    /// The worker has not computed it yet.
    Pending,
    /// The tokens that may be drawn.
    Ready(Mask<'a>),
    /// No token may be drawn; [`TokenMasks::failure`] says why.
    DeadEnd,
}

/// The tokens that may be drawn at a place.
#[derive(Clone, Copy)]
pub enum Mask<'a> {
    /// This token.
    Only(TokenId),
    /// The tokens whose bit is set.
    Allowed(&'a [AtomicU32]),
}

impl TokenMasks {
    /// Makes room for the masks of a vocabulary, and publishes the first of them.
    pub(super) fn new(vocabulary: usize, first: &Window, stop_tokens: &[TokenId]) -> TokenMasks {
        let masks = TokenMasks {
            header: AtomicU64::new(0),
            forced: [const { AtomicU32::new(0) }; MAX_FORCED],
            allowed: (0..vocabulary.div_ceil(BITS))
                .map(|_| AtomicU32::new(0))
                .collect(),
            failure: OnceLock::new(),
        };
        masks.publish(0, first, stop_tokens);
        masks
    }

    /// Publishes the masks from the place `first` on. A stop token is allowed exactly where the
    /// grammar may end.
    pub(super) fn publish(&self, first: u32, window: &Window, stop_tokens: &[TokenId]) {
        // A forced token that ends the answer before its grammar may end is a dead end.
        let is_stop = |token: &TokenId| stop_tokens.contains(token);
        let forced = window.forced.iter().position(is_stop);
        let count = forced.unwrap_or(window.forced.len());
        for (place, token) in self.forced.iter().zip(&window.forced) {
            place.store(*token, Ordering::Relaxed);
        }
        let kind = match &window.last {
            _ if forced.is_some() => self.fail("the only token that may follow is a stop token"),
            LastMask::Allowed { bits, may_end } => {
                self.allow(bits, *may_end, stop_tokens);
                ALLOWED
            }
            LastMask::DeadEnd(why) => self.fail(why),
        };
        let header = u64::from(first) << 32 | (count as u64) << 16 | kind;
        self.header.store(header, Ordering::Release);
    }

    /// Says that no further mask comes, for this reason.
    pub(super) fn abandon(&self, why: &str) {
        self.fail(why);
        self.header.store(ABANDONED, Ordering::Release);
    }

    fn fail(&self, why: &str) -> u64 {
        // Only the first reason counts.
        let _ = self.failure.set(why.to_owned());
        DEAD_END
    }

    fn allow(&self, bits: &[u32], may_end: bool, stop_tokens: &[TokenId]) {
        for (index, place) in self.allowed.iter().enumerate() {
            place.store(bits.get(index).copied().unwrap_or(0), Ordering::Relaxed);
        }
        for &token in stop_tokens {
            let (index, bit) = (token as usize / BITS, 1 << (token as usize % BITS));
            if may_end {
                self.allowed[index].fetch_or(bit, Ordering::Relaxed);
            } else {
                self.allowed[index].fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }

    /// Returns the mask after `output_tokens` tokens.
    pub fn at(&self, output_tokens: usize) -> MaskState<'_> {
        let header = self.header.load(Ordering::Acquire);
        let (first, count) = ((header >> 32) as usize, (header >> 16 & 0xFFFF) as usize);
        let kind = header & 0xFFFF;
        if kind == ABANDONED {
            return MaskState::DeadEnd;
        }
        assert!(output_tokens >= first, "a drawn token is drawn again");
        let place = output_tokens - first;
        if place < count {
            return MaskState::Ready(Mask::Only(self.forced[place].load(Ordering::Relaxed)));
        }
        match kind {
            _ if place > count => MaskState::Pending,
            ALLOWED => MaskState::Ready(Mask::Allowed(&self.allowed)),
            _ => MaskState::DeadEnd,
        }
    }

    /// Returns the tokens that the grammar forces after `output_tokens` tokens.
    pub fn forced_after(&self, output_tokens: usize) -> impl Iterator<Item = TokenId> + '_ {
        (output_tokens..).map_while(|place| match self.at(place) {
            MaskState::Ready(Mask::Only(token)) => Some(token),
            _ => None,
        })
    }

    /// Returns why the answer cannot go on, if it cannot.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }
}

impl Mask<'_> {
    /// Makes every token that may not be drawn impossible: its logit becomes negative infinity.
    pub fn apply(self, logits: &mut [f32]) {
        match self {
            Mask::Only(token) => {
                let logit = logits[token as usize];
                logits.fill(f32::NEG_INFINITY);
                logits[token as usize] = logit;
            }
            Mask::Allowed(allowed) => {
                for (logits, allowed) in logits.chunks_mut(BITS).zip(allowed) {
                    apply_word(logits, allowed.load(Ordering::Relaxed));
                }
            }
        }
    }
}

fn apply_word(logits: &mut [f32], allowed: u32) {
    match allowed {
        u32::MAX => {}
        0 => logits.fill(f32::NEG_INFINITY),
        _ => {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(forced: &[TokenId], bits: &[u32], may_end: bool) -> Window {
        Window {
            forced: forced.to_vec(),
            last: LastMask::Allowed {
                bits: bits.into(),
                may_end,
            },
        }
    }

    /// Returns the tokens that may be drawn after `output_tokens` tokens.
    fn allowed(masks: &TokenMasks, output_tokens: usize) -> Vec<usize> {
        let MaskState::Ready(mask) = masks.at(output_tokens) else {
            panic!("the mask is ready");
        };
        let mut logits = vec![1.0; 70];
        mask.apply(&mut logits);
        let tokens = logits.iter().enumerate();
        let tokens = tokens.filter(|(_, logit)| **logit == 1.0);
        tokens.map(|(token, _)| token).collect()
    }

    #[test]
    fn a_window_has_forced_tokens_and_a_mask_after_them() {
        let masks = TokenMasks::new(70, &window(&[7, 9], &[0b101, 0, 0b10], false), &[2]);
        assert_eq!(allowed(&masks, 0), [7]);
        assert_eq!(allowed(&masks, 1), [9]);
        assert_eq!(
            allowed(&masks, 2),
            [0, 65],
            "the stop token 2 is not allowed"
        );
        assert!(matches!(masks.at(3), MaskState::Pending));
        assert_eq!(masks.forced_after(1).collect::<Vec<_>>(), [9]);
        masks.publish(3, &window(&[], &[0b1], true), &[2, 69]);
        assert_eq!(allowed(&masks, 3), [0, 2, 69], "the grammar may end");
    }

    #[test]
    fn a_dead_end_says_why() {
        let masks = TokenMasks::new(70, &window(&[7, 2], &[1], false), &[2]);
        assert_eq!(allowed(&masks, 0), [7]);
        assert!(matches!(masks.at(1), MaskState::DeadEnd));
        assert!(masks.failure().unwrap().contains("stop token"));
        let masks = TokenMasks::new(70, &window(&[], &[1], false), &[]);
        masks.abandon("no reason");
        assert!(matches!(masks.at(5), MaskState::DeadEnd));
    }
}
