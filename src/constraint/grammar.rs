//! A compiled grammar.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;

use super::TokenId;
use super::mask_thread::{ConstrainedOutput, MaskThreads};
use super::window::{LastMask, Window};

/// A compiled grammar. Any number of answers can follow it. Clones share it.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    matcher: Mutex<Matcher>, // After the forced tokens of the first window.
    first: Window,
    vocabulary: usize,
    threads: MaskThreads,
}

impl Grammar {
    /// Computes the first masks of a grammar.
    ///
    /// # Errors
    /// If no answer can follow the grammar, or its parser fails.
    pub(super) fn new(
        mut matcher: Matcher,
        vocabulary: usize,
        threads: MaskThreads,
    ) -> Result<Grammar, String> {
        let first = Window::next(&mut matcher);
        if let LastMask::DeadEnd(why) = &first.last {
            return Err(why.clone());
        }
        Ok(Grammar(Arc::new(Compiled {
            matcher: Mutex::new(matcher),
            first,
            vocabulary,
            threads,
        })))
    }

    /// Begins an answer of `tenant` that follows the grammar. Each of `stop_tokens` ends it.
    pub fn begin(&self, tenant: u32, stop_tokens: &[TokenId]) -> ConstrainedOutput {
        self.0.threads.begin(self.clone(), tenant, stop_tokens)
    }

    /// Returns the first masks.
    pub(super) fn first(&self) -> &Window {
        &self.0.first
    }

    /// Returns the number of tokens of the model.
    pub(super) fn vocabulary(&self) -> usize {
        self.0.vocabulary
    }

    /// Returns a parser after the forced tokens of the first window, with caches of its own.
    pub(super) fn parser(&self) -> Matcher {
        let matcher = self.0.matcher.lock();
        matcher.unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// Returns whether both are the same compiled grammar.
    fn eq(&self, other: &Grammar) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
