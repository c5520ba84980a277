//! Attention of decodes and of chunks of prompts, in every number format.

use std::hint::black_box;
use std::ops::Range;

use sterna::bench::{LimitsProbe, MachineLimits};
use sterna_kernels::{
    AttentionState, HugeSlice, Isa, Kernels, KvDtype, PAGE_TOKENS, SPAN_TOKENS, Span,
};

use crate::measure::{KernelBench, Work, per_nanosecond};

/// Query heads that share a KV head.
const GROUP: usize = 4;

const HEAD_DIM: usize = 128;

/// Measures decodes at some contexts, and chunks of prompts at some depths.
pub(crate) fn measure(bench: KernelBench<'_>, probe: &LimitsProbe) {
    let scalar = bench.kernels.isa() == Isa::Scalar;
    for context in [256, 512, 2048, 4096] {
        let shrink = if bench.smoke || scalar { 16 } else { 1 };
        for dtype in KvDtype::ALL {
            decode(bench, &probe.sample(), dtype, context / shrink);
        }
    }
    for (chunk, depth) in [128, 512]
        .into_iter()
        .flat_map(|chunk| [0, 2048, 4096].map(|depth| (chunk, depth)))
    {
        let shrink = if bench.smoke || scalar { 8 } else { 1 };
        for dtype in KvDtype::ALL {
            prefill(bench, dtype, chunk / shrink, depth / shrink);
        }
    }
}

/// The kernels of attention in one number format.
#[derive(Clone, Copy)]
struct KvKernels {
    kernels: Kernels,
    dtype: KvDtype,
}

impl KvKernels {
    /// Returns memory of `heads` KV heads with `keys` keys each, all pages alike.
    fn memory(self, heads: usize, keys: usize) -> HugeSlice<u8> {
        let mut page = vec![0; self.dtype.page_bytes(HEAD_DIM)];
        for slot in 0..PAGE_TOKENS {
            let token: Vec<f32> = (0..HEAD_DIM).map(|i| ((i + slot) as f32).sin()).collect();
            (self.kernels).store_kv(self.dtype, &token, &token, slot, &mut page);
        }
        let mut memory = HugeSlice::new(heads * keys.div_ceil(PAGE_TOKENS) * page.len());
        memory
            .chunks_mut(page.len())
            .for_each(|of_page| of_page.copy_from_slice(&page));
        memory
    }

    /// Returns the pages of each of `heads` KV heads.
    fn pages(self, memory: &[u8], heads: usize) -> Vec<Vec<&[u8]>> {
        let page_bytes = self.dtype.page_bytes(HEAD_DIM);
        let heads = memory.chunks(memory.len() / heads);
        heads
            .map(|head| head.chunks(page_bytes).collect())
            .collect()
    }
}

/// Computes the attention of queries at up to one page of positions.
fn attend(
    KvKernels { kernels, dtype }: KvKernels,
    pages: &[&[u8]],
    next: &[&[u8]],
    positions: Range<usize>,
    state: &mut AttentionState,
) {
    state.reset(GROUP, positions.len(), HEAD_DIM);
    for query in 0..positions.len() * GROUP {
        state.query_mut(query / GROUP, query % GROUP).fill(0.25);
    }
    let seen = &pages[..positions.end.div_ceil(PAGE_TOKENS)];
    let mut spans = seen.chunks(SPAN_TOKENS / PAGE_TOKENS).peekable();
    let mut before = 0;
    while let Some(pages) = spans.next() {
        let span = Span {
            hidden: Span::NONE_HIDDEN,
            pages,
            next: spans.peek().copied().unwrap_or(next),
            visible: SPAN_TOKENS.min(positions.start + 1 - before),
        };
        kernels.attention_span(dtype, span, state);
        before += SPAN_TOKENS;
    }
}

/// Measures one decode step's attention of one sequence: 30 layers of 5 KV heads, each with 4 query
/// heads of 128 values.
fn decode(bench: KernelBench<'_>, limits: &MachineLimits, dtype: KvDtype, context: usize) {
    let kv_heads = if bench.smoke { 2 } else { 30 * 5 };
    let name = format!("attention {dtype}, {kv_heads} × {context} keys");
    if !bench.measures(&name) {
        return;
    }
    let kernels = KvKernels {
        kernels: bench.kernels,
        dtype,
    };
    let memory = kernels.memory(kv_heads, context);
    let heads = kernels.pages(&memory, kv_heads);
    let time = bench.best(bench.passes, |thread| {
        let mut state = AttentionState::new(GROUP, HEAD_DIM);
        let mut out = vec![0.0; GROUP * HEAD_DIM];
        for head in bench.share(kv_heads, thread) {
            let next = &heads[(head + 1) % kv_heads];
            let next = &next[..next.len().min(SPAN_TOKENS / PAGE_TOKENS)];
            attend(
                kernels,
                &heads[head],
                next,
                context - 1..context,
                &mut state,
            );
            bench.kernels.attention_finish(&state, &mut out);
            black_box(&mut out);
        }
    });
    let operations = 4 * kv_heads * GROUP * HEAD_DIM * context;
    let bytes = memory.len();
    bench.print(limits, &name, Work { bytes, operations }, time);
}

/// Measures one layer's attention of a chunk of a prompt at some depth, and prints it beside how
/// fast this instruction set multiplies and adds in single precision.
fn prefill(bench: KernelBench<'_>, dtype: KvDtype, chunk: usize, depth: usize) {
    let name = format!("attention {dtype}, {chunk} tokens after {depth}");
    if !bench.measures(&name) {
        return;
    }
    let kv_heads = 2 * bench.threads;
    let rounds = if bench.smoke { 1000 } else { 2_000_000 };
    let operations = bench.threads as u64 * bench.kernels.probe_f32(1) * rounds;
    let probe = bench.best(3, |_| {
        bench.kernels.probe_f32(rounds);
    });
    let kernels = KvKernels {
        kernels: bench.kernels,
        dtype,
    };
    let memory = kernels.memory(kv_heads, depth + chunk);
    let heads = kernels.pages(&memory, kv_heads);
    let time = bench.best(bench.passes.min(3), |thread| {
        let mut state = AttentionState::new(GROUP, HEAD_DIM);
        let mut out = vec![0.0; PAGE_TOKENS * GROUP * HEAD_DIM];
        for head in bench.share(kv_heads, thread) {
            for position in (depth..depth + chunk).step_by(PAGE_TOKENS) {
                let positions = position..position + PAGE_TOKENS;
                attend(kernels, &heads[head], &[], positions, &mut state);
                bench.kernels.attention_finish(&state, &mut out);
                black_box(&mut out);
            }
        }
    });
    let keys: usize = (depth + 1..=depth + chunk).sum();
    let done = per_nanosecond(4 * kv_heads * GROUP * HEAD_DIM * keys, time);
    let peak = operations as f64 / probe.as_nanos() as f64;
    if !bench.smoke {
        println!(
            "  {name:<32} {:>9.3} ms {done:>7.0} Gflop/s, {:.0} % of {peak:.0}",
            time.as_secs_f64() * 1e3,
            100.0 * done / peak,
        );
    }
}
