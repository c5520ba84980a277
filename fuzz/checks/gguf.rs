//! Loads a model and its tokenizer from a GGUF file. The data is the file.

use sterna::checkpoint::{ModelConfig, Source};
use sterna::model::{LoadOptions, Model};
use sterna::text::TextFiles;
use sterna_kernels::{Isa, Kernels};

/// Checks that a GGUF file loads or is refused.
pub fn check(data: &[u8]) {
    let files = [("model.gguf".to_owned(), data.to_vec())];
    let Ok(source) = Source::in_memory(files).with_gguf("model.gguf") else {
        return;
    };
    let Ok(config) = ModelConfig::read(&source) else {
        return;
    };
    let vocabulary = u32::try_from(config.vocab).expect("the configuration bounds it");
    let read = |name| source.read(name).ok().flatten();
    if let (Some(tokenizer), Some(config)) = (read("tokenizer.json"), read("tokenizer_config.json"))
    {
        let files = TextFiles {
            tokenizer: &tokenizer,
            config: Some(&config),
            chat_template: None,
            tool_template: None,
        };
        drop(files.load(vocabulary).map(drop));
    }
    let kernels = Kernels::new(Isa::best()).expect("the best instruction set is available");
    drop(Model::load(&source, LoadOptions::new(kernels, 1)).map(drop));
}
