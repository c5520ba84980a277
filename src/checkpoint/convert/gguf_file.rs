//! Writes GGUF files.

use std::collections::HashSet;
use std::path::Path;

use super::gguf_plan::{GgufPlan, Planned};
use super::parts::ModelParts;
use super::sink::{Sink, Watch};
use super::{ChatTemplates, POSITION_SECTIONS, position_sections, read_json};
use crate::checkpoint::config::{ModelConfig, gguf_metadata};
use crate::checkpoint::{
    BlockLayout, Folder, GgufTensor, LoadResult, MetadataEntries, MetadataValue, STATED_I2S_ORDER,
    STOP_TOKENS, Source, TOOL_TEMPLATE, gguf_header, gguf_padding, tokenizer_metadata,
};

/// What a file says of the model's text, beside its tokenizer.
pub(super) struct FileText<'a> {
    pub(super) name: Option<String>,
    pub(super) templates: ChatTemplates<'a>,
}

/// Writes the file `out`.
pub(super) fn write(
    (source, config): (&Source, &ModelConfig),
    model: &ModelParts<'_>,
    layout: BlockLayout,
    (out, text): (&Path, &FileText<'_>),
    watch: &Watch,
) -> LoadResult<()> {
    let metadata = metadata(source, config, layout, text)?;
    let plan = GgufPlan::new((source, config), model, layout, &metadata);
    let planned = model.parts.iter().map(|part| plan.part(part));
    let planned: Vec<Planned<'_, '_>> = planned
        .collect::<LoadResult<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    let tensors = Planned::tensors(&planned);
    let entries: Vec<GgufTensor> = tensors.clone().map(Planned::entry).collect();
    watch.progress.inc_length(model.bytes());
    let mut sink = Sink::create(out)?;
    sink.write(&gguf_header(&metadata, &entries))?;
    for (parts, entry) in tensors.zip(&entries) {
        for part in parts {
            part.write(layout, &mut sink, watch)?;
            model.release(part.part);
        }
        sink.write(&vec![0; gguf_padding(entry.bytes)])?;
    }
    sink.finish()
}

fn metadata(
    source: &Source,
    config: &ModelConfig,
    layout: BlockLayout,
    text: &FileText<'_>,
) -> LoadResult<MetadataEntries> {
    let mut entries = gguf_metadata(config)?;
    let mut put = |key: &str, value| entries.push((key.to_owned(), value));
    if let Some(name) = &text.name {
        put("general.name", MetadataValue::Text(name.clone()));
    }
    if config.recurrent.is_some()
        && let Some(mut sections) = position_sections(source)?
    {
        sections.push(0);
        put(POSITION_SECTIONS, MetadataValue::Integers(sections));
    }
    if let BlockLayout::I2s(order) = layout {
        put(
            STATED_I2S_ORDER,
            MetadataValue::Text(order.name().to_owned()),
        );
    }
    let stops = config.eos_tokens.iter().map(|token| *token as i32);
    put(STOP_TOKENS, MetadataValue::Integers(stops.collect()));
    if let Some(template) = text.templates.default {
        let template = MetadataValue::Text(template.to_owned());
        put("tokenizer.chat_template", template);
    }
    if let Some(template) = text.templates.tool_use {
        let names = MetadataValue::Texts(vec!["tool_use".to_owned()]);
        put("tokenizer.chat_templates", names);
        put(TOOL_TEMPLATE, MetadataValue::Text(template.to_owned()));
    }
    let of_tokenizer = match source.gguf() {
        // The arrays hold more than `tokenizer.json`, such as the scores of SentencePiece.
        Some(gguf) if !has_text_files(gguf.folder())? => gguf.metadata().tokenizer_entries()?,
        _ => {
            let [tokenizer, words] = ["tokenizer.json", "tokenizer_config.json"];
            let (tokenizer, words) = (read_json(source, tokenizer)?, read_json(source, words)?);
            tokenizer_metadata(&tokenizer, &words, config.vocab)?
        }
    };
    // The mask token of a model that fills blocks is a fact of the model first.
    let stated: HashSet<String> = entries.iter().map(|(key, _)| key.clone()).collect();
    entries.extend(
        of_tokenizer
            .into_iter()
            .filter(|(key, _)| !stated.contains(key)),
    );
    // Other programs read these keys.
    let [eos, eot] = ["eos", "eot"].map(|role| format!("tokenizer.ggml.{role}_token_id"));
    let mut stops: Vec<u32> = config.eos_tokens.clone();
    for key in [eos, eot] {
        let stated = entries.iter().find(|(other, _)| *other == key);
        match stated.map(|(_, value)| value.clone()) {
            Some(value) => stops.retain(|stop| MetadataValue::Size(*stop) != value),
            None if !stops.is_empty() => {
                entries.push((key, MetadataValue::Size(stops.remove(0))));
            }
            None => {}
        }
    }
    Ok(entries)
}

fn has_text_files(folder: &Folder) -> LoadResult<bool> {
    Ok(folder.has("tokenizer.json")? || folder.has("tokenizer_config.json")?)
}
