//! Tests of the whole model. Part of them compare it with the plain forward pass of `reference.rs`,
//! for every kind of checkpoint. The others show what must not change a result: chunks, neighbours,
//! threads, shards, drafts, copied pages and a step that failed.

mod mixture;
mod recurrent;
mod reference;

use std::collections::HashMap;

use safetensors::Dtype;
use sterna_kernels::{Isa, Kernels, KvDtype};
use sterna_random::Random;
use sterna_scheduler::{Batch, Page, PageCopy, SequenceId};

use super::{KvStore, LoadOptions, Logits, Model, WantedLogits, toy};
use crate::checkpoint::{LoadError, Source};
use reference::{
    BITNET_KIND, CheckpointKind, Form, HIDDEN, INTERMEDIATE, LAYERS, LLAMA_KIND, TestCheckpoint,
    VOCAB,
};

fn options(threads: usize) -> LoadOptions {
    let kernels = Kernels::new(Isa::best()).unwrap();
    LoadOptions {
        max_step_tokens: 700,
        ..LoadOptions::new(kernels, threads)
    }
}

/// Loads the toy with every instruction set of this machine, and with every other format of keys
/// and values.
fn toys(threads: usize) -> impl Iterator<Item = (String, Model)> {
    let all = Isa::available().map(|isa| (isa, KvDtype::F16));
    let all = all.chain(KvDtype::ALL[1..].iter().map(|&dtype| (Isa::best(), dtype)));
    all.map(move |(isa, kv_dtype)| {
        let options = LoadOptions {
            kernels: Kernels::new(isa).unwrap(),
            kv_dtype,
            ..options(threads)
        };
        let model = Model::load(&toy::source(), options).unwrap();
        (format!("{isa}, {kv_dtype}"), model)
    })
}

fn load(checkpoint: &TestCheckpoint, threads: usize) -> Model {
    Model::load(&checkpoint.source(1), options(threads)).unwrap()
}

/// A row: a sequence, the positions in it, and its first page.
type RowSpec<'a> = (&'a [u32], std::ops::Range<usize>, u32);

/// Returns a batch of rows with the logits after the last token of each. The pages of a sequence
/// are `first`, `first + 3`, …
fn batch(rows: &[RowSpec<'_>]) -> Batch {
    let mut batch = Batch::new();
    for row in rows {
        push(&mut batch, row, 1);
    }
    batch
}

/// Adds a row, with the logits after its last `logits` tokens.
fn push(batch: &mut Batch, (sequence, range, first): &RowSpec<'_>, logits: usize) {
    let pages: Vec<Page> = (0..range.end.div_ceil(16) as u32)
        .map(|i| Page::new(first + 3 * i))
        .collect();
    let (id, tokens) = (SequenceId::new(*first, 0), &sequence[range.clone()]);
    batch.push_row(id, range.start, tokens, &pages, logits);
}

fn rows(model: &mut Model, batch: &Batch, kv: &mut KvStore) -> Vec<Vec<f32>> {
    let vocab = model.config().vocab;
    read(model.forward(batch, kv), vocab)
}

fn read(logits: &Logits, vocab: usize) -> Vec<Vec<f32>> {
    let row = |row| {
        let mut out = vec![0.0; vocab];
        logits.copy_row(row, &mut out);
        out
    };
    (0..logits.rows()).map(row).collect()
}

fn prompt(len: usize, seed: u64, vocab: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.index(vocab) as u32).collect()
}

fn check(kind: CheckpointKind) {
    let seed = 11;
    let checkpoint = TestCheckpoint::new(kind, seed);
    let mut model = load(&checkpoint, 2);
    let mut kv = model.new_kv_store(10).unwrap();
    let tokens = prompt(37, seed, VOCAB);
    let batch = batch(&[(&tokens, 0..tokens.len(), 1)]);

    let mut plain: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&token| checkpoint.embedding[token as usize].clone())
        .collect();
    let mut hidden = Vec::new();
    model.embed(&batch, &mut hidden);
    assert_eq!(
        hidden,
        plain.concat().iter().map(|&x| x as f32).collect::<Vec<_>>(),
        "{kind:?}: embedding"
    );
    for layer in 0..LAYERS {
        let mut hidden: Vec<f32> = plain.concat().iter().map(|&x| x as f32).collect();
        model.run_layers(layer..layer + 1, &mut hidden, &batch, &mut kv);
        checkpoint.layer(layer, &mut plain);
        // Different last bits may round an activation the other way, which changes one token of 37.
        // At most two tokens may differ.
        check_close(
            &hidden,
            &plain.concat(),
            0.94,
            &format!("{kind:?}, seed {seed}: layer {layer}"),
        );
    }
    // Such a difference spreads through the second layer: fewer values agree closely, but none is
    // far off.
    let logits = rows(&mut model, &batch, &mut kv).remove(0);
    let expected = checkpoint.logits(plain.last().unwrap());
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

/// Checks that at least `share` of the values are within 1e-3 of the RMS.
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
    check(BITNET_KIND);
    check(LLAMA_KIND);
    check(CheckpointKind {
        multiply: false,
        tied: false,
        embedding: Dtype::F16,
        ..BITNET_KIND
    });
    check(CheckpointKind {
        multiply: true,
        tied: true,
        embedding: Dtype::F32,
        head_dim: 32,
        ..LLAMA_KIND
    });
}

/// Several workers share the spans of a decode. In a chunk and with one thread, nothing is shared.
#[test]
fn a_decode_at_depth_has_the_same_bits_with_any_number_of_threads() {
    let (a, b) = (
        prompt(1000, 1, toy::SHAPE.vocab),
        prompt(530, 2, toy::SHAPE.vocab),
    );
    let mut expected: HashMap<KvDtype, Vec<Vec<f32>>> = HashMap::new();
    for threads in [1, 2, 3, 5, 9] {
        for (what, mut model) in toys(threads) {
            let dtype = model.kv_dtype();
            let mut kv = model.new_kv_store(3 * 63).unwrap();
            for range in [0..700, 700..990] {
                rows(&mut model, &batch(&[(&a, range, 0)]), &mut kv);
            }
            rows(&mut model, &batch(&[(&b, 0..529, 1)]), &mut kv);
            let in_chunk = rows(&mut model, &batch(&[(&a, 990..1000, 0)]), &mut kv).remove(0);
            let alone = rows(&mut model, &batch(&[(&a, 999..1000, 0)]), &mut kv);
            assert_eq!(alone[0], in_chunk, "{what}, {threads} threads");
            let both: [RowSpec<'_>; 2] = [(&a, 999..1000, 0), (&b, 529..530, 1)];
            let both = rows(&mut model, &batch(&both), &mut kv);
            assert_eq!(both[0], in_chunk, "{what}, {threads} threads");
            let first = expected.entry(dtype).or_insert_with(|| both.clone());
            assert_eq!(*first, both, "{what}, {threads} threads");
        }
    }
}

#[test]
fn master_weights_are_made_ternary_on_loading() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        check(CheckpointKind {
            form: Form::Masters(dtype),
            ..BITNET_KIND
        });
    }
    check(CheckpointKind {
        form: Form::Masters(Dtype::BF16),
        ..LLAMA_KIND
    });
    check(CheckpointKind {
        form: Form::Unpacked,
        ..BITNET_KIND
    });
}

#[test]
fn input_norms_and_float_linears_match_a_plain_forward() {
    check(CheckpointKind {
        rms_norm: true,
        ..LLAMA_KIND
    });
    check(CheckpointKind {
        rms_norm: true,
        form: Form::Masters(Dtype::F32),
        ..BITNET_KIND
    });
    for module in ["k_proj", "mlp.down_proj", "up_proj"] {
        check(CheckpointKind {
            float_module: Some(module),
            ..BITNET_KIND
        });
        check(CheckpointKind {
            float_module: Some(module),
            rms_norm: true,
            ..LLAMA_KIND
        });
    }
    check(CheckpointKind {
        ternary_head: true,
        ..LLAMA_KIND
    });
}

#[test]
fn low_rank_corrections_match_a_plain_forward() {
    for (rank, dtype) in [(1, Dtype::F32), (5, Dtype::BF16), (20, Dtype::F16)] {
        let low_rank = Some((rank, dtype));
        check(CheckpointKind {
            low_rank,
            ..BITNET_KIND
        });
        check(CheckpointKind {
            low_rank,
            form: Form::Masters(Dtype::F32),
            ternary_head: true,
            ..LLAMA_KIND
        });
    }
}

#[test]
fn low_rank_corrections_have_the_same_bits_in_any_batch_and_on_every_isa() {
    let kind = CheckpointKind {
        low_rank: Some((5, Dtype::BF16)),
        ..BITNET_KIND
    };
    let source = TestCheckpoint::new(kind, 3).source(1);
    let (a, b) = (prompt(40, 1, VOCAB), prompt(21, 2, VOCAB));
    let mut expected = None;
    for isa in Isa::available() {
        for threads in [1, 3] {
            let options = LoadOptions {
                kernels: Kernels::new(isa).unwrap(),
                ..options(threads)
            };
            let mut model = Model::load(&source, options).unwrap();
            let mut kv = model.new_kv_store(12).unwrap();
            let alone = [
                rows(&mut model, &batch(&[(&a, 0..40, 0)]), &mut kv).remove(0),
                rows(&mut model, &batch(&[(&b, 0..21, 1)]), &mut kv).remove(0),
            ];
            rows(
                &mut model,
                &batch(&[(&a, 0..39, 0), (&b, 0..7, 1)]),
                &mut kv,
            );
            rows(&mut model, &batch(&[(&b, 7..20, 1)]), &mut kv);
            let last = batch(&[(&a, 39..40, 0), (&b, 20..21, 1)]);
            let together = rows(&mut model, &last, &mut kv);
            assert_eq!(together, alone, "{isa}, {threads} threads");
            assert_eq!(*expected.get_or_insert(together.clone()), together, "{isa}");
        }
    }
}

#[test]
fn a_low_rank_correction_that_cannot_be_computed_is_refused_by_name() {
    let module = "model.layers.1.mlp.up_proj";
    let [u, v] = ["lrc_U", "lrc_V"].map(|part| format!("{module}.{part}"));
    let put = |checkpoint: &mut TestCheckpoint, name: &str, shape: [usize; 2]| {
        let values = vec![0.5; shape[0] * shape[1]];
        checkpoint.put(name, Dtype::F32, &shape, &values);
    };
    let (rows, columns) = (INTERMEDIATE, HIDDEN);
    for (up, down, named) in [
        (Some([rows, 4]), None, &v),
        (None, Some([columns, 4]), &u),
        (Some([rows, 4]), Some([4, columns]), &v),
        (Some([rows, 4]), Some([columns, 5]), &v),
        (Some([rows + 1, 4]), Some([columns, 4]), &u),
        (Some([rows, 65]), Some([columns, 65]), &u),
        (Some([rows, 0]), Some([columns, 0]), &u),
    ] {
        let error = refusal(|checkpoint| {
            for (name, shape) in [(&u, up), (&v, down)] {
                if let Some(shape) = shape {
                    put(checkpoint, name, shape);
                }
            }
        });
        assert!(error.contains(named.as_str()), "{error}");
    }
    let error = refusal(|checkpoint| {
        put(checkpoint, &u, [rows, 4]);
        let nan = vec![f64::NAN; columns * 4];
        checkpoint.put(&v, Dtype::F32, &[columns, 4], &nan);
    });
    assert!(error.contains(&v) && error.contains("finite"), "{error}");
    let error = refusal(|checkpoint| {
        *checkpoint = TestCheckpoint::new(
            CheckpointKind {
                rms_norm: true,
                low_rank: Some((4, Dtype::F32)),
                ..BITNET_KIND
            },
            7,
        );
    });
    assert!(
        error.contains("lrc_U") && error.contains("input norm"),
        "{error}"
    );
}

#[test]
fn shards_hold_the_same_model() {
    let checkpoint = TestCheckpoint::new(BITNET_KIND, 5);
    let tokens = prompt(20, 5, VOCAB);
    let run = |source: &Source| {
        let mut model = Model::load(source, options(1)).unwrap();
        let mut kv = model.new_kv_store(8).unwrap();
        rows(&mut model, &batch(&[(&tokens, 0..20, 0)]), &mut kv)
    };
    assert_eq!(run(&checkpoint.source(1)), run(&checkpoint.source(3)));
}

/// In a forward pass, each layer adds the pending output of the layer before.
#[test]
fn a_forward_pass_equals_its_layers_run_one_by_one() {
    for (isa, mut model) in toys(2) {
        let vocab = model.config().vocab;
        let tokens = prompt(37, 5, vocab);
        let batch = batch(&[(&tokens, 0..tokens.len(), 1)]);
        let mut kv = model.new_kv_store(10).unwrap();
        let expected = rows(&mut model, &batch, &mut kv);
        let mut hidden = Vec::new();
        model.embed(&batch, &mut hidden);
        for layer in 0..model.config().layers {
            model.run_layers(layer..layer + 1, &mut hidden, &batch, &mut kv);
        }
        model.compute_logits(&hidden, &WantedLogits::default());
        assert_eq!(read(model.step_logits().logits(), vocab), expected, "{isa}");
    }
}

#[test]
fn neither_chunks_nor_neighbours_nor_threads_change_a_bit() {
    KvDtype::ALL.into_iter().for_each(check_independence);
}

/// Checks that the logits of three sequences do not depend on chunks, neighbours and threads.
fn check_independence(kv_dtype: KvDtype) {
    let (a, b, c) = (prompt(600, 1, 512), prompt(33, 2, 512), prompt(300, 3, 512));
    let source = toy::source();
    let options = |threads| LoadOptions {
        kv_dtype,
        ..options(threads)
    };
    let alone: Vec<Vec<f32>> = [(&a, 0), (&b, 1), (&c, 2)]
        .map(|(tokens, first)| {
            let mut model = Model::load(&source, options(1)).unwrap();
            let mut kv = model.new_kv_store(120).unwrap();
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
        let mut kv = model.new_kv_store(120).unwrap();
        // The old content of a recycled page is never read, not even NaN.
        kv.poison();
        let steps: [&[RowSpec<'_>]; 5] = [
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
            "{threads} threads, {kv_dtype}"
        );
    }
}

#[test]
fn formats_of_keys_and_values_differ_and_are_close() {
    let tokens = prompt(300, 1, 512);
    let mut exact: Vec<f32> = Vec::new();
    for (what, mut model) in toys(2) {
        let mut kv = model.new_kv_store(60).unwrap();
        let logits = rows(&mut model, &batch(&[(&tokens, 0..300, 0)]), &mut kv).remove(0);
        if exact.is_empty() {
            exact = logits;
            continue;
        }
        assert_eq!(logits == exact, model.kv_dtype() == KvDtype::F16, "{what}");
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        let norms = (dot(&logits, &logits) * dot(&exact, &exact)).sqrt();
        let cosine = dot(&logits, &exact) / norms;
        // Random weights amplify every difference.
        assert!(cosine > 0.9, "{what}: {cosine}");
    }
}

#[test]
fn drafted_tokens_have_the_logits_of_single_decodes() {
    // The rows cross a page (16 tokens) and a span of attention (256 keys). The last one is a
    // prompt with all logits.
    let (a, b, c) = (prompt(270, 1, 512), prompt(40, 2, 512), prompt(9, 3, 512));
    let specs: [RowSpec<'_>; 3] = [(&a, 250..258, 0), (&b, 29..34, 1), (&c, 0..9, 2)];
    for threads in [1, 2, 3] {
        for (isa, mut model) in toys(threads) {
            let mut kv = model.new_kv_store(120).unwrap();
            kv.poison();
            let prompts = batch(&[(&a, 0..250, 0), (&b, 0..29, 1)]);
            rows(&mut model, &prompts, &mut kv);
            let mut single = Vec::new();
            for (tokens, range, first) in &specs {
                for at in range.clone() {
                    let step = batch(&[(tokens, at..at + 1, *first)]);
                    single.extend(rows(&mut model, &step, &mut kv));
                }
            }
            // Rejected draft tokens are still in the pages; the next ones overwrite them.
            let refused = prompt(300, 7, 512);
            let wrong = batch(&[(&refused, 250..260, 0), (&refused, 29..36, 1)]);
            rows(&mut model, &wrong, &mut kv);
            let mut drafted = Batch::new();
            for spec in &specs {
                push(&mut drafted, spec, spec.1.len());
            }
            assert!(
                rows(&mut model, &drafted, &mut kv) == single,
                "{threads} threads, {isa}"
            );
        }
    }
}

#[test]
fn the_tokens_of_a_block_attend_to_all_of_the_block() {
    let seed = 12;
    let checkpoint = TestCheckpoint::new(BITNET_KIND, seed);
    let mut model = load(&checkpoint, 2);
    let mut kv = model.new_kv_store(10).unwrap();
    let (tokens, start) = (prompt(37, seed, VOCAB), 21);
    let before = batch(&[(&tokens, 0..start, 1)]);
    let mut block = batch(&[(&tokens, start..37, 1)]);
    block.set_block(u32::MAX);
    let embedded = tokens
        .iter()
        .map(|&token| checkpoint.embedding[token as usize].clone());
    let plain: Vec<Vec<f64>> = embedded.collect();
    let mut hidden: Vec<f32> = plain.concat().iter().map(|&x| x as f32).collect();
    let (first, last) = hidden.split_at_mut(start * HIDDEN);
    let [mut first, mut last] = [first, last].map(|rows| rows.to_vec());
    model.run_layers(0..1, &mut first, &before, &mut kv);
    model.run_layers(0..1, &mut last, &block, &mut kv);
    let [mut expected, mut causal] = [plain.clone(), plain];
    checkpoint.layer_with_block(0, &mut expected, start);
    checkpoint.layer(0, &mut causal);
    check_close(&last, &expected[start..].concat(), 0.94, "the block");
    check_close(&first, &causal[..start].concat(), 0.94, "before the block");
    let differs = |(a, b): (&Vec<f64>, &Vec<f64>)| a != b;
    let differing = expected
        .iter()
        .zip(&causal)
        .filter(|rows| differs(*rows))
        .count();
    assert_eq!(differing, 37 - start - 1, "the last token sees the same");
}

#[test]
fn neither_neighbours_nor_threads_change_a_bit_of_a_block_and_it_leaves_nothing() {
    let (a, b) = (prompt(300, 1, 512), prompt(60, 2, 512));
    let push_block = |batch: &mut Batch, spec: &RowSpec<'_>| {
        push(batch, spec, spec.1.len());
        batch.set_block(u32::MAX);
    };
    // The blocks cross a page (16 tokens), and the first one crosses a span of attention.
    let specs: [RowSpec<'_>; 2] = [(&a, 250..262, 0), (&b, 29..36, 1)];
    let mut expected: Vec<(String, Vec<Vec<f32>>)> = Vec::new();
    for threads in [1, 2, 3] {
        for (place, (what, mut model)) in toys(threads).enumerate() {
            let mut kv = model.new_kv_store(120).unwrap();
            kv.poison();
            let prompts = batch(&[(&a, 0..250, 0), (&b, 0..29, 1)]);
            rows(&mut model, &prompts, &mut kv);
            let next = batch(&[(&a, 250..251, 0), (&b, 29..30, 1)]);
            let plain = rows(&mut model, &next, &mut kv);
            let mut alone = Vec::new();
            for spec in &specs {
                let mut block = Batch::new();
                push_block(&mut block, spec);
                alone.extend(rows(&mut model, &block, &mut kv));
            }
            let mut together = Batch::new();
            let c = prompt(40, 3, 512);
            push(&mut together, &(&c, 0..40, 2), 0);
            specs
                .iter()
                .for_each(|spec| push_block(&mut together, spec));
            assert!(rows(&mut model, &together, &mut kv) == alone, "{what}");
            assert!(
                rows(&mut model, &next, &mut kv) == plain,
                "{what}: the blocks leave nothing"
            );
            if threads == 1 {
                expected.push((what, alone));
            } else {
                assert!(expected[place] == (what, alone), "{threads} threads");
            }
        }
    }
    let of_isas = expected
        .iter()
        .filter(|(what, _)| what.ends_with("f16") && !what.contains("bf16"));
    let of_isas: Vec<_> = of_isas.map(|(_, rows)| rows).collect();
    assert!(of_isas.len() > 1 && of_isas.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_copied_page_with_new_tokens_at_its_end_equals_a_computed_page() {
    let (a, tail) = (prompt(48, 1, 512), prompt(48, 2, 512));
    for (isa, mut model) in toys(2) {
        for shared in [1, 25, 31, 40] {
            // b is as long as a, and begins with the same `shared` tokens.
            let b = [&a[..shared], &tail[shared..]].concat();
            let mut kv = model.new_kv_store(20).unwrap();
            let mut fresh = Batch::new();
            push(&mut fresh, &(&b, 0..48, 1), 48 - shared);
            let expected = rows(&mut model, &fresh, &mut kv);

            kv.poison();
            let before = rows(&mut model, &batch(&[(&a, 0..47, 0)]), &mut kv);
            // b reads the fully shared pages of a, and owns a copy of the partly shared page.
            let whole = shared / 16;
            let pages: Vec<Page> = (0..3)
                .map(|page| Page::new(3 * page as u32 + u32::from(page >= whole)))
                .collect();
            let mut copied = Batch::new();
            copied.push_copy(PageCopy {
                from: Page::new(3 * whole as u32),
                to: pages[whole],
            });
            let id = SequenceId::new(1, 0);
            copied.push_row(id, shared, &b[shared..], &pages, 48 - shared);
            assert!(
                rows(&mut model, &copied, &mut kv) == expected,
                "{shared} shared tokens, {isa}"
            );
            // The copied page has not changed.
            let again = rows(&mut model, &batch(&[(&a, 46..47, 0)]), &mut kv);
            assert!(again == before, "{shared} shared tokens, {isa}");
        }
    }
}

#[test]
#[should_panic(expected = "a row writes to a page that is copied")]
fn a_step_that_writes_to_a_copied_page_panics() {
    let tokens = prompt(20, 1, 512);
    let mut model = toy::model(1);
    let mut kv = model.new_kv_store(8).unwrap();
    let mut step = batch(&[(&tokens, 0..20, 0)]);
    step.push_copy(PageCopy {
        from: Page::new(3),
        to: Page::new(1),
    });
    model.forward(&step, &mut kv);
}

#[test]
fn the_step_after_a_panic_is_computed_correctly() {
    let mut model = toy::model(2);
    let mut kv = model.new_kv_store(4).unwrap();
    let tokens = prompt(20, 4, 512);
    let good = batch(&[(&tokens, 0..20, 0)]);
    let before = rows(&mut model, &good, &mut kv);
    let bad = batch(&[(&[1, 512], 0..2, 0)]);
    let step = std::panic::AssertUnwindSafe(|| drop(rows(&mut model, &bad, &mut kv)));
    assert!(
        std::panic::catch_unwind(step).is_err(),
        "token 512 does not exist"
    );
    assert_eq!(rows(&mut model, &good, &mut kv), before);
}

fn refusal(change: impl FnOnce(&mut TestCheckpoint)) -> String {
    let mut checkpoint = TestCheckpoint::new(BITNET_KIND, 7);
    change(&mut checkpoint);
    let result: Result<Model, LoadError> = Model::load(&checkpoint.source(1), options(2));
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
        let error = refusal(|checkpoint| drop(checkpoint.tensors.remove(missing)));
        assert!(
            error.contains(missing) && error.contains("missing"),
            "{error}"
        );
    }
    let unknown = "model.layers.0.mlp.up_proj.bias";
    let error = refusal(|checkpoint| drop(checkpoint.put(unknown, Dtype::F32, &[1], &[0.0])));
    assert!(error.contains(unknown), "{error}");
    let error =
        refusal(|checkpoint| drop(checkpoint.put(up, Dtype::U8, &[2, HIDDEN], &[0.0; 2 * HIDDEN])));
    assert!(error.contains(up) && error.contains("shape"), "{error}");
    let error =
        refusal(|checkpoint| drop(checkpoint.put(norm, Dtype::U8, &[HIDDEN], &[0.0; HIDDEN])));
    assert!(error.contains(norm), "{error}");
    let error = refusal(|checkpoint| {
        drop(checkpoint.put(norm, Dtype::F32, &[HIDDEN], &[f64::NAN; HIDDEN]))
    });
    assert!(error.contains(norm), "{error}");
}

#[test]
fn a_missing_directory_and_a_missing_file_have_different_errors() {
    let error = |directory: &std::path::Path| {
        let source = Source::directory(directory);
        let result = Model::load(&source, options(1));
        result.err().expect("nothing to load").to_string()
    };
    let here = std::env::current_dir().unwrap().join("src");
    let file = error(&here);
    assert!(file.contains("no such file in"), "{file}");
    assert!(file.contains("*.safetensors, or a .gguf"), "{file}");
    let directory = error(&here.join("nowhere"));
    assert!(directory.contains("no directory"), "{directory}");
}

#[test]
fn weights_that_are_not_ternary_are_refused() {
    let up = "model.layers.1.mlp.up_proj.weight";
    let error = refusal(|checkpoint| checkpoint.tensors.get_mut(up).unwrap().2[77] |= 0b11);
    assert!(error.contains(up) && error.contains("is 3"), "{error}");
    let error = refusal(|checkpoint| {
        drop(checkpoint.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        ))
    });
    assert!(error.contains(up), "{error}");
    let error = refusal(|checkpoint| {
        checkpoint.tensors.remove(&format!("{up}_scale"));
        checkpoint.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        );
    });
    assert!(error.contains(up) && error.contains("online"), "{error}");
    let error = refusal(|checkpoint| {
        drop(checkpoint.put(&format!("{up}_scale"), Dtype::F32, &[1], &[0.0]))
    });
    assert!(error.contains("weight_scale"), "{error}");
}

#[test]
fn a_head_beside_a_tied_embedding_is_used_if_it_differs() {
    let tokens = prompt(5, 9, VOCAB);
    let run = |checkpoint: &TestCheckpoint| {
        let mut model = load(checkpoint, 1);
        let mut kv = model.new_kv_store(1).unwrap();
        (
            rows(&mut model, &batch(&[(&tokens, 0..5, 0)]), &mut kv),
            model.weight_bytes(),
        )
    };
    let mut checkpoint = TestCheckpoint::new(BITNET_KIND, 9);
    let (plain, bytes) = run(&checkpoint);
    let embedding = checkpoint.tensors["model.embed_tokens.weight"].clone();
    checkpoint
        .tensors
        .insert("lm_head.weight".into(), embedding);
    assert_eq!(
        run(&checkpoint),
        (plain.clone(), bytes),
        "an equal head changes nothing"
    );
    checkpoint.floats("lm_head.weight", VOCAB, HIDDEN, Dtype::BF16);
    let (own, more_bytes) = run(&checkpoint);
    assert!(own != plain && more_bytes > bytes);
    checkpoint.tensors.remove("lm_head.weight");
    let embedding = checkpoint
        .tensors
        .remove("model.embed_tokens.weight")
        .unwrap();
    checkpoint
        .tensors
        .insert("lm_head.weight".into(), embedding);
    assert_eq!(
        run(&checkpoint).0,
        plain,
        "either name may hold the shared matrix"
    );
}
