//! Models with recurrent layers: however a sequence is cut into rows, each token has the same bits.

use std::ops::Range;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sterna_kernels::{Isa, Kernels, PAGE_TOKENS};
use sterna_random::Random;
use sterna_scheduler::{Batch, KeptState, Page, RowStates, SequenceId, StateLimits, StateSlab};

use super::{options, prompt, rows};
use crate::checkpoint::synthetic::{RecurrentHeads, Shape};
use crate::checkpoint::{QWEN3_5, Source};
use crate::model::forward::Model;
use crate::model::kv_store::KvStore;
use crate::model::options::LoadOptions;

const SHAPE: Shape = Shape {
    name: "recurrent",
    architecture: &QWEN3_5,
    vocab: 96,
    hidden: 128,
    intermediate: 192,
    layers: 4,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    max_position: 256,
    rope_theta: 10_000.0,
    tied: true,
    group: Some(64),
    recurrent: Some(RecurrentHeads {
        interval: 2,
        key_heads: 3,
        value_heads: 6,
        head_dim: 32,
        taps: 4,
    }),
    experts: None,
};

const TOKENS: usize = 53;
/// The tokens of a row that may change its slab in place.
const IN_PLACE: usize = 4;
const STATES: StateLimits = StateLimits {
    slabs: 8,
    in_place_tokens: IN_PLACE as u32,
    trial_interval: 2048,
};

/// A sequence of [`TOKENS`] tokens in the first pages of a store.
struct CutSequence {
    model: Model,
    kv: KvStore,
    tokens: Vec<u32>,
    pages: Vec<Page>,
}

fn slab(index: u32) -> StateSlab {
    StateSlab::new(index)
}

fn states(from: Option<u32>, to: u32) -> RowStates {
    RowStates {
        from: from.map(slab),
        to: slab(to),
        keep: [None; 2],
    }
}

impl CutSequence {
    fn new(shape: Shape, isa: Isa, threads: usize) -> CutSequence {
        CutSequence::of(&shape.in_memory(5), isa, threads)
    }

    fn of(source: &Source, isa: Isa, threads: usize) -> CutSequence {
        let options = LoadOptions {
            kernels: Kernels::new(isa).unwrap(),
            ..options(threads)
        };
        let model = Model::load(source, options).unwrap();
        let count = TOKENS.div_ceil(PAGE_TOKENS);
        let kv = model.new_kv_store_with_states(2 * count, STATES);
        CutSequence {
            kv: kv.unwrap(),
            tokens: prompt(TOKENS, 3, model.config().vocab),
            model,
            pages: (0..count as u32).map(Page::new).collect(),
        }
    }

    /// Adds a row of these positions to a batch.
    fn push(&self, batch: &mut Batch, positions: Range<usize>, states: RowStates) {
        let pages = &self.pages[..positions.end.div_ceil(PAGE_TOKENS)];
        let tokens = &self.tokens[positions.clone()];
        batch.push_row(
            SequenceId::new(0, 0),
            positions.start,
            tokens,
            pages,
            tokens.len(),
        );
        batch.set_states(states);
    }

    /// Computes one row, and returns the bits of the logits of its tokens.
    fn row(&mut self, positions: Range<usize>, states: RowStates) -> Vec<Vec<u32>> {
        let mut batch = Batch::new();
        self.push(&mut batch, positions, states);
        self.compute(&batch)
    }

    fn compute(&mut self, batch: &Batch) -> Vec<Vec<u32>> {
        let rows = rows(&mut self.model, batch, &mut self.kv);
        let bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
        rows.into_iter().map(bits).collect()
    }
}

/// Returns shapes with other periods, heads and heads per key head.
fn shapes() -> [Shape; 3] {
    let heads = SHAPE.recurrent.unwrap();
    let with = |interval, key_heads, value_heads, taps| {
        Some(RecurrentHeads {
            interval,
            key_heads,
            value_heads,
            taps,
            ..heads
        })
    };
    [
        SHAPE,
        Shape {
            recurrent: with(4, 4, 4, 2),
            tied: false,
            ..SHAPE
        },
        Shape {
            recurrent: with(3, 4, 8, 4),
            group: Some(128),
            hidden: 256,
            intermediate: 256,
            ..SHAPE
        },
    ]
}

#[test]
fn tokens_have_the_same_bits_however_a_sequence_is_cut() {
    let mut random = Random::from_env();
    for shape in shapes() {
        let mut first = None;
        for isa in Isa::available() {
            for threads in [1, 3] {
                let mut sequence = CutSequence::new(shape, isa, threads);
                let whole = sequence.row(0..TOKENS, states(None, 0));
                assert!(whole == *first.get_or_insert(whole.clone()), "{isa}");

                // One by one, in place.
                let mut from = None;
                for position in 0..TOKENS {
                    let row = sequence.row(position..position + 1, states(from, 1));
                    assert!(row == whole[position..position + 1], "{isa}: {position}");
                    from = Some(1);
                }

                // In rows of any length. Long rows have a slab of their own; a step is sometimes
                // computed twice; the tokens of a short row are sometimes rejected.
                for _ in 0..8 {
                    let (mut start, mut own, mut other) = (0, None, 3);
                    while start < TOKENS {
                        let most = random.pick(&[1, IN_PLACE, 30]);
                        let end = TOKENS.min(start + 1 + random.index(most));
                        let is_short = end - start <= IN_PLACE;
                        let to = own.filter(|_| is_short).unwrap_or(other);
                        for _ in 0..1 + random.index(2) {
                            let row = sequence.row(start..end, states(own, to));
                            assert!(row == whole[start..end], "{isa}: {start}..{end}");
                        }
                        if own != Some(to) {
                            other = own.unwrap_or(if to == 3 { 4 } else { 3 });
                            own = Some(to);
                        }
                        let rejected = match is_short {
                            true => random.index(end - start + 1),
                            false => random.index(2),
                        };
                        start = if end == TOKENS { end } else { end - rejected };
                    }
                }
            }
        }
    }
}

#[test]
fn kept_states_continue_as_if_the_row_had_ended_there() {
    let mut random = Random::from_env();
    for shape in shapes() {
        let mut sequence = CutSequence::new(shape, Isa::best(), 2);
        let whole = sequence.row(0..TOKENS, states(None, 0));
        for _ in 0..12 {
            let start = random.index(20);
            if start > 0 {
                sequence.row(0..start, states(None, 1));
            }
            let len = random.pick(&[3, IN_PLACE, 25, TOKENS - start]);
            let row = start..start + len;
            let inside = |random: &mut Random| start + 1 + random.index(len - 1);
            let kept = [inside(&mut random), inside(&mut random)];
            let states_of_row = RowStates {
                keep: [(kept[0], 5), (kept[1], 6)].map(|(position, index)| {
                    Some(KeptState {
                        position: position as u32,
                        slab: slab(index),
                    })
                }),
                ..states((start > 0).then_some(1), 2)
            };
            sequence.row(row, states_of_row);
            for (position, index) in kept.into_iter().zip([5, 6]) {
                for start in [position, position - 1] {
                    for end in [start + 1, TOKENS.min(start + 3), TOKENS] {
                        // The keys before the row are those of the same tokens.
                        let found = sequence.row(start..end, states(Some(index), 7));
                        assert!(found == whole[start..end], "from {start} to {end}");
                    }
                }
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_change_each_other() {
    for shape in shapes() {
        let mut sequence = CutSequence::new(shape, Isa::best(), 3);
        let whole = sequence.row(0..TOKENS, states(None, 0));
        let others: Vec<Page> = sequence
            .pages
            .iter()
            .map(|page| page.index())
            .map(|index| Page::new((index + sequence.pages.len()) as u32))
            .collect();
        sequence.row(0..20, states(None, 1));
        let other_tokens = prompt(30, 8, shape.vocab);
        let mut batch = Batch::new();
        batch.push_row(SequenceId::new(1, 0), 0, &other_tokens, &others[..2], 0);
        batch.set_states(states(None, 2));
        sequence.push(&mut batch, 20..TOKENS, states(Some(1), 3));
        assert!(
            sequence.compute(&batch) == whole[20..],
            "beside another prompt"
        );
        let mut batch = Batch::new();
        sequence.push(&mut batch, TOKENS - 1..TOKENS, states(Some(3), 3));
        batch.push_row(SequenceId::new(1, 0), 30, &[7], &others[..2], 0);
        batch.set_states(states(Some(2), 2));
        assert!(
            sequence.compute(&batch) == whole[TOKENS - 1..],
            "beside a decode"
        );
    }
}

#[test]
#[should_panic(expected = "does not reach")]
fn a_state_that_does_not_reach_the_row_is_a_panic() {
    let mut sequence = CutSequence::new(SHAPE, Isa::best(), 1);
    sequence.row(0..30, states(None, 0));
    sequence.row(20..21, states(Some(0), 0));
}

/// The checkpoint of a model that also sees images and predicts several tokens.
#[test]
fn the_text_part_of_a_model_with_images_is_computed() {
    let mut weights = Vec::new();
    SHAPE.write_tensors(5, &mut weights).unwrap();
    let tensors = SafeTensors::deserialize(&weights).unwrap();
    let renamed = |name: String| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name,
    };
    let tensors = tensors.tensors().into_iter();
    let mut tensors: Vec<_> = tensors.map(|(name, view)| (renamed(name), view)).collect();
    for unused in [
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.fc.weight",
    ] {
        let view = TensorView::new(Dtype::F32, vec![1, 2], &[0; 8]).unwrap();
        tensors.push((unused.to_owned(), view));
    }
    let weights = safetensors::serialize(tensors, None).unwrap();
    let mut text = SHAPE.config();
    text["eos_token_id"] = 0.into();
    text["architectures"] = Value::Null;
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"depth": 1},
        "tie_word_embeddings": true,
    });
    let source = Source::in_memory([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        ("model.safetensors".to_owned(), weights),
    ]);
    let whole = CutSequence::of(&source, Isa::best(), 2).row(0..TOKENS, states(None, 0));
    let mut plain = CutSequence::new(SHAPE, Isa::best(), 2);
    assert!(whole == plain.row(0..TOKENS, states(None, 0)));
}
