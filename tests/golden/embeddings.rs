//! The embeddings of texts agree with the reference, and depend on the text alone.

use std::fs;

use sterna::checkpoint::{ModelConfig, Pooling, Source};
use sterna::model::{LoadOptions, Model, TextEmbedding};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, TokenId};

use super::fixture::{Fixture, Prompt, fixtures};
use super::steps::{CHUNK, Sequence};
use super::{for_each_fixture, within_spread};

const MEAN_POOLING: &str = r#"{"word_embedding_dimension": 128, "pooling_mode_mean_tokens": true}"#;

fn load(source: &Source, kernels: Kernels) -> Model {
    Model::load(source, LoadOptions::new(kernels, 2)).unwrap()
}

/// Returns the checkpoint of a fixture with the statement that embeddings are means.
fn with_mean_pooling(fixture: &Fixture) -> Source {
    let entries = fs::read_dir(&fixture.checkpoint).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let files = paths.filter(|path| path.is_file()).map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    });
    let statement = ("1_Pooling/config.json".to_owned(), MEAN_POOLING.into());
    Source::in_memory(files.chain([statement]))
}

fn embedding(model: &mut Model, text: &[TokenId]) -> Vec<f32> {
    let embedding = model.embed_text(text).unwrap();
    embedding.expect("the states are finite")
}

fn bits(embedding: &[f32]) -> Vec<u32> {
    embedding.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn embeddings_stay_within_the_spread_of_the_reference() {
    let mut checked = 0;
    for_each_fixture(false, |fixture, kernels| {
        checked += 1;
        for (name, source, pooling) in [
            ("embedding", fixture.source(), Pooling::LastToken),
            ("mean", with_mean_pooling(fixture), Pooling::Mean),
        ] {
            let mut model = load(&source, kernels);
            assert_eq!(model.config().pooling, pooling);
            let prompts = fixture.expected.prompts.iter().enumerate();
            let differences = prompts.flat_map(|(index, Prompt { prompt, .. })| {
                let got = embedding(&mut model, prompt);
                let wanted = fixture.tensor(&format!("prompt.{index}.{name}"));
                assert_eq!(got.len(), wanted.len());
                let length: f32 = got.iter().map(|value| value * value).sum();
                assert!((length - 1.0).abs() < 1e-5, "the length is 1: {length}");
                let pairs = got.into_iter().zip(wanted);
                pairs.map(|(got, wanted)| f64::from((got - wanted).abs()))
            });
            within_spread(fixture, differences.collect())?;
        }
        Ok(())
    });
    assert!(checked > 0, "there are fixtures without an output head");
}

/// In chunks, beside all other prompts, each prompt has the embedding that it has alone.
#[test]
fn an_embedding_depends_on_its_text_alone() {
    for_each_fixture(false, |fixture, kernels| {
        for source in [fixture.source(), with_mean_pooling(fixture)] {
            let mut model = load(&source, kernels);
            let prompts = fixture.expected.prompts.iter().map(|prompt| &prompt.prompt);
            let alone = prompts.clone().map(|text| embedding(&mut model, text));
            let alone: Vec<Vec<f32>> = alone.collect();
            let together = side_by_side(&mut model, prompts);
            for (alone, together) in alone.iter().zip(&together) {
                if bits(alone) != bits(together) {
                    return Err("chunks or neighbours change an embedding".to_owned());
                }
            }
        }
        Ok(())
    });
}

/// Computes the embeddings of all texts in common steps.
fn side_by_side<'a>(
    model: &mut Model,
    texts: impl Iterator<Item = &'a Vec<TokenId>>,
) -> Vec<Vec<f32>> {
    let (mut sequences, mut pages) = (Vec::new(), 0);
    for text in texts {
        let sequence = Sequence::new(pages, 0, text.clone());
        pages += sequence.pages.len();
        sequences.push((sequence, TextEmbedding::new(model.config())));
    }
    let mut kv = model.new_kv_store(pages).unwrap();
    let mut batch = Batch::new();
    loop {
        batch.clear();
        let mut wanted = Vec::new();
        for (index, (sequence, embedding)) in sequences.iter_mut().enumerate() {
            let left = sequence.tokens.len() - sequence.computed;
            let chunk = left.min(CHUNK);
            let states = embedding.wanted_states(chunk, chunk == left);
            if sequence.push_row(&mut batch, chunk, states).is_some() {
                wanted.extend(std::iter::repeat_n(index, states));
            }
        }
        if batch.rows().is_empty() {
            let finished = sequences.into_iter();
            return finished.map(|(_, text)| text.finish().unwrap()).collect();
        }
        let states = model.forward_states(&batch, &mut kv);
        for (index, state) in wanted.into_iter().zip(states.iter()) {
            sequences[index].1.add(state);
        }
    }
}

#[test]
fn every_instruction_set_computes_the_same_embedding() {
    for fixture in fixtures().iter().filter(|fixture| !fixture.has_head()) {
        let prompt = &fixture.expected.prompts[3].prompt;
        let of_isa = |isa| {
            let mut model = load(&fixture.source(), Kernels::new(isa).unwrap());
            bits(&embedding(&mut model, prompt))
        };
        let scalar = of_isa(Isa::Scalar);
        for isa in Isa::available() {
            assert!(of_isa(isa) == scalar, "{} ({isa})", fixture.name);
        }
    }
}

#[test]
fn a_model_that_generates_text_computes_embeddings_too() {
    let all = fixtures();
    let fixture = all
        .iter()
        .find(|fixture| fixture.name == "qwen3-group64-yarn");
    let source = fixture.unwrap().source();
    assert!(ModelConfig::read(&source).unwrap().has_head);
    let mut model = load(&source, Kernels::best());
    let [one, other] = [[5, 6, 7], [5, 6, 8]].map(|text| embedding(&mut model, &text));
    assert!(bits(&one) != bits(&other));
}
