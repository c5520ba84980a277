//! Constrains the tokens of an answer: to a JSON schema, a regular expression, a list of choices or
//! a grammar.
//!
//! `llguidance` compiles grammars and computes masks: which tokens may come next. Grammars are
//! compiled on threads of their own (`grammars.rs`), within budgets (`source.rs`), and kept for
//! each tenant (`cache.rs`). Masks are computed on other threads (`mask_thread.rs`) while the model
//! computes the logits. The engine reads them from atomics (`masks.rs`).
//!
//! Invariant: a mask depends only on the grammar, the stop tokens of the request and the tokens
//! drawn so far. Each answer has a parser of its own, with caches of its own, so that no budget
//! runs out sooner or later because of another answer.
//!
//! Invariant: an answer may end exactly where its grammar may end.

mod cache;
mod compiled;
mod fair_queue;
mod gbnf;
mod grammar;
mod grammars;
mod mask_thread;
mod masks;
mod source;
mod vocabulary;
mod window;

use toktrie::TokenId;

pub use grammar::Grammar;
pub use grammars::{GrammarError, Grammars};
pub use mask_thread::ConstrainedOutput;
pub use masks::{Mask, MaskState, TokenMasks};
pub use source::{GrammarSource, SourceError};
