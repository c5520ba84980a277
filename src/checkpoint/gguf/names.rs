//! The names of tensors and files in GGUF, and the Hugging Face names that they stand for.

use super::metadata::Metadata;
use crate::checkpoint::error::LoadResult;

/// The tensors outside of layers.
const OUTER: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The modules of layers, after `blk.N.` and `model.layers.N.`.
const MODULES: [(&str, &str); 25] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_sub_norm", "self_attn.attn_sub_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_sub_norm", "mlp.ffn_sub_norm"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_q_norm_in", "self_attn.q_proj.norm"),
    ("attn_k_norm_in", "self_attn.k_proj.norm"),
    ("attn_v_norm_in", "self_attn.v_proj.norm"),
    ("attn_output_norm_in", "self_attn.o_proj.norm"),
    ("ffn_gate_norm_in", "mlp.gate_proj.norm"),
    ("ffn_up_norm_in", "mlp.up_proj.norm"),
    ("ffn_down_norm_in", "mlp.down_proj.norm"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

/// The modules of Mixtral's layers whose names differ from other architectures.
const MIXTRAL_MODULES: [(&str, &str); 5] = [
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.w1"),
    ("ffn_up_exps", "block_sparse_moe.experts.w3"),
    ("ffn_gate_up_exps", "block_sparse_moe.experts.gate_up_proj"),
    ("ffn_down_exps", "block_sparse_moe.experts.w2"),
];

/// The modules of Gemma's layers whose names differ from other architectures.
const GEMMA_MODULES: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The modules of Qwen 3.5's layers that other architectures lack or call otherwise.
const QWEN3_5_MODULES: [(&str, &str); 8] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

/// The tensors of layers whose names have other parts than those of a module.
const WHOLE_NAMES: [(&str, &str); 2] = [
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
];

/// The tensors of a module. The names of low-rank corrections come from WrinkleFree's fork of
/// llama.cpp, whose documentation writes them in capitals.
const PARTS: [(&str, &str); 7] = [
    ("weight", "weight"),
    ("bias", "bias"),
    ("scale", "weight_scale"),
    ("lrc_u", "lrc_U"),
    ("lrc_v", "lrc_V"),
    ("lrc_U", "lrc_U"),
    ("lrc_V", "lrc_V"),
];

/// What Maple calls the embedding.
pub(crate) const WORD_EMBEDDINGS: &str = "model.word_embeddings.weight";

/// How the names of the text part of a model with images begin.
pub(crate) const TEXT_PART: &str = "model.language_model.";

/// How the files of a checkpoint name its tensors.
#[derive(Clone, Copy)]
pub(crate) enum FileNames {
    HuggingFace,
    /// As in Hugging Face, for a model without an output head: the prefix `model.` is missing.
    Headless,
    /// As in Hugging Face, for the text part of a model with images: the prefix is
    /// `model.language_model.`.
    TextPart,
    Gguf,
    /// As in GGUF, for Gemma.
    GgufGemma,
    /// As in GGUF, for Qwen 3.5.
    GgufQwen3_5,
    /// As in GGUF, for Mixtral, whose files name the architecture `llama`.
    GgufMixtral,
    /// As in Hugging Face. Only the embedding has another name, as in Maple.
    WordEmbeddings,
}

impl FileNames {
    /// Returns how GGUF files of an architecture name tensors. Those of a `llama` depend on whether
    /// the model has experts.
    pub(crate) fn of_architecture(name: &str, has_experts: bool) -> FileNames {
        match name {
            "llama" if has_experts => FileNames::GgufMixtral,
            "gemma3" => FileNames::GgufGemma,
            "qwen35" => FileNames::GgufQwen3_5,
            _ => FileNames::Gguf,
        }
    }

    /// Returns what the files call the tensor that Hugging Face calls `name`.
    pub(crate) fn of(self, name: &str) -> String {
        match self {
            FileNames::HuggingFace => name.to_owned(),
            FileNames::Headless => name.strip_prefix("model.").unwrap_or(name).to_owned(),
            FileNames::TextPart => match name.strip_prefix("model.") {
                Some(rest) => format!("{TEXT_PART}{rest}"),
                None => name.to_owned(),
            },
            FileNames::WordEmbeddings => match name {
                "model.embed_tokens.weight" => WORD_EMBEDDINGS.to_owned(),
                _ => name.to_owned(),
            },
            FileNames::Gguf
            | FileNames::GgufGemma
            | FileNames::GgufQwen3_5
            | FileNames::GgufMixtral => self.gguf_name(name).unwrap_or_else(|| name.to_owned()),
        }
    }

    /// Returns what Hugging Face calls the tensor `name` of a GGUF file. A name that GGUF does not
    /// have becomes one that no loader takes.
    pub(crate) fn hugging_face_name(self, name: &str) -> String {
        if let Some((_, outer)) = OUTER.iter().find(|(gguf, _)| *gguf == name) {
            return (*outer).to_owned();
        }
        let renamed = || {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            if let Some((_, whole)) = WHOLE_NAMES.iter().find(|(gguf, _)| *gguf == rest) {
                return Some(format!("model.layers.{layer}.{whole}"));
            }
            let (module, part) = rest.rsplit_once('.')?;
            let (_, part) = PARTS.iter().find(|(gguf, _)| *gguf == part)?;
            // Before merged tensors there was one for each expert, such as `ffn_gate.3.weight`.
            if let Some((linear, expert)) = module.split_once('.') {
                expert.parse::<u32>().ok()?;
                let merged = format!("{linear}_exps");
                let (_, merged) = self.modules().find(|(gguf, _)| *gguf == merged)?;
                let (experts, linear) = merged.rsplit_once('.')?;
                return Some(format!(
                    "model.layers.{layer}.{experts}.{expert}.{linear}.{part}"
                ));
            }
            let (_, module) = self.modules().find(|(gguf, _)| *gguf == module)?;
            Some(format!("model.layers.{layer}.{module}.{part}"))
        };
        renamed().unwrap_or_else(|| format!("unknown {name}"))
    }

    fn gguf_name(self, name: &str) -> Option<String> {
        if let Some((gguf, _)) = OUTER.iter().find(|(_, outer)| *outer == name) {
            return Some((*gguf).to_owned());
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        if let Some((whole, _)) = WHOLE_NAMES.iter().find(|(_, hf)| *hf == rest) {
            return Some(format!("blk.{layer}.{whole}"));
        }
        let (module, part) = rest.rsplit_once('.')?;
        // The tensor of an expert is a part of the merged one.
        let parts = module.split('.');
        let merged: Vec<_> = parts.filter(|part| part.parse::<u32>().is_err()).collect();
        let merged = merged.join(".");
        let (module, _) = self.modules().find(|(_, hf)| *hf == merged)?;
        let (part, _) = PARTS.iter().find(|(_, hf)| *hf == part)?;
        Some(format!("blk.{layer}.{module}.{part}"))
    }

    /// Returns the modules of layers, the family's own modules first.
    fn modules(self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let own: &[_] = match self {
            FileNames::GgufGemma => &GEMMA_MODULES,
            FileNames::GgufQwen3_5 => &QWEN3_5_MODULES,
            FileNames::GgufMixtral => &MIXTRAL_MODULES,
            _ => &[],
        };
        own.iter().chain(&MODULES)
    }
}

/// Returns whether the rows of a tensor belong to query or key heads, which are rotated.
pub(crate) fn has_rotated_rows(name: &str) -> bool {
    name.ends_with(".attn_q.weight") || name.ends_with(".attn_k.weight")
}

/// Returns whether a tensor has the matrices of all experts of a layer.
pub(crate) fn holds_experts(name: &str) -> bool {
    name.ends_with("_exps.weight")
}

/// Returns the number of values in a head.
pub(crate) fn head_dim(metadata: &Metadata, architecture: &str) -> LoadResult<usize> {
    let key = format!("{architecture}.attention.key_length");
    if let Some(head_dim) = metadata.size(&key)? {
        return Ok(head_dim);
    }
    let hidden = metadata.require_size(&format!("{architecture}.embedding_length"))?;
    let key = format!("{architecture}.attention.head_count");
    let heads = metadata.require_size(&key)?;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        let problem = format!("must divide the embedding length {hidden}; got {heads}");
        return Err(metadata.error(&key, problem));
    }
    Ok(hidden / heads)
}

/// Returns the names of all parts of a checkpoint, given one of them. Parts are called
/// `NAME-00001-of-00003.gguf`.
pub(crate) fn parts(name: &str) -> Result<Vec<String>, String> {
    let parsed = || {
        let (stem, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let digits = |text: &str| (text.len() == 5).then(|| text.parse::<usize>().ok())?;
        Some((stem, digits(number)?, digits(count)?))
    };
    let Some((stem, number, count)) = parsed() else {
        return Ok(vec![name.to_owned()]);
    };
    if count == 0 {
        return Err("the name says that there are no parts".to_owned());
    }
    if number != 1 {
        let first = format!("{stem}-00001-of-{count:05}.gguf");
        return Err(format!(
            "this is part {number} of {count}; give the first part, {first}"
        ));
    }
    let names = (1..=count).map(|number| format!("{stem}-{number:05}-of-{count:05}.gguf"));
    Ok(names.collect())
}
