//! The processes of grammars, which run the program under test.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use sterna::constraint::{GrammarOptions, Grammars};
use sterna::text::Tokenizer;

/// The program that runs the processes. A fuzz target does so itself.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| match option_env!("CARGO_BIN_EXE_sterna") {
    Some(program) => program.into(),
    None => std::env::current_exe().expect("the program has a path"),
});

/// The options of a model whose answers `end_tokens` end.
pub(crate) fn options(end_tokens: &[u32]) -> GrammarOptions<'_> {
    GrammarOptions {
        program: &PROGRAM,
        end_tokens,
        masks_at_once: 2,
        compilations_at_once: 16,
    }
}

/// Starts the processes for an engine that is never busy.
pub(crate) fn start(tokenizer: &Arc<Tokenizer>, end_tokens: &[u32]) -> Grammars {
    let options = options(end_tokens);
    Grammars::start(Arc::clone(tokenizer), &options, || false, |_, _| ())
}
