//! Constrains the tokens of an answer: to a JSON schema, a regular expression, a list of choices or
//! a grammar, and its reasoning to a number of tokens (`thinking_budget.rs`).
//!
//! `llguidance` compiles grammars and computes masks: which tokens may come next. It meets what
//! strangers write, so each grammar has a process of its own, a worker (`worker.rs`). Workers are
//! copies of a template that knows the vocabulary (`template.rs`). In the server, a grammar has a
//! thread (`grammar_thread.rs`), which has its worker compute masks while the model computes the
//! logits. The engine reads the masks from atomics (`masks.rs`). Compiled grammars are kept for
//! each tenant (`cache.rs`), and tenants take turns (`turns.rs`).
//!
//! Invariant: a mask depends only on the grammar, the stop tokens of the request and the tokens
//! drawn so far. Each answer has a parser of its own, with caches of its own, so that no budget
//! runs out sooner or later because of another answer.
//!
//! Invariant: an answer may end exactly where its grammar may end.

mod cache;
mod closing;
mod constrained_output;
mod disjoint;
mod error;
mod fair_queue;
mod frames;
mod gbnf;
mod grammar_thread;
mod grammars;
mod masks;
mod references;
mod schema;
mod source;
mod template;
mod thinking_budget;
mod time_limit;
mod turns;
mod vocabulary;
mod window;
mod worker;
#[cfg(feature = "faults")]
mod worker_fault;
mod workers;

use toktrie::TokenId;

pub use constrained_output::{ConstrainedOutput, Grammar};
pub use error::GrammarError;
pub use grammars::{GrammarOptions, GrammarUsage, Grammars};
pub use masks::{Mask, MaskState, TokenMasks};
pub use source::{GrammarSource, SourceError};
pub use template::run as run_template;
pub use thinking_budget::{ThinkingBudget, UnspelledTag};
pub use workers::COMMAND;
