//! Loads the model and starts its engine, as the flags say.

use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sterna_kernels::Kernels;
use sterna_scheduler::{OwnDrafts, PAGE_TOKENS, StateLimits};
use tokio::sync::oneshot;

use super::model_path::FoundModel;
use super::{decoding, tenants};
use crate::api::{DiffusionCard, EmbeddingShape, ModelCard, SamplingDefaults, Serving};
use crate::checkpoint::{ModelConfig, Source};
use crate::config::{Decoding, ServeConfig};
use crate::constraint::{GrammarOptions, Grammars};
use crate::engine::{
    Budget, Engine, EngineConfig, EngineHandle, Limits, Policy, TenantId, Unmasking,
};
use crate::metrics::{Identity, Metrics};
use crate::model::{LoadOptions, Model};
use crate::opening::{self, ModelText, OpenCheckpoint, i2s_order, kv_dtype};
use crate::tenants::PublicText;
use crate::text::Tokenizer;
use crate::tools::ToolFormat;

/// How many grammars are compiled at a time, each of another tenant.
const MAX_COMPILATIONS: usize = 16;
/// The largest number of drafts in a row of a model with recurrent layers. The slab of a sequence
/// grows with it.
const MAX_RECURRENT_DRAFTS: u32 = 3;
/// A recurrent state is kept each time that a sequence has passed so many tokens. In the shapes of
/// Bonsai 2, a state takes as much memory as the keys and values of about 1,700 tokens.
const STATE_INTERVAL: u32 = 2048;
/// A step that takes longer, and ten times as long as predicted, means that something is broken.
const STALL_LIMIT: Duration = Duration::from_secs(5);

/// The parts of a loaded server, or the reason why it cannot be loaded.
pub(super) type Loaded = Result<(Serving, Engine), String>;

/// Loads on a separate thread, so that a signal does not have to wait for it.
pub(super) fn load(
    config: &ServeConfig,
    kernels: Kernels,
    public: Vec<PublicText>,
) -> io::Result<oneshot::Receiver<Loaded>> {
    let (sender, loaded) = oneshot::channel();
    let config = config.clone();
    thread::Builder::new()
        .name("sterna-load".into())
        .spawn(move || {
            let result = start_engine(&config, kernels, &public).map_err(|error| error.to_string());
            // After a signal there is no receiver.
            drop(sender.send(result));
        })?;
    Ok(loaded)
}

/// Loads the model and starts its engine.
fn start_engine(
    config: &ServeConfig,
    kernels: Kernels,
    public: &[PublicText],
) -> Result<(Serving, Engine), Box<dyn Error>> {
    let found = FoundModel::find(&config.model)?;
    let checkpoint = OpenCheckpoint::read(opening::source(found.path.as_deref())?)?;
    let shape = &checkpoint.config;
    if shape.has_head && shape.eos_tokens.is_empty() {
        tracing::warn!(
            "the checkpoint names no stop token, so answers end only at their maximum length; \
             name one in generation_config.json (eos_token_id)"
        );
    }
    let defaults = sampling_defaults(config, &checkpoint.source)?;
    let limits = limits(config, shape)?;
    let own_drafts = decoding::own_drafts(config, shape)?;
    let pin = config.machine.pin_threads();
    let options = load_options(config, kernels, &limits);
    let order = i2s_order(config.model.i2s_order.as_deref());
    let model = checkpoint.load_tested(order, options)?;
    let (dtype, page) = (model.kv_dtype(), model.kv_bytes_per_page());
    let (limits, state_bytes) = with_memory(limits, config, &model)?;
    let pages = limits.pages;
    let card = model_card(config, found.name, shape, &limits)?;
    let metrics = Metrics::new(&Identity {
        model_name: card.name.clone(),
        isa: kernels.isa().to_string(),
        kv_dtype: dtype.to_string(),
        kv_pages: pages,
        page_tokens: PAGE_TOKENS as u32,
    });
    let ModelText {
        tokenizer,
        template: chat_template,
    } = checkpoint.text;
    let template = chat_template.as_ref();
    let public_prefixes = tenants::public_prefixes(public, template, &tokenizer, &limits)?;
    let engine_config = EngineConfig {
        submit_queue: limits.max_queued as usize,
        limits,
        policy: policy(config, own_drafts),
        public_prefixes,
        cost: None,
        drain_limit: Duration::from_secs(config.operation.drain_seconds),
        stall_limit: STALL_LIMIT,
        pin,
    };
    let bytes = pages as usize * page;
    tracing::info!(%dtype, pages, bytes, "allocating memory for keys and values");
    if let Some(StateLimits { slabs, .. }) = engine_config.limits.states {
        tracing::info!(slabs, state_bytes, "allocating memory for states");
    }
    let started = Engine::start(model, engine_config, metrics.clone());
    let (engine, running) = started.map_err(|error| {
        format!(
            "cannot start the engine: {error}. Keys and values take {bytes} bytes, and states take \
             {state_bytes}; give a smaller --kv-memory or --state-memory if this is too much"
        )
    })?;
    let tokenizer = Arc::new(tokenizer.with_context(card.max_model_len));
    let serving = Serving {
        tool_format: ToolFormat::find(chat_template.as_ref(), &tokenizer),
        grammars: start_grammars(config, &tokenizer, &card, &engine)?,
        model: card,
        tokenizer,
        chat_template,
        defaults,
        engine,
        metrics,
    };
    Ok((serving, running))
}

/// Returns the limits with the pages, and with the slabs of states if the model has recurrent
/// layers. Also returns the bytes of these slabs.
fn with_memory(
    limits: Limits,
    config: &ServeConfig,
    model: &Model,
) -> Result<(Limits, u64), String> {
    let in_place_tokens = 1 + config.scheduling.speculate.min(MAX_RECURRENT_DRAFTS);
    let slab_bytes = model.slab_bytes(in_place_tokens);
    let slabs = slab_bytes.map(|bytes| config.state_slabs(bytes));
    let (slabs, max_running) = slabs.transpose()?.unwrap_or((0, limits.max_running));
    if max_running < limits.max_running {
        tracing::warn!(
            max_running,
            "fewer sequences than --max-running run at a time, because each needs memory for its \
             state (--state-memory)"
        );
    }
    let state_bytes = u64::from(slabs) * slab_bytes.unwrap_or(0) as u64;
    let states = slab_bytes.map(|_| StateLimits {
        slabs,
        in_place_tokens,
        trial_interval: STATE_INTERVAL,
    });
    let (page, longest) = (model.kv_bytes_per_page(), limits.max_sequence_tokens);
    let other_bytes = state_bytes + model.later_bytes() as u64;
    let pages = config.kv_pages(page, PAGE_TOKENS, longest, other_bytes)?;
    let limits = Limits {
        pages,
        max_running,
        states,
        ..limits
    };
    Ok((limits, state_bytes))
}

/// Returns the number of tokens that a text of the full context needs beside its own. An embedding
/// ends as an answer of one token does, which is never computed.
fn end_of_text(model: &ModelConfig) -> u32 {
    u32::from(!model.has_head)
}

/// Returns the names and limits of the model.
fn model_card(
    config: &ServeConfig,
    name: String,
    shape: &ModelConfig,
    limits: &Limits,
) -> Result<ModelCard, Box<dyn Error>> {
    Ok(ModelCard {
        name,
        aliases: config.model.names.iter().skip(1).cloned().collect(),
        max_model_len: u32::try_from(limits.longest_sequence())? - end_of_text(shape),
        vocabulary: u32::try_from(shape.vocab)?,
        stop_tokens: shape.eos_tokens.clone(),
        architecture: shape.architecture.class.to_owned(),
        model_type: shape.architecture.model_type.to_owned(),
        owned_by: config.model.owned_by.clone(),
        embedding: (!shape.has_head).then_some(EmbeddingShape {
            pooling: shape.pooling,
            dimensions: u32::try_from(shape.hidden)?,
        }),
        diffusion: limits.diffusion.map(|diffusion| DiffusionCard {
            unmasking: Unmasking {
                threshold: config.scheduling.diffusion_threshold,
                mask_token: diffusion.mask_token,
            },
            block: diffusion.block,
            is_default: config.scheduling.decoding == Some(Decoding::Diffusion)
                || !diffusion.is_causal,
            is_only: !diffusion.is_causal,
        }),
    })
}

/// Starts the processes of grammars. A mask takes some tens of microseconds and a step
/// milliseconds, so a few at a time are enough.
fn start_grammars(
    config: &ServeConfig,
    tokenizer: &Arc<Tokenizer>,
    model: &ModelCard,
    engine: &EngineHandle,
) -> io::Result<Grammars> {
    let options = GrammarOptions {
        program: &own_program()?,
        end_tokens: &model.stop_tokens,
        masks_at_once: (config.machine.threads() / 8).clamp(1, 8),
        compilations_at_once: MAX_COMPILATIONS,
    };
    let is_busy = engine.busy_reader();
    let engine = engine.clone();
    let charge = move |tenant, time| engine.charge_time(TenantId(tenant), time);
    let tokenizer = Arc::clone(tokenizer);
    Ok(Grammars::start(tokenizer, &options, is_busy, charge))
}

/// Returns the path of this program. On Linux the path is right even if an update has replaced the
/// file.
fn own_program() -> io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => env::current_exe(),
    }
}

/// Returns the sampling parameters of requests that do not set them.
///
/// # Errors
/// If a `generation_config.json` cannot be read or has an invalid value.
fn sampling_defaults(
    config: &ServeConfig,
    source: &Source,
) -> Result<SamplingDefaults, Box<dyn Error>> {
    let name = "generation_config.json";
    let read = |path: &str, json: &[u8]| {
        let defaults = SamplingDefaults::read(json);
        defaults.map_err(|error| format!("--generation-config: {path}: {error}"))
    };
    let defaults = match config.model.generation_config.as_str() {
        "none" | "vllm" => return Ok(SamplingDefaults::default()),
        "auto" => match source.read(name)? {
            Some(json) => read(name, &json)?,
            None => SamplingDefaults::default(),
        },
        directory => {
            let path = Path::new(directory).join(name);
            let shown = path.display().to_string();
            let json = fs::read(&path);
            read(&shown, &json.map_err(|error| format!("{shown}: {error}"))?)?
        }
    };
    tracing::info!(
        ?defaults,
        "sampling parameters of requests that do not set them"
    );
    Ok(defaults)
}

/// Returns how the model is loaded.
fn load_options(config: &ServeConfig, kernels: Kernels, limits: &Limits) -> LoadOptions {
    LoadOptions {
        pin_threads: config.machine.pin_threads(),
        max_step_tokens: limits.max_batch_tokens(),
        max_logits_rows: limits.max_logits(),
        kv_dtype: kv_dtype(&config.machine.kv_dtype),
        progress: io::stderr().is_terminal(),
        ..LoadOptions::new(kernels, config.machine.threads())
    }
}

/// Returns how the scheduler decides.
fn policy(config: &ServeConfig, own_drafts: Option<OwnDrafts>) -> Policy {
    let target = config.scheduling.itl_target_ms * 1000;
    Policy {
        budget: if config.scheduling.itl_strict {
            Budget::strictly_within(target)
        } else {
            Budget::within(target)
        },
        max_draft: config.scheduling.speculate,
        own_drafts,
        ..Policy::default()
    }
}

/// Returns the scheduler's limits. The caller sets the number of pages once it knows their size.
fn limits(config: &ServeConfig, model: &ModelConfig) -> Result<Limits, Box<dyn Error>> {
    let model_limit = u32::try_from(model.max_position)?;
    let max_sequence_tokens = config.model.max_len.unwrap_or(model_limit);
    if max_sequence_tokens > model_limit {
        return Err(format!(
            "--max-model-len {max_sequence_tokens}: the model supports at most {model_limit} tokens"
        )
        .into());
    }
    Ok(Limits {
        pages: 1,
        max_running: config.scheduling.max_running,
        max_queued: config.queue.max_queued,
        max_queued_time: config.queue.max_queued_seconds * 1_000_000,
        step_tokens: config.scheduling.step_tokens,
        prefill_chunk: config.scheduling.step_tokens,
        max_sequence_tokens: max_sequence_tokens + end_of_text(model),
        states: None,
        diffusion: decoding::diffusion(config, model)?,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use sterna_kernels::Isa;

    use crate::config::Cli;
    use crate::opening::kernels;

    #[test]
    fn every_instruction_set_is_a_value_of_the_flag() {
        for isa in Isa::ALL {
            let name = isa.to_string();
            for flags in [&["sterna"][..], &["sterna", "bench"]] {
                let cli = Cli::try_parse_from(flags.iter().chain(&["--isa", &name]));
                assert!(cli.is_ok(), "{flags:?} --isa {name}");
            }
            assert_eq!(kernels(Some(&name)).is_ok(), isa.is_available());
        }
    }
}
