//! The command line: every flag with its default, unit and limits.
//!
//! Invariant: no other module reads flags. The only settings that are no flags are the log filter,
//! in the environment variable `RUST_LOG`, the variables of the Hugging Face Hub
//! (`src/hub/settings.rs`), and the variables of OpenTelemetry (`src/traces/`).

mod healthcheck;
mod help;
mod kv_events;
mod memory;
mod settings;
mod traces;

use std::ops::RangeBounds;
use std::path::PathBuf;

use clap::builder::{RangedI64ValueParser, RangedU64ValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use sterna_scheduler::INTER_TOKEN_TARGET;

use crate::cores;
use memory::parse_size;

pub use healthcheck::HealthcheckConfig;
pub use help::similar_command;
pub use kv_events::KvEventFlags;
pub use memory::usable_memory;
pub use traces::TraceFlags;

/// The instruction sets that a user can choose.
const ISAS: [&str; 5] = ["scalar", "avx2", "avxvnni", "avx512", "avx512vbmi"];

/// The orders of I2_S weights that a user can name.
const I2S_ORDERS: [&str; 3] = ["x86", "arm", "four-rows"];

/// The number formats of keys and values that a user can choose.
const KV_DTYPES: [&str; 5] = ["f16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"];

/// The owners of the model that a user can state.
const OWNERS: [&str; 3] = ["vllm", "sglang", "sterna"];

/// The shapes of models that `synthesize` knows.
const SHAPES: [&str; 11] = [
    "2b-4t",
    "falcon3-1b",
    "bonsai-1.7b",
    "bonsai-8b",
    "bonsai-2-2b",
    "bonsai-2-4b",
    "bonsai-2-9b",
    "tiny",
    "qwen3-moe-tiny",
    "maple",
    "maple-tiny",
];

/// More compute threads than this for a core only wait for each other.
const MAX_THREADS_PER_CORE: usize = 4;

/// The default of `--state-memory`: cached states for each running sequence, and the largest
/// fraction of the memory that this process may still use.
const CACHED_STATES: u64 = 2;
const STATE_MEMORY_SHARE: f64 = 0.5;

/// The default of `--kv-memory` as a fraction of the memory that this process may still use.
const KV_MEMORY_SHARE: f64 = 0.5;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "sterna",
    version,
    about,
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    /// The command. If omitted, it is `serve`.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The flags of `serve`, which work without the name of the command too.
    #[command(flatten)]
    pub serve: ServeConfig,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default command).
    Serve(Box<ServeConfig>),
    /// Be the process from which a server forks the workers of grammars. Only a server starts it.
    #[command(hide = true)]
    GrammarTemplate,
    /// Measure how fast a model runs, beside the limits of this machine
    ///
    /// The command first checks that the engine computes correct results. If it does not, the
    /// command measures nothing and exits with code 2.
    ///
    /// Then it measures decode steps with 1 to 64 streams, and prompts of 128 to 2,048 tokens. The
    /// measurement runs the scheduler, the model and the sampler without HTTP; use the load test to
    /// measure HTTP too.
    ///
    /// "roofline" is the shortest possible time of a step divided by its measured time. The
    /// shortest possible time is max(bytes / bandwidth, operations / int8 peak). "in turn" adds up
    /// the shortest possible times of the products, attention and output head instead. Both limits
    /// of the machine are sampled before and after each repetition.
    ///
    /// Run nothing else meanwhile. A full run takes two to four minutes.
    Bench(BenchConfig),
    /// Say what a checkpoint holds, and whether this server would serve it.
    ///
    /// The report names the container and the layout of each kind of tensors, how the layout was
    /// told, the architecture, the sizes, the shares of -1, 0 and 1, the scales, the stop tokens
    /// and the chat template. The command also works on an architecture that Sterna does not
    /// compute. The command loads the model as the server does, so it needs as much memory.
    ///
    /// The command exits with 0 if the server would serve the checkpoint, with 1 if the server
    /// would refuse it (the report says why), and with 2 if the path does not exist.
    ///
    /// The fields of the JSON are path, served, refusals, warnings, container (huggingface, gguf,
    /// sglbitnt or unknown), container_detail, files, bytes, parameters, model (architecture,
    /// layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, context, tied), tensors
    /// (of each kind: kind, count, layout, told_by, type_number, shape, weights, bytes, scale_per,
    /// is_known), unknown_tensors, codes (minus, zero, plus, unusual), scales (per, count, min,
    /// median, max), stops (id, text), template (source, first_lines), computes (text, or
    /// embeddings for a checkpoint without an output head), pooling (last token or mean, for
    /// embeddings), recurrent (recurrent_layers, attention_layers, key_heads, value_heads, key_dim,
    /// value_dim, convolution_tokens, state_bytes of a sequence), rotation (version, block_size,
    /// sign_mode, matrices, embedding, groups_values) and left_out (prefix, tensors). What is
    /// unknown is null or empty. Later versions may add fields, but rename and remove none.
    Inspect(InspectConfig),
    /// Write a model into another container, without rounding anything
    ///
    /// IN is a directory of Hugging Face (packed weights, or floats that are ternary already), a
    /// GGUF file of any ternary type, or a .bin file. OUT has the same codes, scales, other
    /// tensors, tokens and chat template, so it gives the same answers, bit for bit:
    ///
    ///   a directory of Hugging Face: packed weights with one scale for each tensor. F32, F16 and
    ///   BF16 tensors stay as they are. It cannot hold scales of groups, nor quantised embeddings.
    ///
    ///   NAME.bin (the format of sgl-kernel): as the directory. The files of the tokenizer go to a
    ///   folder NAME beside it.
    ///
    ///   GGUF with i2_s: one scale for each tensor, in single precision.
    ///
    ///   GGUF with tq1_0 or tq2_0, q2_0, pq2_0: a scale for each group of 256, 64, 128 columns, in
    ///   half precision. The groups must be the same as in IN. If IN has one scale for each tensor,
    ///   each block repeats it, or a tensor *.scale has it if half precision would round it. Norms
    ///   become F32; embeddings and heads stay as they are.
    ///
    ///   A model with recurrent layers (Qwen 3.5): GGUF has other forms of norms, rates of decay
    ///   and value heads. The model computes the same bits from both, so a value without an exact
    ///   form is refused. Rotated weights need GGUF. A .bin file is refused. Tensors of images and
    ///   of layers that predict several tokens are left out, and the command says so.
    ///
    /// The command refuses what OUT cannot hold exactly, and weights that are not ternary already.
    /// The error names the tensor. OUT is written under another name, flushed, read back, compared
    /// with IN, and then renamed. If the conversion fails or is interrupted, nothing is left.
    #[command(verbatim_doc_comment)]
    Convert(ConvertConfig),
    /// Write a checkpoint with random ternary weights, to measure speed and memory.
    Synthesize(SynthesizeConfig),
    /// Make a key for a tenant, or with --admin for the operator.
    ///
    /// The key is shown once, on standard error. Save it: the server keeps only its hash. The
    /// table for the tenants file goes to standard output: sterna keygen ID >> tenants.toml
    Keygen(KeygenConfig),
    /// Ask a server whether it accepts requests, for the health check of a container.
    ///
    /// The command exits with 0 if the server answers 200, and with 1 if the server answers
    /// something else or nothing within 3 seconds. The message says which.
    Healthcheck(HealthcheckConfig),
}

/// The flags of `serve`.
#[derive(Args, Clone, Debug)]
pub struct ServeConfig {
    /// TOML file of settings. It has a key for each flag, such as port = 8000 or
    /// served-model-name = ["a", "b"]. The command line wins over the environment variable, which
    /// wins over the file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The flags about the model.
    #[command(flatten)]
    pub model: ModelFlags,
    /// The flags about the machine.
    #[command(flatten)]
    pub machine: MachineFlags,
    /// Memory for keys and values, for example 4GiB or 512MiB. If omitted, it is half of the memory
    /// that this process may still use, but at most what --max-running sequences of full length
    /// need. The server takes the first GiB at its start, and the rest while no request runs.
    /// --kv-dtype says how many bytes a token takes.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Machine")]
    pub kv_memory: Option<u64>,
    /// Memory for the states of a model with recurrent layers, such as Bonsai 2. Each running
    /// sequence needs one, so fewer than --max-running run if the memory does not hold them. The
    /// prefix cache keeps others. If omitted, it holds --max-running sequences and twice as many
    /// cached states, but takes at most half of the memory that this process may still use.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Machine")]
    pub state_memory: Option<u64>,
    /// The flags about connections.
    #[command(flatten)]
    pub network: NetworkFlags,
    /// The flags about tenants and keys.
    #[command(flatten)]
    pub access: AccessFlags,
    /// The flags about steps.
    #[command(flatten)]
    pub scheduling: SchedulingFlags,
    /// The flags about waiting requests and deadlines.
    #[command(flatten)]
    pub queue: QueueFlags,
    /// The flags about the events of the prefix cache.
    #[command(flatten)]
    pub kv_events: KvEventFlags,
    /// The flags about traces.
    #[command(flatten)]
    pub traces: TraceFlags,
    /// The flags about logs and the end of the server.
    #[command(flatten)]
    pub operation: OperationFlags,
}

/// What to serve.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// The model, as with --model.
    #[arg(value_name = "MODEL")]
    pub positional: Option<PathBuf>,
    /// The model: a directory, a file, or OWNER/NAME on the Hugging Face Hub. A directory is a
    /// Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors), or has one file of the
    /// other kinds: a GGUF file, or a .bin file of sgl-kernel with the files of its tokenizer
    /// beside it. OWNER/NAME is downloaded into the cache if no such path exists.
    /// OWNER/NAME:CHOICE names one of several GGUF files, or a quantisation such as Q2_0. If
    /// omitted, the embedded demo model is served.
    #[arg(long = "model", value_name = "MODEL")]
    pub path: Option<PathBuf>,
    /// Download nothing: a model that is given by its name must be in the cache. HF_HUB_OFFLINE=1
    /// means the same. HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_TOKEN say where the cache and the
    /// hub are, and who asks.
    #[arg(long)]
    pub offline: bool,
    /// The model's names in the API. Answers and metrics show the first one. If omitted, it is the
    /// name of the directory or file, or OWNER/NAME of a model that is given by its name.
    #[arg(
        long = "served-model-name",
        visible_alias = "model-name",
        value_name = "NAME"
    )]
    #[arg(num_args = 1.., value_parser = model_name)]
    pub names: Vec<String>,
    /// `owned_by` in the list of models. It tells routers whose API to use with this server: vLLM's
    /// (load in /metrics) or SGLang's (load in /v1/loads). This server has both.
    #[arg(long, value_name = "OWNER", default_value = "vllm", value_parser = OWNERS)]
    pub owned_by: String,
    /// Sampling parameters of requests that do not set them: auto reads them from the checkpoint's
    /// generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty,
    /// max_new_tokens), none takes the neutral values of the API, and a directory stands for its
    /// generation_config.json. vllm means the same as none.
    #[arg(long, value_name = "auto|none|DIR", default_value = "none")]
    pub generation_config: String,
    /// Order of the weights in the I2_S tensors of a GGUF file. If omitted, it is found by trial on
    /// a short text.
    #[arg(long = "i2s-order", value_name = "ORDER", value_parser = I2S_ORDERS)]
    pub i2s_order: Option<String>,
    /// Maximum length of a sequence (prompt and answer) in tokens. If omitted, it is the model's
    /// own limit.
    #[arg(long = "max-model-len", value_name = "TOKENS", value_parser = count(2..))]
    pub max_len: Option<u32>,
}

/// What computes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Machine")]
pub struct MachineFlags {
    /// Number of compute threads, at most four for each core. If omitted, there is one for each
    /// physical core that the CPU affinity and the cgroup allow. On a machine with several NUMA
    /// nodes, run one process on each (numactl --cpunodebind=N --membind=N).
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<u16>,
    /// Instruction set of the kernels. If omitted, it is the best that this machine has.
    #[arg(long, value_parser = ISAS)]
    pub isa: Option<String>,
    /// Number format of keys and values. The 8-bit formats have one scale for each token and KV
    /// head, hold nearly twice the tokens in the same memory, and read half the bytes. int8 is the
    /// fastest of them. Answers in 8 bits differ slightly from answers in f16 (figures in
    /// benches/README.md).
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = KV_DTYPES)]
    pub kv_dtype: String,
}

/// Who can connect.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Network")]
pub struct NetworkFlags {
    /// Address to listen on, or a name such as localhost. The server listens on all addresses of a
    /// name.
    #[arg(long, default_value = "127.0.0.1", value_parser = host)]
    pub host: String,
    /// Port to listen on. With 0 the system chooses a free port, and the start message names it.
    #[arg(long, default_value_t = 30000, value_parser = port)]
    pub port: u16,
    /// Maximum number of open connections. Further connections are answered 503 and closed.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = count(1..))]
    pub max_connections: u32,
    /// Maximum number of open connections from one address. Loopback addresses have no such limit.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count(1..))]
    pub max_connections_per_ip: u32,
    /// Time limit for the head of a request, in seconds from its first byte.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = seconds(1))]
    pub header_seconds: u64,
    /// Time after a response until the server closes an idle connection, in seconds. Behind a proxy
    /// that reuses connections, choose more than the proxy's own limit.
    #[arg(long, value_name = "SECONDS", default_value_t = 75, value_parser = seconds(1))]
    pub idle_seconds: u64,
    /// Name of this server in the `host` header of requests, such as example.com; may be repeated.
    /// The port does not matter. Loopback names and addresses, --host and, if --host is 0.0.0.0 or
    /// ::, all addresses are always allowed; other hosts get 403. With --tenants and a --host that
    /// other machines can reach, all hosts are allowed unless this flag is given. `*` allows all.
    #[arg(long, value_name = "HOST")]
    pub allowed_host: Vec<String>,
    /// Origin whose pages may use the server from a browser, such as `https://example.com`; may be
    /// repeated. `*` allows all. Without this flag only the server's own page can use it.
    #[arg(long, visible_alias = "cors-origin", value_name = "ORIGIN")]
    pub allowed_origin: Vec<String>,
}

/// Who can use the server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Access")]
pub struct AccessFlags {
    /// TOML file of the tenants. It has their key hashes, shares and limits (see
    /// src/tenants/README.md). With this file every route except /, /page/, /health and /ready
    /// needs a key, and /metrics needs the admin key. The server reads the file again at SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub tenants: Option<PathBuf>,
    /// TOML file with the hash of an admin key, for a server without --tenants (sterna keygen
    /// --admin > FILE). The key may reset the prefix cache and end requests. Without the key,
    /// nobody may.
    #[arg(long, value_name = "FILE", conflicts_with = "tenants")]
    pub admin_key_file: Option<PathBuf>,
    /// Serve without keys on a --host that other machines can reach.
    #[arg(long)]
    pub insecure: bool,
    /// Serve /metrics without a key. Without this flag, /metrics needs the admin key of the tenants
    /// file.
    #[arg(long)]
    pub metrics_open: bool,
}

/// How steps are planned.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Scheduling")]
pub struct SchedulingFlags {
    /// Target inter-token latency in milliseconds. Prefill uses the rest of each step's time;
    /// admission stops when one more sequence would miss the target. If the machine is so slow that
    /// the target costs more than a quarter of the tokens per second, the scheduler uses a longer
    /// one.
    #[arg(long, value_name = "MS", default_value_t = INTER_TOKEN_TARGET / 1000)]
    #[arg(value_parser = value_parser!(u64).range(1..=60_000))]
    pub itl_target_ms: u64,
    /// Never use a longer target than --itl-target-ms, however many tokens per second that costs.
    /// On a machine that is too slow for the target, few sequences run at a time.
    #[arg(long)]
    pub itl_strict: bool,
    /// Maximum number of sequences in a batch. The latency target usually allows fewer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count(1..=4096))]
    pub max_running: u32,
    /// Number of tokens up to which prefill may fill a step, however much time is left. It
    /// determines the memory that a step needs.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = count(16..=8192))]
    pub step_tokens: u32,
    /// Maximum number of draft tokens for a sequence in a step. Drafts repeat earlier text of the
    /// sequence, and the scheduler uses them while few sequences decode. They make repetitive
    /// answers faster and never change an answer. 0 turns speculation off.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = count(0..=32))]
    pub speculate: u32,
    /// How tokens are decoded. A model that was trained to fill masked tokens can draft its next
    /// tokens for itself: that is self-speculation, and the default for such a model. The scheduler
    /// drafts while that saves time, and no draft changes an answer. With diffusion such a model
    /// fills whole blocks, which gives other answers. A request may choose that too, by the model's
    /// name with ":diffusion" or ":autoregressive".
    #[arg(long, value_enum, value_name = "WAY")]
    pub decoding: Option<Decoding>,
    /// Number of the token that stands for an unknown one in a block of diffusion, which the
    /// checkpoint gives by default. If no file says anything of blocks, the checkpoint is served
    /// as one of Fast-dLLM v2, which answers by diffusion alone.
    #[arg(long, value_name = "ID")]
    pub diffusion_mask_token: Option<u32>,
    /// Number of tokens in a block of diffusion, which the checkpoint gives by default.
    #[arg(long, value_name = "TOKENS", value_parser = count(2..=256))]
    pub diffusion_block: Option<u32>,
    /// Number of tokens in each part of a block of diffusion. The parts are filled from left to
    /// right.
    #[arg(long, value_name = "TOKENS", default_value_t = 8, value_parser = count(1..=64))]
    pub diffusion_part: u32,
    /// Computes only the part that is filled, once its first token is known. It then sees the rest
    /// of the block as the last pass over the whole block left it, which gives other answers.
    #[arg(long)]
    pub diffusion_block_cache: bool,
    /// Probability above which a token of a block stays. The likeliest one always stays.
    #[arg(long, value_name = "P", default_value_t = 0.9, value_parser = probability)]
    pub diffusion_threshold: f32,
}

/// How tokens are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Decoding {
    /// Token by token, with drafts that are looked up.
    Autoregressive,
    /// With drafts that the model makes itself.
    SelfSpeculation,
    /// Block by block (Fast-dLLM v2), unless a request chooses otherwise.
    Diffusion,
}

/// How long requests may wait and take.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Queue and deadlines")]
pub struct QueueFlags {
    /// Maximum number of waiting requests; several choices (n) are one request. Further requests
    /// are answered 503 with Retry-After. If the new request's tenant has less of the full queue
    /// than its share, the newest request of the tenant with the most gets the 503 instead.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count(1..=65536))]
    pub max_queued: u32,
    /// Maximum predicted machine time of all waiting requests, in seconds. Further requests are
    /// answered 503 with Retry-After.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds(1))]
    pub max_queued_seconds: u64,
    /// Time limit for a request's first token, in seconds from its arrival. A request that misses
    /// the limit is ended with 504. A request that is predicted to miss the limit is rejected at
    /// once. If omitted, there is no limit. A tenant's first_token_seconds takes precedence.
    #[arg(long, value_name = "SECONDS", value_parser = seconds(1))]
    pub first_token_seconds: Option<u64>,
    /// Time limit for a whole request, in seconds from its arrival. A request that exceeds the
    /// limit is ended with 504. A tenant's total_seconds takes precedence.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = seconds(1))]
    pub request_seconds: u64,
}

/// How the server stops and logs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Operation")]
pub struct OperationFlags {
    /// Time that running requests have to finish after SIGTERM or Ctrl-C, in seconds. A second
    /// signal ends the server at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds(0))]
    pub drain_seconds: u64,
    /// Write logs as JSON lines.
    #[arg(long)]
    pub log_json: bool,
}

/// The flags of `bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchConfig {
    /// Directory of a Hugging Face checkpoint. If omitted, the embedded demo model is measured. It
    /// is so small that its figures say little about real models. `sterna synthesize DIR` makes a
    /// model with the shape of BitNet b1.58 2B-4T.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Context lengths at which decode steps are measured, in tokens. A combination that does not
    /// fit the memory or the model is skipped.
    #[arg(long, value_name = "TOKENS", default_value = "256")]
    #[arg(value_delimiter = ',', value_parser = count(32..=1_048_576))]
    pub depths: Vec<u32>,
    /// Write the figures as JSON to a file, or to standard output with `-`. In that case the table
    /// goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Measure less, in half a minute: fewer streams, one prompt, fewer repetitions, and the limits
    /// of the machine on less memory.
    #[arg(long)]
    pub quick: bool,
    /// The flags about the machine. They come last, because their heading holds for what follows.
    #[command(flatten)]
    pub machine: MachineFlags,
}

/// The flags of `inspect`.
#[derive(Args, Clone, Debug)]
pub struct InspectConfig {
    /// The checkpoint: a directory, a GGUF file or a .bin file, as for --model of `serve`.
    pub path: PathBuf,
    /// Write the report as JSON.
    #[arg(long)]
    pub json: bool,
    /// Order of the weights in the I2_S tensors of a GGUF file. If omitted, it is found by trial on
    /// a short text.
    #[arg(long = "i2s-order", value_name = "ORDER", value_parser = I2S_ORDERS)]
    pub i2s_order: Option<String>,
}

/// The flags of `convert`.
#[derive(Args, Clone, Debug)]
pub struct ConvertConfig {
    /// The model: a directory of Hugging Face, a GGUF or .bin file, or a directory with one such
    /// file.
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// What to write: NAME.gguf, NAME.bin, or a directory.
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// Container of OUT. If omitted, the ending .gguf or .bin says it, and any other name is a
    /// directory.
    #[arg(long, value_name = "CONTAINER", value_parser = ["hf", "gguf", "bin"])]
    pub to: Option<String>,
    /// Layout of the ternary weights in a GGUF file.
    #[arg(long, value_parser = ["i2_s", "tq1_0", "tq2_0", "q2_0", "pq2_0"])]
    pub layout: Option<String>,
    /// Replace OUT if it exists.
    #[arg(long)]
    pub force: bool,
    /// Also write sterna_golden.json: the greedy answers of IN to some prompts. PROMPTS is a file
    /// with a prompt in each line; without it, built-in prompts are used. A server that loads OUT
    /// computes them again before it is ready.
    #[arg(long, value_name = "PROMPTS", num_args = 0..=1, require_equals = true)]
    pub golden: Option<Option<PathBuf>>,
    /// Order of the weights in the I2_S tensors of IN. If omitted, it is found by trial on a short
    /// text.
    #[arg(long = "i2s-order", value_name = "ORDER", value_parser = I2S_ORDERS)]
    pub i2s_order: Option<String>,
    /// The flags about the machine. They come last, because their heading holds for what follows.
    #[command(flatten)]
    pub machine: MachineFlags,
}

/// The flags of `synthesize`.
#[derive(Args, Clone, Debug)]
pub struct SynthesizeConfig {
    /// Shape of the model.
    #[arg(long, default_value = "2b-4t", value_parser = SHAPES)]
    pub shape: String,
    /// Seed of the random weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Directory to write. It must be empty or absent.
    pub directory: PathBuf,
}

/// The flags of `keygen`.
#[derive(Args, Clone, Debug)]
pub struct KeygenConfig {
    /// The tenant's id: up to 64 letters, digits, `.`, `_` or `-`.
    #[arg(required_unless_present = "admin", conflicts_with = "admin")]
    pub id: Option<String>,
    /// Make the admin key, which reads /metrics, resets the prefix cache and ends requests, instead
    /// of a tenant's key.
    #[arg(long)]
    pub admin: bool,
}

/// Accepts a number within `limits`.
fn count(limits: impl RangeBounds<i64>) -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(limits)
}

/// Accepts a port.
fn port(text: &str) -> Result<u16, String> {
    text.parse()
        .map_err(|_| "must be a whole number from 0 to 65535".to_owned())
}

/// Accepts a number from 0 to 1.
fn probability(text: &str) -> Result<f32, String> {
    let number = text.parse().ok();
    number
        .filter(|number| (0.0..=1.0).contains(number))
        .ok_or_else(|| format!("must be a number from 0 to 1; got {text:?}"))
}

/// Returns how an error says a size.
fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Accepts from `min` seconds to a day.
fn seconds(min: u64) -> RangedU64ValueParser {
    value_parser!(u64).range(min..=86_400)
}

/// Accepts a number of compute threads that this machine can run.
fn threads(text: &str) -> Result<u16, String> {
    let cores = cores::logical();
    let max = cores * MAX_THREADS_PER_CORE;
    let threads: u16 = text
        .parse()
        .map_err(|_| format!("`{text}` is not a number from 1 to {max}"))?;
    if (1..=max).contains(&usize::from(threads)) {
        return Ok(threads);
    }
    Err(format!(
        "this process may use {cores} cores; give 1 to {max} threads"
    ))
}

fn model_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("a model's name must not be empty; omit the flag to use the default".into());
    }
    Ok(text.to_owned())
}

fn host(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("give an address or a name; 127.0.0.1 serves this machine only".into());
    }
    Ok(text
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned())
}

impl MachineFlags {
    /// Returns the number of compute threads.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(cores::usable, usize::from)
    }

    /// Returns whether to pin each compute thread to a core. That is only safe with one thread for
    /// each core that this process may use: with fewer threads, another process may have pinned its
    /// threads to the same cores.
    pub fn pin_threads(&self) -> bool {
        cores::physical().len() == self.threads()
    }
}

impl ServeConfig {
    /// Returns the slabs of states to allocate, each of `slab_bytes`, and how many sequences run at
    /// a time: at most `--max-running`, and fewer than there are slabs. Without `--state-memory`,
    /// half of the slabs stay for cached states if memory is short.
    ///
    /// # Errors
    /// If the memory does not hold the slabs of one sequence, or if `--state-memory` is more than
    /// this process may use. The error names both sizes.
    pub fn state_slabs(&self, slab_bytes: usize) -> Result<(u32, u32), String> {
        let (usable, slab) = (usable_memory(), slab_bytes as u64);
        let wanted_running = u64::from(self.scheduling.max_running);
        let (slabs, running) = match self.state_memory {
            Some(bytes) if bytes > usable => {
                return Err(format!(
                    "--state-memory: {} do not fit; this process may use only {} more. Give a \
                     smaller size",
                    gib(bytes),
                    gib(usable)
                ));
            }
            Some(bytes) => (bytes / slab, (bytes / slab).saturating_sub(1)),
            None => {
                let wanted = 1 + (1 + CACHED_STATES) * wanted_running;
                let share = (usable as f64 * STATE_MEMORY_SHARE) as u64;
                let slabs = wanted.min(share / slab);
                (slabs, slabs / 2)
            }
        };
        if slabs < 2 {
            return Err(format!(
                "--state-memory: a sequence needs {} bytes, two states of {slab} bytes; this \
                 process may use {usable} bytes, half of them for states if --state-memory is \
                 missing. Give a larger size",
                2 * slab
            ));
        }
        let slabs = u32::try_from(slabs).unwrap_or(u32::MAX - 1);
        let running = running.min(wanted_running).max(1) as u32;
        Ok((slabs, running))
    }

    /// Returns the number of KV pages to allocate. A page takes `page_bytes` and has `page_tokens`
    /// tokens. The longest sequence has `max_model_len` tokens. States and what is
    /// built later take `other_bytes`.
    ///
    /// # Errors
    /// If the memory does not hold a page, or if `--kv-memory` is more than this process may use.
    /// The error names both sizes.
    pub fn kv_pages(
        &self,
        page_bytes: usize,
        page_tokens: usize,
        max_model_len: u32,
        other_bytes: u64,
    ) -> Result<u32, String> {
        let usable = usable_memory().saturating_sub(other_bytes);
        let bytes = match self.kv_memory {
            Some(bytes) if bytes > usable => {
                return Err(format!(
                    "--kv-memory: {} do not fit; this process may use only {} more. Give a \
                     smaller size",
                    gib(bytes),
                    gib(usable)
                ));
            }
            Some(bytes) => bytes,
            None => {
                let sequence_pages = u64::from(max_model_len).div_ceil(page_tokens as u64);
                let running = u64::from(self.scheduling.max_running);
                let full = sequence_pages * running * page_bytes as u64;
                ((usable as f64 * KV_MEMORY_SHARE) as u64).min(full)
            }
        };
        match u32::try_from(bytes / page_bytes as u64) {
            Ok(0) => Err(format!(
                "--kv-memory: {bytes} bytes do not hold a page of {page_bytes} bytes. Give a \
                 larger size"
            )),
            Ok(pages) => Ok(pages),
            Err(_) => Err(format!(
                "--kv-memory: {bytes} bytes are more than {} pages of {page_bytes} bytes. Give a \
                 smaller size",
                u32::MAX
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(flags: &[&str]) -> ServeConfig {
        Cli::try_parse_from(["sterna"].iter().chain(flags))
            .unwrap()
            .serve
    }

    #[test]
    fn states_bound_the_running_sequences() {
        let slabs = |flags: &[&str]| serve(flags).state_slabs(1 << 20);
        let flags = ["--max-running", "16", "--state-memory", "40MiB"];
        assert_eq!(slabs(&flags), Ok((40, 16)));
        let flags = ["--max-running", "64", "--state-memory", "40MiB"];
        assert_eq!(slabs(&flags), Ok((40, 39)));
        assert_eq!(slabs(&["--max-running", "4"]), Ok((13, 4)));
        let error = slabs(&["--state-memory", "1MiB"]).unwrap_err();
        assert!(error.contains("2097152 bytes"), "{error}");
        let error = slabs(&["--state-memory", "900TiB"]).unwrap_err();
        assert!(error.contains("do not fit"), "{error}");
        // Half of a scarce memory stays for cached states.
        let whole = serve(&[]).state_slabs((usable_memory() / 100) as usize);
        let (slabs, running) = whole.unwrap();
        assert!(
            (2..=50).contains(&slabs) && running == slabs / 2,
            "{slabs}, {running}"
        );
    }

    #[test]
    fn serve_needs_no_flags_and_no_command_name() {
        assert_eq!(serve(&[]).network.port, 30000);
        assert_eq!(serve(&["--port", "0"]).network.port, 0);
        let named = Cli::try_parse_from(["sterna", "serve", "--threads", "2"]).unwrap();
        assert!(
            matches!(named.command, Some(Command::Serve(config)) if config.machine.threads() == 2)
        );
        for refused in [
            ["--threads", "0"],
            ["--threads", "1000"],
            ["--threads", "two"],
            ["--model-name", ""],
            ["--served-model-name", ""],
            ["--host", ""],
        ] {
            assert!(Cli::try_parse_from([&["sterna"], &refused[..]].concat()).is_err());
        }
        let names = ["--served-model-name", "a", "b", "--port", "0"];
        assert_eq!(serve(&names).model.names, ["a", "b"]);
        assert_eq!(serve(&["--model-name", "a"]).model.names, ["a"]);
        assert_eq!(serve(&["--host", "[::1]"]).network.host, "::1");
        assert!(Cli::try_parse_from(["sterna", "--isa", "neon"]).is_err());
        assert_eq!(serve(&[]).machine.kv_dtype, "f16");
        assert_eq!(
            serve(&["--kv-dtype", "fp8_e4m3"]).machine.kv_dtype,
            "fp8_e4m3"
        );
        assert!(Cli::try_parse_from(["sterna", "--kv-dtype", "int4"]).is_err());
        assert_eq!(serve(&["--speculate", "0"]).scheduling.speculate, 0);
        assert!(Cli::try_parse_from(["sterna", "--speculate", "33"]).is_err());
    }

    #[test]
    fn bench_accepts_several_depths_of_a_minimum_length() {
        let bench = |flags: &[&str]| {
            let cli = Cli::try_parse_from(["sterna", "bench"].iter().chain(flags));
            cli.map(|cli| match cli.command {
                Some(Command::Bench(config)) => config,
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(bench(&[]).unwrap().depths, [256]);
        let config = bench(&["--depths", "256,2048", "--threads", "3"]).unwrap();
        assert_eq!(
            (config.depths.as_slice(), config.machine.threads()),
            (&[256, 2048][..], 3)
        );
        assert!(bench(&["--depths", "8"]).is_err());
        assert!(bench(&["--isa", "neon"]).is_err());
        assert_eq!(
            bench(&["--kv-dtype", "int8"]).unwrap().machine.kv_dtype,
            "int8"
        );
    }

    #[test]
    fn kv_memory_is_the_flags_size_or_limited_by_max_running() {
        let pages = |size: &str| serve(&["--kv-memory", size]).kv_pages(1024, 16, 4096, 0);
        assert_eq!(pages("1MiB"), Ok(1024));
        assert!(pages("1000TiB").is_err_and(|error| error.contains("may use only")));
        assert!(pages("1000").is_err_and(|error| error.contains("1000 bytes do not hold a page")));
        let two = serve(&["--max-running", "2"]).kv_pages(1024, 16, 64, 0);
        assert!(two.is_ok_and(|pages| pages <= 8));
    }
}
