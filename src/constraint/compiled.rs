//! A grammar after its compilation, and its first masks.

use std::sync::{Mutex, PoisonError};

use llguidance::Matcher;

use super::window::{LastMask, Window};

/// What the answers that follow a grammar share.
pub(super) struct CompiledGrammar {
    matcher: Mutex<Matcher>, // After the forced tokens of the first window.
    first: Window,
    vocabulary: usize,
}

impl CompiledGrammar {
    /// Computes the first masks of a grammar.
    ///
    /// # Errors
    /// If no answer can follow the grammar, or its parser fails.
    pub(super) fn new(mut matcher: Matcher, vocabulary: usize) -> Result<CompiledGrammar, String> {
        let first = Window::next(&mut matcher);
        if let LastMask::DeadEnd(why) = &first.last {
            return Err(why.clone());
        }
        Ok(CompiledGrammar {
            matcher: Mutex::new(matcher),
            first,
            vocabulary,
        })
    }

    /// Returns the first masks.
    pub(super) fn first(&self) -> &Window {
        &self.first
    }

    /// Returns the number of tokens of the model.
    pub(super) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns a parser after the forced tokens of the first window, with caches of its own.
    pub(super) fn parser(&self) -> Matcher {
        let matcher = self.matcher.lock();
        matcher.unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}
