//! A compiled grammar with the threads that compute its masks.

use std::fmt;
use std::sync::Arc;

use super::TokenId;
use super::compiled::CompiledGrammar;
use super::mask_thread::{ConstrainedOutput, MaskThreads};

/// A compiled grammar. Any number of answers can follow it. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    compiled: Arc<CompiledGrammar>,
    threads: Arc<MaskThreads>,
}

impl Grammar {
    pub(super) fn new(compiled: CompiledGrammar, threads: Arc<MaskThreads>) -> Grammar {
        let compiled = Arc::new(compiled);
        Grammar { compiled, threads }
    }

    /// Begins an answer of `tenant` that follows the grammar. Each of `stop_tokens` ends it.
    pub fn begin(&self, tenant: u32, stop_tokens: &[TokenId]) -> ConstrainedOutput {
        (self.threads).begin(Arc::clone(&self.compiled), tenant, stop_tokens)
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
        Arc::ptr_eq(&self.compiled, &other.compiled)
    }
}
