//! The whole model against the plain forward pass, over every kind of checkpoint; and what must not
//! change a result: chunks, neighbours, threads, shards, a step that failed.

use safetensors::Dtype;
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, Page, SequenceId};

use super::reference::{
    Form, HIDDEN, INTERMEDIATE, Kind, LAYERS, LLAMA, Made, PLAIN, Random, VOCAB,
};
use super::{KvStore, LoadError, LoadOptions, Model, Source, toy};

fn options(threads: usize) -> LoadOptions {
    let kernels = Kernels::new(Isa::best()).unwrap();
    LoadOptions {
        max_step_tokens: 700,
        ..LoadOptions::new(kernels, threads)
    }
}

fn load(made: &Made, threads: usize) -> Model {
    Model::load(&made.source(1), options(threads)).unwrap()
}

/// A row: which sequence, from where to where, and the pages of that sequence.
type Part<'a> = (&'a [u32], std::ops::Range<usize>, u32);

/// A batch of parts of sequences. The pages of a sequence are `first`, `first + 3`, …
fn batch(parts: &[Part<'_>]) -> Batch {
    let mut batch = Batch::new();
    for (sequence, range, first) in parts {
        let pages: Vec<Page> = (0..range.end.div_ceil(16) as u32)
            .map(|i| Page::new(first + 3 * i))
            .collect();
        batch.push_row(
            SequenceId::new(*first, 0),
            range.start,
            &sequence[range.clone()],
            &pages,
            1,
        );
    }
    batch
}

fn rows(model: &mut Model, batch: &Batch, kv: &mut KvStore) -> Vec<Vec<f32>> {
    let vocab = model.config().vocab;
    let logits = model.forward(batch, kv);
    let row = |row| {
        let mut out = vec![0.0; vocab];
        logits.copy_row(row, &mut out);
        out
    };
    (0..logits.rows()).map(row).collect()
}

fn prompt(len: usize, seed: u64, vocab: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len)
        .map(|_| (random.unit() * vocab as f64) as u32)
        .collect()
}

fn check(kind: Kind) {
    let seed = 11;
    let made = Made::new(kind, seed);
    let mut model = load(&made, 2);
    let mut kv = model.new_kv_store(10);
    let tokens = prompt(37, seed, VOCAB);
    let batch = batch(&[(&tokens, 0..tokens.len(), 1)]);

    let mut plain: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&token| made.embedding[token as usize].clone())
        .collect();
    let mut hidden = vec![0.0; tokens.len() * HIDDEN];
    model.embed(&batch, &mut hidden);
    assert_eq!(
        hidden,
        plain.concat().iter().map(|&x| x as f32).collect::<Vec<_>>(),
        "{kind:?}: embedding"
    );
    for layer in 0..LAYERS {
        let mut hidden: Vec<f32> = plain.concat().iter().map(|&x| x as f32).collect();
        model.run_layer(layer, &mut hidden, &batch, &mut kv);
        made.layer(layer, &mut plain);
        // A sum that falls on the other side of a half rounds an activation the other way, which is one
        // token of 37: at most two may.
        check_close(
            &hidden,
            &plain.concat(),
            0.94,
            &format!("{kind:?}, seed {seed}: layer {layer}"),
        );
    }
    // Through both layers, a rounding that falls the other way spreads: fewer values agree closely, none
    // is far off.
    let logits = rows(&mut model, &batch, &mut kv).remove(0);
    let expected = made.logits(plain.last().unwrap());
    let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let worst = logits
        .iter()
        .zip(&expected)
        .map(|(a, b)| (f64::from(*a) - b).abs() / rms)
        .fold(0.0, f64::max);
    assert!(
        worst < 0.05,
        "{kind:?}, seed {seed}: a logit differs by {worst} of their RMS"
    );
}

/// At least `share` of the values are within 1e-3 of the RMS.
fn check_close(values: &[f32], expected: &[f64], share: f64, what: &str) {
    let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let close = values
        .iter()
        .zip(expected)
        .filter(|(a, b)| (f64::from(**a) - **b).abs() < 1e-3 * rms)
        .count();
    let found = close as f64 / values.len() as f64;
    assert!(
        found >= share,
        "{what}: only {found:.4} of the values agree"
    );
}

#[test]
fn packed_weights_of_both_families_match_a_plain_forward() {
    check(PLAIN);
    check(LLAMA);
    check(Kind {
        multiply: false,
        tied: false,
        embedding: Dtype::F16,
        ..PLAIN
    });
    check(Kind {
        multiply: true,
        tied: true,
        embedding: Dtype::F32,
        head_dim: 32,
        ..LLAMA
    });
}

#[test]
fn masters_are_made_ternary_as_they_should_be() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        check(Kind {
            form: Form::Masters(dtype),
            ..PLAIN
        });
    }
    check(Kind {
        form: Form::Masters(Dtype::BF16),
        ..LLAMA
    });
    check(Kind {
        form: Form::Unpacked,
        ..PLAIN
    });
}

#[test]
fn norms_before_linears_and_float_linears_are_computed() {
    check(Kind {
        rms_norm: true,
        ..LLAMA
    });
    check(Kind {
        rms_norm: true,
        form: Form::Masters(Dtype::F32),
        ..PLAIN
    });
    for module in ["k_proj", "mlp.down_proj", "up_proj"] {
        check(Kind {
            float_module: Some(module),
            ..PLAIN
        });
        check(Kind {
            float_module: Some(module),
            rms_norm: true,
            ..LLAMA
        });
    }
    check(Kind {
        ternary_head: true,
        ..LLAMA
    });
}

#[test]
fn shards_hold_the_same_model() {
    let made = Made::new(PLAIN, 5);
    let tokens = prompt(20, 5, VOCAB);
    let run = |source: &Source| {
        let mut model = Model::load(source, options(1)).unwrap();
        let mut kv = model.new_kv_store(8);
        rows(&mut model, &batch(&[(&tokens, 0..20, 0)]), &mut kv)
    };
    assert_eq!(run(&made.source(1)), run(&made.source(3)));
}

#[test]
fn neither_chunks_nor_neighbours_nor_threads_change_a_bit() {
    let (a, b, c) = (prompt(600, 1, 512), prompt(33, 2, 512), prompt(300, 3, 512));
    let source = toy::source();
    let alone: Vec<Vec<f32>> = [(&a, 0), (&b, 1), (&c, 2)]
        .map(|(tokens, first)| {
            let mut model = Model::load(&source, options(1)).unwrap();
            let mut kv = model.new_kv_store(120);
            rows(
                &mut model,
                &batch(&[(tokens, 0..tokens.len(), first)]),
                &mut kv,
            )
            .remove(0)
        })
        .into();
    for threads in [1, 2, 3] {
        let mut model = Model::load(&source, options(threads)).unwrap();
        let mut kv = model.new_kv_store(120);
        // Whatever a recycled page holds, also NaN, is never looked at.
        kv.poison();
        let steps: [&[Part<'_>]; 5] = [
            &[(&a, 0..7, 0), (&b, 0..1, 1)],
            &[(&b, 1..32, 1), (&a, 7..300, 0), (&c, 0..255, 2)],
            &[(&a, 300..301, 0)],
            &[(&c, 255..299, 2), (&a, 301..599, 0)],
            &[(&c, 299..300, 2), (&a, 599..600, 0), (&b, 32..33, 1)],
        ];
        let last = steps
            .map(|step| rows(&mut model, &batch(step), &mut kv))
            .into_iter()
            .last();
        assert_eq!(
            last.unwrap(),
            [alone[2].clone(), alone[0].clone(), alone[1].clone()],
            "{threads} threads"
        );
    }
}

#[test]
fn a_step_that_panics_harms_no_other() {
    let mut model = toy::model(2);
    let mut kv = model.new_kv_store(4);
    let tokens = prompt(20, 4, 512);
    let good = batch(&[(&tokens, 0..20, 0)]);
    let before = rows(&mut model, &good, &mut kv);
    let bad = batch(&[(&[1, 512], 0..2, 0)]);
    let step = std::panic::AssertUnwindSafe(|| drop(rows(&mut model, &bad, &mut kv)));
    assert!(
        std::panic::catch_unwind(step).is_err(),
        "there is no token 512"
    );
    assert_eq!(rows(&mut model, &good, &mut kv), before);
}

fn refusal(change: impl FnOnce(&mut Made)) -> String {
    let mut made = Made::new(PLAIN, 7);
    change(&mut made);
    let result: Result<Model, LoadError> = Model::load(&made.source(1), options(2));
    result.err().expect("the checkpoint is refused").to_string()
}

#[test]
fn tensors_that_are_missing_unknown_or_misshapen_are_named() {
    let (up, norm) = (
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
    );
    for missing in [
        up,
        norm,
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ] {
        let error = refusal(|made| drop(made.tensors.remove(missing)));
        assert!(
            error.contains(missing) && error.contains("missing"),
            "{error}"
        );
    }
    let unknown = "model.layers.0.mlp.up_proj.lrc_U";
    let error = refusal(|made| drop(made.put(unknown, Dtype::F32, &[1], &[0.0])));
    assert!(error.contains(unknown), "{error}");
    let error = refusal(|made| drop(made.put(up, Dtype::U8, &[2, HIDDEN], &[0.0; 2 * HIDDEN])));
    assert!(error.contains(up) && error.contains("shape"), "{error}");
    let error = refusal(|made| drop(made.put(norm, Dtype::U8, &[HIDDEN], &[0.0; HIDDEN])));
    assert!(error.contains(norm), "{error}");
    let error = refusal(|made| drop(made.put(norm, Dtype::F32, &[HIDDEN], &[f64::NAN; HIDDEN])));
    assert!(error.contains(norm), "{error}");
}

#[test]
fn weights_that_are_not_ternary_are_refused() {
    let up = "model.layers.1.mlp.up_proj.weight";
    let error = refusal(|made| made.tensors.get_mut(up).unwrap().2[77] |= 0b11);
    assert!(error.contains(up) && error.contains("is 3"), "{error}");
    let error = refusal(|made| {
        drop(made.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        ))
    });
    assert!(error.contains(up), "{error}");
    let error = refusal(|made| {
        made.tensors.remove(&format!("{up}_scale"));
        made.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        );
    });
    assert!(error.contains(up) && error.contains("online"), "{error}");
    let error = refusal(|made| drop(made.put(&format!("{up}_scale"), Dtype::F32, &[1], &[0.0])));
    assert!(error.contains("weight_scale"), "{error}");
}

#[test]
fn a_head_beside_a_tied_embedding_counts_when_it_differs() {
    let tokens = prompt(5, 9, VOCAB);
    let run = |made: &Made| {
        let mut model = load(made, 1);
        let mut kv = model.new_kv_store(1);
        (
            rows(&mut model, &batch(&[(&tokens, 0..5, 0)]), &mut kv),
            model.weight_bytes(),
        )
    };
    let mut made = Made::new(PLAIN, 9);
    let (plain, bytes) = run(&made);
    let embedding = made.tensors["model.embed_tokens.weight"].clone();
    made.tensors.insert("lm_head.weight".into(), embedding);
    assert_eq!(
        run(&made),
        (plain.clone(), bytes),
        "an equal copy changes nothing"
    );
    made.floats("lm_head.weight", VOCAB, HIDDEN, Dtype::BF16);
    let (own, more_bytes) = run(&made);
    assert!(own != plain && more_bytes > bytes);
    made.tensors.remove("lm_head.weight");
    let embedding = made.tensors.remove("model.embed_tokens.weight").unwrap();
    made.tensors.insert("lm_head.weight".into(), embedding);
    assert_eq!(run(&made).0, plain, "either name may hold what both share");
}
