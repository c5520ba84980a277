//! Opens a model: from a path to loaded and tested weights, with their text.
//!
//! 1. [`source`] opens the files at a path, or the embedded demo.
//! 2. [`OpenCheckpoint::read`] reads the configuration, the tokenizer and the chat template.
//! 3. [`OpenCheckpoint::load`] loads the weights, and finds the order of I2_S weights by a trial.
//! 4. [`OpenCheckpoint::load_tested`] also compares the kernels with plain Rust, and the model's
//!    answers with the golden tokens of the checkpoint.
//!
//! The server does all of it. `bench`, `convert` and `inspect` take the steps that they need, so
//! they judge a checkpoint as the server does.

mod golden_tokens;
mod i2s_trial;
mod model_text;
mod self_test;

use std::error::Error;
use std::path::Path;

use sterna_kernels::{Isa, Kernels, KvDtype};

use crate::checkpoint::{I2sOrder, LoadError, ModelConfig, Source};
use crate::demo;
use crate::model::{LoadOptions, Model};

pub(crate) use golden_tokens::{FILE as GOLDEN_FILE, GoldenTokens};
pub(crate) use model_text::ModelText;

/// A checkpoint whose configuration and text are read.
pub(crate) struct OpenCheckpoint {
    pub(crate) source: Source,
    pub(crate) config: ModelConfig,
    pub(crate) text: ModelText,
}

impl OpenCheckpoint {
    /// Reads the configuration and the text of `source`.
    ///
    /// # Errors
    /// If a file is missing or malformed, or asks for something unsupported.
    pub(crate) fn read(source: Source) -> Result<OpenCheckpoint, Box<dyn Error>> {
        let config = ModelConfig::read(&source)?;
        let text = ModelText::read(&source, config.vocab, &config.named_tokens())?;
        Ok(OpenCheckpoint {
            source,
            config,
            text,
        })
    }

    /// Loads the weights, and returns the order of the I2_S weights too. `order` is that order, if
    /// it is known.
    ///
    /// # Errors
    /// If loading fails, or the model predicts no text with any order.
    pub(crate) fn load(
        &self,
        order: Option<I2sOrder>,
        options: LoadOptions,
    ) -> Result<(Model, I2sOrder), String> {
        i2s_trial::load(self, order, options)
    }

    /// Loads the weights and tests the model.
    ///
    /// # Errors
    /// As [`OpenCheckpoint::load`], or if the kernels compute anything else than plain Rust, or the
    /// model says other tokens than the checkpoint recorded.
    pub(crate) fn load_tested(
        &self,
        order: Option<I2sOrder>,
        options: LoadOptions,
    ) -> Result<Model, String> {
        let (mut model, _) = self.load(order, options)?;
        self_test::run(&mut model, self, &options)?;
        Ok(model)
    }
}

/// Opens the checkpoint at `path`; the embedded demo without one.
///
/// # Errors
/// If there is no checkpoint, or its files are malformed.
pub(crate) fn source(path: Option<&Path>) -> Result<Source, LoadError> {
    path.map_or_else(|| Ok(demo::source()), Source::open)
}

/// Returns the kernels of the named instruction set. If `isa` is `None`, it is the machine's best.
///
/// # Errors
/// If there is no such instruction set, or this machine does not have it.
pub(crate) fn kernels(isa: Option<&str>) -> Result<Kernels, String> {
    let known = |name| Isa::named(name).expect("clap accepts only known names");
    let isa = isa.map_or_else(Isa::best, known);
    let missing = || format!("--isa {isa}: this machine does not have this instruction set");
    Kernels::new(isa).ok_or_else(missing)
}

/// Returns the number format of keys and values of this name.
pub(crate) fn kv_dtype(name: &str) -> KvDtype {
    KvDtype::named(name).expect("clap accepts only known names")
}

/// Returns the order of I2_S weights of this name, if one is given.
pub(crate) fn i2s_order(name: Option<&str>) -> Option<I2sOrder> {
    name.map(|name| I2sOrder::named(name).expect("clap accepts only known names"))
}

/// # Errors
/// If the model has no output head, so that it generates no text.
pub(crate) fn refuse_without_head(config: &ModelConfig) -> Result<(), String> {
    if config.has_head {
        return Ok(());
    }
    let (class, pooling) = (config.architecture.headless_class, config.pooling.name());
    Err(format!(
        "the checkpoint has no output head ({class}): it computes embeddings of texts (pooling: \
         {pooling}) and generates none, but this command needs text. Give a checkpoint of {}",
        config.architecture.class
    ))
}
