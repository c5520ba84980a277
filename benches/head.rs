//! Measures the output head: all rows in 8 bits, beside only the rows that can decide what is
//! drawn.
//!
//! `cargo bench --bench head` prints the median time of a head in milliseconds, how many of its
//! rows were computed for a token, and how many bytes were read, as a share of those of all rows in
//! 8 bits. Both ways take turns: likely rows are computed wherever they are few enough, although a
//! server takes the faster way. Without shares, at least half of the steps had too many likely
//! rows. The heads are:
//!
//! - even: the random head of the 2B shape, with random inputs;
//! - uneven: the same, but most of the square norm of the inputs is in 32 columns;
//! - demo: the head of the demo model, and its inputs on held-out conversations;
//! - the head and the inputs of `cargo bench --bench head -- FILE`, as `benches/head_inputs.py`
//!   writes them, instead of these.
//!
//! Without `--bench`, as in `cargo test --benches`, or with `--test`, small heads run once and
//! nothing is printed.

#![allow(
    clippy::unwrap_used,
    reason = "a benchmark may panic, and its files are part of the repository"
)]

use std::borrow::Cow;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sterna::checkpoint::synthetic::Shape;
use sterna::checkpoint::{BITNET, Source};
use sterna::demo;
use sterna::model::{Deciding, HeadChoice, LoadOptions, Model, Stage, WantedDraw, WantedLogits};
use sterna::text::{Message, TemplateArguments, TextFiles};
use sterna_kernels::{DrawNoise, Isa, Kernels, f32_from_bf16};
use sterna_random::Random;
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

/// The head of the 2B shape on one narrow layer.
const SHAPE: Shape = Shape {
    name: "head",
    architecture: &BITNET,
    vocab: 128_256,
    hidden: 2560,
    intermediate: 256,
    layers: 1,
    heads: 20,
    kv_heads: 5,
    head_dim: 128,
    max_position: 256,
    rope_theta: 10_000.0,
    tied: false,
    group: None,
    recurrent: None,
    experts: None,
};
/// The uneven columns, and by how much the norm multiplies them.
const LARGE_COLUMNS: usize = 32;
const LARGE: f32 = 40.0;
/// The tokens that a head sees before its copy in 4 bits is built.
const SEEN_TOKENS: usize = 64;
/// The last norm of a model.
const NORM: &str = "model.norm.weight";

/// What the steps of a head compute.
enum Texts {
    /// Any token below this one, at the begin of a text.
    Random(usize),
    /// The last tokens of a text.
    Given(Vec<Vec<TokenId>>),
}

/// The size of a run.
struct Extent {
    is_smoke: bool,
    steps: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let is_smoke = given("--test") || !given("--bench");
    let (vocab, steps) = if is_smoke {
        (600, 1)
    } else {
        (SHAPE.vocab, 30)
    };
    let extent = Extent { is_smoke, steps };
    let shape = Shape { vocab, ..SHAPE };
    if !is_smoke {
        println!("{}\n", Isa::best());
        println!("| Head | tokens | wanted | all, ms | likely, ms | ratio | rows, % | bytes, % |");
        println!("|---|---|---|---|---|---|---|---|");
    }
    if let Some(path) = arguments
        .iter()
        .find(|argument| !argument.starts_with("--"))
    {
        let (source, count) = given_inputs(&std::fs::read(path).unwrap());
        return measure("given", &source, &Texts::Random(count), &extent);
    }
    for (name, large) in [("even", 1.0), ("uneven", LARGE)] {
        let source = changed(&shape, |name, bytes| {
            if name == NORM {
                let columns = bytes.to_mut().as_chunks_mut::<4>().0.iter_mut();
                for column in columns.step_by(shape.hidden / LARGE_COLUMNS) {
                    *column = (large * f32::from_le_bytes(*column)).to_le_bytes();
                }
            }
        });
        measure(name, &source, &Texts::Random(vocab), &extent);
    }
    measure(
        "demo",
        &demo::source(),
        &Texts::Given(conversations()),
        &extent,
    );
}

/// Measures one head and prints a line for each kind of step.
fn measure(name: &str, source: &Source, texts: &Texts, extent: &Extent) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = LoadOptions {
        exact_head_bytes: 0,
        head_choice: HeadChoice::LikelyRows,
        ..LoadOptions::new(Kernels::best(), threads)
    };
    let mut model = Model::load(source, options).unwrap();
    let mut random = Random::new(1);
    for _ in 0..SEEN_TOKENS {
        let wanted = wanted_logits("1", 1, &mut random);
        step(&mut model, texts, 1, &wanted, &mut random);
    }
    while model.prepare() {}
    let (vocab, all_bytes) = (model.config().vocab, model.sizes().head_bytes);
    for tokens in [1, 2, 3, 4, 8, 16] {
        for wanted in ["1", "20", "64", "T 1", "T 0.6", "p 0.9"] {
            let mut times = [Vec::new(), Vec::new()];
            let before = model.likely_use();
            for _ in 0..extent.steps {
                let all = WantedLogits::default();
                times[0].push(step(&mut model, texts, tokens, &all, &mut random));
                let wanted = wanted_logits(wanted, tokens, &mut random);
                times[1].push(step(&mut model, texts, tokens, &wanted, &mut random));
            }
            let [all, likely] = times.map(median);
            let after = model.likely_use();
            let share = |difference: u64, of: u64, whole: usize| {
                100.0 * difference as f64 / of as f64 / whole as f64
            };
            let steps = after.steps - before.steps;
            let rows = share(
                after.rows - before.rows,
                after.tokens - before.tokens,
                vocab,
            );
            let bytes = share(after.bytes - before.bytes, steps, all_bytes);
            let shares = match 2 * steps < extent.steps as u64 {
                true => "| – | –".to_owned(),
                false => format!("| {rows:.2} | {bytes:.0}"),
            };
            if !extent.is_smoke {
                let ratio = all / likely;
                print!("| {name} | {tokens} | {wanted} | {all:.2} | {likely:.2} ");
                println!("| {ratio:.2} {shares} |");
            }
        }
    }
}

/// Returns the logits that are wanted of each token: as many of the largest, or those of a draw at
/// a temperature, or of one with top-p at the temperature 1.
fn wanted_logits(wanted: &str, tokens: usize, random: &mut Random) -> WantedLogits {
    let mut draw = |temperature: f32, top_p: f32| {
        Deciding::Draw(WantedDraw {
            noise: DrawNoise::new([(); 3].map(|()| random.next_u64() as u32)),
            temperature,
            top_k: 0,
            top_p,
            min_p: 0.0,
        })
    };
    let mut logits = WantedLogits::default();
    for _ in 0..tokens {
        let deciding = match wanted.split_once(' ') {
            Some(("T", temperature)) => draw(temperature.parse().unwrap(), 1.0),
            Some((_, top_p)) => draw(1.0, top_p.parse().unwrap()),
            None => Deciding::Largest(wanted.parse().unwrap()),
        };
        logits.push(deciding, &[]);
    }
    logits
}

/// Computes a step of some tokens that wants these logits. Returns the time of the head in
/// milliseconds.
fn step(
    model: &mut Model,
    texts: &Texts,
    tokens: usize,
    wanted: &WantedLogits,
    random: &mut Random,
) -> f64 {
    let mut batch = Batch::new();
    let mut pages = 0;
    let mut push = |text: &[TokenId], logits: usize| {
        let own = text.len().div_ceil(PAGE_TOKENS) as u32;
        let table: Vec<_> = (pages..pages + own).map(Page::new).collect();
        batch.push_row(SequenceId::new(pages, 0), 0, text, &table, logits);
        pages += own;
    };
    match texts {
        Texts::Random(count) => {
            (0..tokens).for_each(|_| push(&[random.index(*count) as TokenId], 1));
        }
        Texts::Given(texts) => {
            let text = &texts[random.index(texts.len())];
            let end = tokens + random.index(text.len() - tokens);
            push(&text[..end], tokens);
        }
    }
    let mut kv = model.new_kv_store(pages as usize).unwrap();
    let before = model.profile().spent(Stage::Head);
    model.want_logits(wanted);
    model.forward(&batch, &mut kv);
    let time = model.profile().spent(Stage::Head) - before;
    1e3 * time.as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns a random checkpoint of a shape whose tensors are changed.
fn changed(shape: &Shape, change: impl Fn(&str, &mut Cow<'_, [u8]>)) -> Source {
    let mut bytes = Vec::new();
    shape.write_tensors(1, &mut bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, view)| {
            let mut bytes = Cow::Borrowed(view.data());
            change(name, &mut bytes);
            (name, view.dtype(), view.shape().to_vec(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (*name, view)
    });
    let model = safetensors::serialize(views, None).unwrap();
    let mut config = shape.config();
    config["eos_token_id"] = 0.into();
    Source::in_memory([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        ("model.safetensors".to_owned(), model),
    ])
}

/// Returns a checkpoint with the head of a file, whose first tokens have the inputs of the file as
/// hidden states, and the number of inputs. Its layer adds nothing.
fn given_inputs(file: &[u8]) -> (Source, usize) {
    let file = SafeTensors::deserialize(file).unwrap();
    let [head, inputs] = ["head", "inputs"].map(|name| file.tensor(name).unwrap());
    assert_eq!([head.dtype(), inputs.dtype()], [Dtype::BF16; 2]);
    let [vocab, hidden] = head.shape().try_into().unwrap();
    let head_dim = 64;
    let shape = Shape {
        vocab,
        hidden,
        heads: hidden / head_dim,
        kv_heads: 1,
        head_dim,
        ..SHAPE
    };
    let source = changed(&shape, |name, bytes| match name {
        NORM => {
            let weights = bytes.to_mut().as_chunks_mut().0;
            weights.fill(root_mean_square(inputs.data()).to_le_bytes());
        }
        "lm_head.weight" => *bytes = Cow::Owned(head.data().to_vec()),
        "model.embed_tokens.weight" => {
            bytes.to_mut()[..inputs.data().len()].copy_from_slice(inputs.data());
        }
        name if name.ends_with("weight_scale") => {
            let tiny = bytes.to_mut().as_chunks_mut().0;
            tiny.fill(1e-20_f32.to_le_bytes());
        }
        _ => {}
    });
    (source, inputs.shape()[0])
}

/// Returns the root of the mean square of some bf16 numbers, which the norm gives to each input.
fn root_mean_square(numbers: &[u8]) -> f32 {
    let numbers = numbers.as_chunks::<2>().0;
    let squares = numbers.iter().map(|bits| {
        let number = f32_from_bf16(u16::from_le_bytes(*bits));
        f64::from(number) * f64::from(number)
    });
    (squares.sum::<f64>() / numbers.len() as f64).sqrt() as f32
}

/// Returns the tokens of held-out conversations of the demo model.
fn conversations() -> Vec<Vec<TokenId>> {
    let source = demo::source();
    let file = |name| source.read(name).unwrap().unwrap();
    let files = TextFiles {
        tokenizer: &file("tokenizer.json"),
        config: Some(&file("tokenizer_config.json")),
        chat_template: None,
        tool_template: None,
    };
    let config: Value = serde_json::from_slice(&file("config.json")).unwrap();
    let vocab = config["vocab_size"].as_u64().unwrap() as u32;
    let (tokenizer, template) = files.load(vocab).unwrap();
    let template = template.unwrap();
    let held_out: Value = serde_json::from_str(include_str!("training/heldout.json")).unwrap();
    let turns = held_out["singles"].as_array().unwrap().iter();
    let texts = turns.map(|turn| {
        let message = |role: &str, key: &str| Message {
            role: role.to_owned(),
            content: turn[key].as_str().unwrap().to_owned(),
            ..Message::default()
        };
        let messages = [message("user", "question"), message("assistant", "answer")];
        let prompt = template.prompt(&tokenizer, &messages, &TemplateArguments::default());
        prompt.unwrap().tokens
    });
    texts.filter(|text| text.len() > 16).collect()
}
