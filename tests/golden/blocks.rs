//! Block diffusion: the tokens and the number of passes of the reference, which computes everything
//! again in each pass. The demo was trained for causal keys and values, and any model can be run
//! with those of whole blocks too.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use sterna::checkpoint::ModelConfig;
use sterna::engine::{
    Diffusion, Direct, DrawOutcome, Limits, Policy, SamplingParams, TokenId, Unmasking,
};
use sterna::model::{LoadOptions, Model};
use sterna_kernels::{Isa, Kernels};

/// What the reference did.
#[derive(Deserialize)]
struct Expected {
    text: Vec<TokenId>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    block: u32,
    part: u32,
    threshold: f32,
    is_causal: bool,
    /// The length of the prompt, which is the beginning of the text.
    prompt: usize,
    passes: usize,
    output: Vec<TokenId>,
}

impl Case {
    /// Returns the number of steps of a request that runs alone: each pass of the reference, and
    /// the whole blocks of a prompt that has a rest.
    fn steps(&self) -> usize {
        let block = self.block as usize;
        let has_both = self.prompt > block && !self.prompt.is_multiple_of(block);
        self.passes + usize::from(has_both)
    }

    fn limits(&self, mask_token: TokenId) -> Limits {
        Limits {
            pages: 256,
            max_running: 8,
            max_queued: 8,
            max_queued_time: u64::MAX,
            step_tokens: 512,
            prefill_chunk: 512,
            max_sequence_tokens: 1024,
            states: None,
            diffusion: Some(Diffusion {
                block: self.block,
                part: self.part,
                mask_token,
                is_causal: self.is_causal,
            }),
        }
    }
}

/// Returns the output of a request, and the number of steps.
fn run(
    model: &mut Model,
    limits: Limits,
    (prompt, threshold): (&[TokenId], f32),
    output: usize,
) -> (Vec<TokenId>, usize) {
    let mask_token = limits.diffusion.unwrap().mask_token;
    let unmasking = Unmasking {
        threshold,
        mask_token,
    };
    let params = SamplingParams::greedy().by_diffusion(unmasking);
    let mut direct = Direct::new(model, limits, Policy::default());
    let id = direct
        .submit(prompt.to_vec(), output as u32, params)
        .unwrap();
    let (mut tokens, mut steps, mut next) = (BTreeMap::new(), 0, prompt.len());
    while direct.step().is_some() {
        steps += 1;
        for draw in direct.draws() {
            assert_eq!(draw.sequence, id);
            let (position, token) = match &draw.outcome {
                DrawOutcome::Token(output) => (next, output.token),
                DrawOutcome::Unmasked {
                    position, output, ..
                } => (*position, output.token),
                DrawOutcome::Void => continue,
                other => panic!("{other:?}"),
            };
            tokens.insert(position, token);
        }
        next = prompt.len() + tokens.len(); // The draw after whole blocks is of the next token.
    }
    let tokens: Vec<TokenId> = tokens.into_values().take(output).collect();
    (tokens, steps)
}

#[test]
fn blocks_are_filled_as_the_reference_fills_them() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/demo/blocks.json");
    let expected: Expected = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let source = sterna::demo::source();
    let blocks = ModelConfig::read(&source).unwrap().masked_blocks.unwrap();
    assert!(expected.cases.len() > 40, "enough cases");
    for isa in Isa::available() {
        let options = LoadOptions {
            max_step_tokens: 512,
            max_logits_rows: 128,
            ..LoadOptions::new(Kernels::new(isa).unwrap(), 2)
        };
        let mut model = Model::load(&source, options).unwrap();
        // The other instruction sets differ by no bit, as other tests say.
        let step = if isa == Isa::best() { 1 } else { 20 };
        for case in expected.cases.iter().step_by(step) {
            let prompt = &expected.text[..case.prompt];
            let limits = case.limits(blocks.mask_token);
            let (output, steps) = run(
                &mut model,
                limits,
                (prompt, case.threshold),
                case.output.len(),
            );
            let what = format!(
                "{isa}: {} tokens, blocks of {}/{}, above {}, causal {}",
                case.prompt, case.block, case.part, case.threshold, case.is_causal
            );
            assert_eq!(output, case.output, "{what}");
            assert_eq!(steps, case.steps(), "{what}");
        }
    }
}
