//! The kernels on small shapes, large enough that the inner loops outweigh the fixed work of a
//! call.

use std::hint::black_box;

use sterna_kernels::{
    AttentionState, DenseMatrix, DrawNoise, DrawScores, FourBitMatrix, GroupSize, Int8Matrix, Isa,
    Kernels, KvDtype, LOGITS_BLOCK, LogitScale, PAGE_TOKENS, PANEL_ROWS, Packing, PanelScales,
    PrefetchQueue, QuantizedActivations, Rank, SPAN_TOKENS, ScaledActivations, Span, TernaryMatrix,
    f16_from_f32,
};

use crate::{Case, Round};

const ROWS: usize = 64;
const COLUMNS: usize = 640;

const GROUP_SIZE: GroupSize = GroupSize::G128;

/// Query heads that share a KV head.
const GROUP: usize = 4;
const HEAD_DIM: usize = 128;

/// Values of a token in BitNet b1.58 2B-4T.
const WIDTH: usize = 2560;

/// Several blocks of logits and a partial one.
const LOGITS: usize = 10 * LOGITS_BLOCK + 7;

/// One round is enough: every round of a kernel does the same work.
const ROUNDS: u32 = 1;

type Make = fn(Kernels, usize) -> Round;

/// Every case: a kernel, the name of its parameter, the parameter, and the function that prepares
/// it.
const CASES: &[(&str, &str, usize, Make)] = &[
    ("ternary_matmul", "tokens", 1, ternary_matmul),
    ("ternary_matmul", "tokens", 4, ternary_matmul),
    ("ternary_matmul", "tokens", 8, ternary_matmul),
    ("grouped_matmul", "tokens", 1, grouped_matmul),
    ("grouped_matmul", "tokens", 8, grouped_matmul),
    ("int8_matmul", "tokens", 1, int8_matmul),
    ("int8_matmul", "tokens", 8, int8_matmul),
    ("four_bit_matmul", "tokens", 2, four_bit_matmul),
    ("rounded_dot", "columns", 2560, rounded_dot),
    ("dense_matmul", "tokens", 1, dense_matmul),
    ("dense_dots", "columns", WIDTH, dense_dots),
    ("attention", "positions", 1, attention),
    ("attention", "positions", PAGE_TOKENS, attention),
    ("attention_int8", "positions", 1, attention_int8),
    ("attention_int8", "positions", PAGE_TOKENS, attention_int8),
    ("attention_fp8_e4m3", "positions", 1, attention_fp8_e4m3),
    ("quantize", "values", WIDTH, quantize),
    ("quantize_groups", "values", WIDTH, quantize_groups),
    ("copy_row", "columns", COLUMNS, copy_row),
    ("rms_norm", "values", WIDTH, rms_norm),
    ("relu2_gate", "values", WIDTH, relu2_gate),
    ("silu_gate", "values", WIDTH, silu_gate),
    ("rope", "values", WIDTH, rope),
    ("store_kv", "values", HEAD_DIM, store_kv),
    ("store_kv_int8", "values", HEAD_DIM, store_kv_int8),
    ("scale_panel", "tokens", 8, scale_panel),
    ("scan_logits", "logits", LOGITS, scan_logits),
    ("sum_weights", "logits", LOGITS, sum_weights),
    ("best_score", "logits", LOGITS, best_score),
];

/// Returns the cases of an instruction set. Preparing one panics if the CPU lacks the set.
pub(crate) fn cases(isa: Isa) -> impl Iterator<Item = Case> {
    CASES.iter().map(move |&(kernel, unit, number, make)| Case {
        name: format!("{isa}/{kernel}/{unit}={number}"),
        rounds: ROUNDS,
        prepare: Box::new(move || {
            let kernels = Kernels::new(isa).unwrap_or_else(|| panic!("this CPU lacks {isa}"));
            make(kernels, number)
        }),
    })
}

/// Returns values in −1..=1 that do not repeat within a block.
fn values(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| (i * 7919 % 2003) as f32 / 1001.0 - 1.0)
        .collect()
}

fn quantized(kernels: Kernels, tokens: usize) -> QuantizedActivations {
    let mut x = QuantizedActivations::new(tokens, COLUMNS);
    x.reset(tokens, COLUMNS);
    let values = values(COLUMNS);
    x.tokens_mut()
        .for_each(|mut token| kernels.quantize(&values, &mut token));
    x
}

fn ternary_matmul(kernels: Kernels, tokens: usize) -> Round {
    let mut weights = TernaryMatrix::new(ROWS, COLUMNS, Packing::TwoBit);
    let codes: Vec<u8> = (0..COLUMNS).map(|i| (i * 7919 % 2003 % 3) as u8).collect();
    for mut panel in weights.panels_mut() {
        panel.rows().for_each(|row| panel.set_row(row, &codes));
    }
    let x = quantized(kernels, tokens);
    let factors = vec![0.1; tokens];
    let mut out = vec![0.0; tokens * ROWS.next_multiple_of(PANEL_ROWS)];
    Box::new(move || {
        let panels = 0..weights.panels();
        kernels.ternary_matmul(
            black_box(&weights),
            panels,
            ScaledActivations {
                activations: &x,
                factors: &factors,
            },
            &mut out,
            &mut PrefetchQueue::empty(),
        );
        black_box(&mut out);
    })
}

/// Makes a matrix of groups of [`GROUP_SIZE`].
fn grouped_matrix() -> TernaryMatrix {
    let mut weights = TernaryMatrix::with_groups(ROWS, COLUMNS, Packing::TwoBit, GROUP_SIZE)
        .expect("whole groups");
    let codes: Vec<u8> = (0..COLUMNS).map(|i| (i * 7919 % 2003 % 3) as u8).collect();
    let scales = vec![f16_from_f32(0.5); COLUMNS / GROUP_SIZE.columns()];
    for mut panel in weights.panels_mut() {
        for row in panel.rows() {
            panel.set_row(row, &codes);
            panel.set_scales(row, &scales);
        }
    }
    weights
}

fn grouped_matmul(kernels: Kernels, tokens: usize) -> Round {
    let weights = grouped_matrix();
    let mut x = QuantizedActivations::new(tokens, COLUMNS);
    x.reset_groups(tokens, COLUMNS, GROUP_SIZE)
        .expect("whole groups");
    let values = values(COLUMNS);
    x.tokens_mut()
        .for_each(|mut token| kernels.quantize(&values, &mut token));
    let factors = vec![0.1; x.scales().len()];
    let mut out = vec![0.0; tokens * ROWS.next_multiple_of(PANEL_ROWS)];
    Box::new(move || {
        let panels = 0..weights.panels();
        kernels.ternary_matmul(
            black_box(&weights),
            panels,
            ScaledActivations {
                activations: &x,
                factors: &factors,
            },
            &mut out,
            &mut PrefetchQueue::empty(),
        );
        black_box(&mut out);
    })
}

fn copy_row(_: Kernels, columns: usize) -> Round {
    let (weights, mut out) = (grouped_matrix(), vec![0.0; columns]);
    Box::new(move || {
        black_box(&weights).copy_row(black_box(7), &mut out);
        black_box(&mut out);
    })
}

fn quantize_groups(kernels: Kernels, width: usize) -> Round {
    let x = values(width);
    let mut quantized = QuantizedActivations::new(1, width);
    quantized
        .reset_groups(1, width, GROUP_SIZE)
        .expect("whole groups");
    Box::new(move || {
        quantized
            .tokens_mut()
            .for_each(|mut token| kernels.quantize(black_box(&x), &mut token));
        black_box(&quantized);
    })
}

fn int8_matmul(kernels: Kernels, tokens: usize) -> Round {
    let mut weights = Int8Matrix::new(ROWS, COLUMNS);
    let row_values = values(COLUMNS);
    for mut panel in weights.panels_mut() {
        panel.rows().for_each(|row| panel.set_row(row, &row_values));
    }
    let x = quantized(kernels, tokens);
    let mut out = vec![0; tokens * ROWS.next_multiple_of(PANEL_ROWS)];
    Box::new(move || {
        let panels = 0..weights.panels();
        kernels.int8_matmul(black_box(&weights), panels, &x, &mut out);
        black_box(&mut out);
    })
}

fn four_bit_matmul(kernels: Kernels, tokens: usize) -> Round {
    let mut weights = FourBitMatrix::new(ROWS, COLUMNS);
    for mut panel in weights.panels_mut() {
        for row in panel.rows() {
            panel.set_row(row, &mut values(COLUMNS));
        }
    }
    let x = quantized(kernels, tokens);
    let mut out = vec![0; tokens * ROWS.next_multiple_of(PANEL_ROWS)];
    Box::new(move || {
        let panels = 0..weights.panels();
        kernels.four_bit_matmul(black_box(&weights), panels, &x, &mut out);
        black_box(&mut out);
    })
}

fn rounded_dot(kernels: Kernels, columns: usize) -> Round {
    let (weights, q) = (values(columns), vec![100; columns]);
    Box::new(move || {
        black_box(kernels.rounded_dot(black_box(&weights), black_box(0.01), &q));
    })
}

fn dense_matmul(kernels: Kernels, tokens: usize) -> Round {
    let weights = DenseMatrix::from_f32(ROWS, COLUMNS, values(ROWS * COLUMNS));
    let x = values(tokens * COLUMNS);
    let mut out = vec![0.0; tokens * ROWS.next_multiple_of(PANEL_ROWS)];
    Box::new(move || {
        let panels = 0..weights.panels();
        kernels.dense_matmul(black_box(&weights), panels, &x, tokens, &mut out);
        black_box(&mut out);
    })
}

fn dense_dots(kernels: Kernels, columns: usize) -> Round {
    let halves: Vec<u16> = values(columns).into_iter().map(f16_from_f32).collect();
    let weights = DenseMatrix::from_f16(1, columns, halves);
    let x = values(columns);
    let mut out = [0.0];
    Box::new(move || {
        kernels.dense_dots(black_box(&weights), &[0], &x, &mut out);
        black_box(&mut out);
    })
}

fn attention(kernels: Kernels, positions: usize) -> Round {
    attend(kernels, KvDtype::F16, positions)
}

fn attention_int8(kernels: Kernels, positions: usize) -> Round {
    attend(kernels, KvDtype::Int8, positions)
}

fn attention_fp8_e4m3(kernels: Kernels, positions: usize) -> Round {
    attend(kernels, KvDtype::Fp8E4m3, positions)
}

/// Attention over a whole span of keys, from its last positions.
fn attend(kernels: Kernels, dtype: KvDtype, positions: usize) -> Round {
    let page_bytes = dtype.page_bytes(HEAD_DIM);
    let mut memory = vec![0; SPAN_TOKENS / PAGE_TOKENS * page_bytes];
    let tokens = values(2 * SPAN_TOKENS * HEAD_DIM);
    for (token, both) in tokens.chunks(2 * HEAD_DIM).enumerate() {
        let page = &mut memory[token / PAGE_TOKENS * page_bytes..][..page_bytes];
        let (key, value) = both.split_at(HEAD_DIM);
        kernels.store_kv(dtype, key, value, token % PAGE_TOKENS, page);
    }
    let queries = values(HEAD_DIM);
    let mut state = AttentionState::new(GROUP, HEAD_DIM);
    let mut out = vec![0.0; positions * GROUP * HEAD_DIM];
    Box::new(move || {
        let pages: Vec<&[u8]> = memory.chunks(page_bytes).collect();
        state.reset(GROUP, positions, HEAD_DIM);
        for query in 0..positions * GROUP {
            state
                .query_mut(query / GROUP, query % GROUP)
                .copy_from_slice(&queries);
        }
        let span = Span {
            hidden: Span::NONE_HIDDEN,
            pages: &pages,
            next: &[],
            visible: SPAN_TOKENS - (positions - 1),
        };
        kernels.attention_span(dtype, black_box(span), &mut state);
        kernels.attention_finish(&state, &mut out);
        black_box(&mut out);
    })
}

fn quantize(kernels: Kernels, width: usize) -> Round {
    let x = values(width);
    let mut quantized = QuantizedActivations::new(1, width);
    quantized.reset(1, width);
    Box::new(move || {
        quantized
            .tokens_mut()
            .for_each(|mut token| kernels.quantize(black_box(&x), &mut token));
        black_box(&quantized);
    })
}

fn rms_norm(kernels: Kernels, width: usize) -> Round {
    let (x, mut out) = (values(width), vec![0.0; width]);
    Box::new(move || {
        kernels.rms_norm(black_box(&x), &x, 1e-5, &mut out);
        black_box(&mut out);
    })
}

fn relu2_gate(kernels: Kernels, width: usize) -> Round {
    let (x, mut out) = (values(width), vec![0.0; width]);
    Box::new(move || {
        kernels.relu2_gate(black_box(&x), &x, &mut out);
        black_box(&mut out);
    })
}

fn silu_gate(kernels: Kernels, width: usize) -> Round {
    let (x, mut out) = (values(width), vec![0.0; width]);
    Box::new(move || {
        kernels.silu_gate(black_box(&x), &x, &mut out);
        black_box(&mut out);
    })
}

fn rope(kernels: Kernels, width: usize) -> Round {
    let mut x = values(width);
    let (cos, sin) = (vec![0.6; HEAD_DIM / 2], vec![0.8; HEAD_DIM / 2]);
    Box::new(move || kernels.rope(black_box(&mut x), HEAD_DIM, &cos, &sin))
}

fn store_kv(kernels: Kernels, head_dim: usize) -> Round {
    store(kernels, KvDtype::F16, head_dim)
}

fn store_kv_int8(kernels: Kernels, head_dim: usize) -> Round {
    store(kernels, KvDtype::Int8, head_dim)
}

fn store(kernels: Kernels, dtype: KvDtype, head_dim: usize) -> Round {
    let x = values(head_dim);
    let mut page = vec![0; dtype.page_bytes(head_dim)];
    Box::new(move || {
        kernels.store_kv(dtype, black_box(&x), &x, 5, &mut page);
        black_box(&mut page);
    })
}

fn scale_panel(kernels: Kernels, tokens: usize) -> Round {
    let sums = vec![77; tokens * PANEL_ROWS];
    let (scales, factors) = (values(PANEL_ROWS), vec![0.5; tokens]);
    let (mut out, mut largest) = (vec![0.0; tokens * PANEL_ROWS], vec![0.0; tokens]);
    Box::new(move || {
        let scales = PanelScales {
            row_scales: &scales,
            token_factors: &factors,
        };
        kernels.scale_panel(black_box(&sums), scales, &mut out, &mut largest);
        black_box((&mut out, &mut largest));
    })
}

const SCALE: LogitScale = LogitScale {
    largest: 1.0,
    inverse_temperature: 1.25,
};

/// Returns some logits, and the largest of each block.
fn scanned(kernels: Kernels, count: usize) -> (Vec<f32>, Vec<f32>) {
    let (logits, mut peaks) = (values(count), vec![0.0; count.div_ceil(LOGITS_BLOCK)]);
    assert!(kernels.scan_logits(&logits, &mut peaks));
    (logits, peaks)
}

fn scan_logits(kernels: Kernels, count: usize) -> Round {
    let (logits, mut peaks) = scanned(kernels, count);
    Box::new(move || {
        black_box(kernels.scan_logits(black_box(&logits), &mut peaks));
        black_box(&mut peaks);
    })
}

fn sum_weights(kernels: Kernels, count: usize) -> Round {
    let (logits, peaks) = scanned(kernels, count);
    let mut masses = vec![0.0; peaks.len()];
    Box::new(move || {
        kernels.sum_weights(black_box(&logits), SCALE, Rank::END, &peaks, &mut masses);
        black_box(&mut masses);
    })
}

fn best_score(kernels: Kernels, count: usize) -> Round {
    let (logits, peaks) = scanned(kernels, count);
    let scores = DrawScores {
        scale: SCALE,
        noise: DrawNoise::new([1, 2, 3]),
    };
    Box::new(move || {
        let (logits, least) = (black_box(&logits), f32::NEG_INFINITY);
        black_box(kernels.best_score(logits, scores, Rank::END, &peaks, least));
    })
}
