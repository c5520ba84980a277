//! Kernel speed beside this machine's own limits, measured in the same run: how fast it reads memory and multiplies small integers.
//!
//! `cargo bench --bench kernels` measures the shapes of BitNet b1.58 2B-4T, streaming enough distinct matrices that none comes from a
//! cache; `-- avx2 head int8` only those kernels of AVX2 that have both words in their names. Without `--bench` (so in `cargo test --benches`), or with `--test`, everything runs once and small, and prints no figures,
//! since they would mean nothing.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sterna::bench::{Limits, Probe};
use sterna::cores;
use sterna_kernels::{
    AttentionState, DenseMatrix, HugeSlice, Int8Matrix, Isa, Kernels, KvPage, PAGE_TOKENS,
    PANEL_ROWS, Packing, PanelScales, PrefetchQueue, QuantizedActivations, SPAN_TOKENS,
    ScaledActivations, Span, TernaryMatrix,
};

/// Query heads that share a KV head.
const GROUP: usize = 4;

const HEAD_DIM: usize = 128;

/// What is measured, and how much.
#[derive(Clone, Copy)]
struct Plan<'a> {
    kernels: Kernels,
    threads: usize,
    /// Only kernels whose names contain all of these.
    words: &'a [&'a str],
    /// How many have been.
    measured: &'a AtomicUsize,
    /// Weights of one pass.
    stream_bytes: usize,
    passes: usize,
    smoke: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = given("--test") || !given("--bench");
    let only: Vec<Isa> = arguments.iter().filter_map(|a| a.parse().ok()).collect();
    if let Some(isa) = only.iter().find(|isa| !isa.is_available()) {
        eprintln!("this CPU has no {isa}");
        std::process::exit(2);
    }
    let words: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with("--") && argument.parse::<Isa>().is_err())
        .collect();
    let measured = AtomicUsize::new(0);
    for isa in Isa::available().filter(|isa| only.is_empty() || only.contains(isa)) {
        let kernels = Kernels::new(isa).expect("it is available");
        for threads in BTreeSet::from([1, cores::usable()]) {
            let (stream_bytes, passes) = match (smoke, isa) {
                (true, _) => (1 << 16, 1),
                (false, Isa::Scalar) => (4 << 20, 2), // Slow enough never to wait for memory.
                (false, _) => (1 << 30, 5),
            };
            run(Plan {
                kernels,
                threads,
                words: &words,
                measured: &measured,
                stream_bytes,
                passes,
                smoke,
            });
        }
    }
    if measured.into_inner() == 0 {
        eprintln!("no kernel's name contains all of {words:?}");
        std::process::exit(2);
    }
}

fn run(plan: Plan<'_>) {
    let probe = if plan.smoke {
        Probe::smoke(plan.kernels, plan.threads)
    } else {
        Probe::new(plan.kernels, plan.threads, plan.stream_bytes)
    };
    let (isa, threads) = (plan.kernels.isa(), plan.threads);
    if plan.smoke {
        println!("{isa}, {threads} thread(s): a smoke run");
    } else {
        let mebibytes = plan.stream_bytes >> 20;
        println!("\n{isa}, {threads} thread(s), {mebibytes} MiB of weights a pass");
    }
    ternary_products(plan, &probe);
    heads(plan, &probe);
    let scalar = plan.kernels.isa() == Isa::Scalar;
    for context in [256, 4096] {
        attention(
            plan,
            &probe.sample(),
            if plan.smoke || scalar {
                context / 16
            } else {
                context
            },
        );
    }
    for (chunk, depth) in [128, 512]
        .into_iter()
        .flat_map(|chunk| [0, 2048, 4096].map(|depth| (chunk, depth)))
    {
        let shrink = if plan.smoke || scalar { 8 } else { 1 };
        prefill_attention(plan, (chunk / shrink, depth / shrink));
    }
    if plan.threads == 1 {
        single_rows(plan);
    }
}

/// The ternary matrices of a layer.
fn ternary_products(plan: Plan<'_>, probe: &Probe) {
    let shrink = if plan.smoke { 20 } else { 1 };
    for (rows, columns) in [(640, 2560), (2560, 2560), (6912, 2560), (2560, 6912)] {
        let (rows, columns) = (rows / shrink, columns / shrink);
        for packing in [Packing::TwoBit, Packing::FiveTrit] {
            if !plan.kernels.reads(packing) {
                continue;
            }
            let what = format!("{packing:?} {rows} × {columns}");
            let cases = plan.cases(&what, &[1, 2, 4, 8, 16, 32, 64, 128, 512]);
            if cases.is_empty() {
                continue;
            }
            let bytes = TernaryMatrix::new(rows, columns, packing).bytes();
            let mut set: Vec<_> = (0..plan.stream_bytes.div_ceil(bytes))
                .map(|_| TernaryMatrix::new(rows, columns, packing))
                .collect();
            // As a model's are: what a matrix by itself leaves over of a large page is looked up slowly in small ones.
            TernaryMatrix::put_side_by_side(&mut set.iter_mut().collect::<Vec<_>>());
            for (m, what) in cases {
                ternary(plan, &probe.sample(), &set, (m, &what)); // Shared memory is faster and slower by the second.
            }
        }
    }
}

/// The output head, in both precisions.
fn heads(plan: Plan<'_>, probe: &Probe) {
    let scalar = plan.kernels.isa() == Isa::Scalar;
    let (rows, columns) = if plan.smoke || scalar {
        (1000, 256)
    } else {
        (128_256, 2560)
    };
    let what = format!("head int8 {rows} × {columns}");
    let cases = plan.cases(&what, &[1, 2, 4, 8, 16, 32, 64]);
    if !cases.is_empty() {
        let head = Int8Matrix::new(rows, columns);
        for (m, what) in cases {
            int8(plan, &probe.sample(), &head, (m, &what));
        }
    }
    let what = format!("head f16 {rows} × {columns}");
    let cases = plan.cases(&what, &[1, 4, 16]);
    if !cases.is_empty() {
        let head = DenseMatrix::from_f16(rows, columns, vec![0x3c00; rows * columns]);
        for (m, what) in cases {
            dense(plan, &probe.sample(), &head, (m, &what));
        }
    }
}

impl Plan<'_> {
    /// Is a kernel of this name to be measured?
    fn measures(&self, what: &str) -> bool {
        let is_wanted = self.words.iter().all(|word| what.contains(word));
        self.measured
            .fetch_add(usize::from(is_wanted), Ordering::Relaxed);
        is_wanted
    }

    /// The numbers of tokens at which a kernel is to be measured, and its names with them.
    fn cases(&self, what: &str, tokens: &[usize]) -> Vec<(usize, String)> {
        let cases = tokens.iter().map(|&m| (m, format!("{what}, m {m}")));
        cases.filter(|(_, what)| self.measures(what)).collect()
    }

    /// The best of all passes of `work(thread)`, run on all threads at once, each on a core of its own where the system lets it.
    fn best(&self, passes: usize, work: impl Fn(usize) + Sync) -> Duration {
        let own = cores::physical();
        let pass = || {
            let start = Instant::now();
            thread::scope(|scope| {
                for thread in 0..self.threads {
                    let (work, own) = (&work, own.get(thread));
                    scope.spawn(move || {
                        own.map(|core| cores::pin(*core));
                        work(thread);
                    });
                }
            });
            start.elapsed()
        };
        (0..passes)
            .map(|_| pass())
            .min()
            .expect("at least one pass")
    }

    /// The part of `count` things that a thread works on.
    fn share(&self, count: usize, thread: usize) -> std::ops::Range<usize> {
        thread * count / self.threads..(thread + 1) * count / self.threads
    }

    fn print(
        &self,
        limits: &Limits,
        what: &str,
        (bytes, operations): (usize, usize),
        time: Duration,
    ) {
        let (read, computed) = (
            per_nanosecond(bytes, time),
            per_nanosecond(operations, time),
        );
        if self.smoke {
            return;
        }
        println!(
            "  {what:<32} {:>9.3} ms {read:>7.1} GB/s, {:>3.0} % of {:>4.1} {computed:>7.0} Gop/s, {:>3.0} % of {:>4.0}",
            time.as_secs_f64() * 1e3,
            100.0 * read / limits.gigabytes_per_second,
            limits.gigabytes_per_second,
            100.0 * computed / limits.gigaops_per_second,
            limits.gigaops_per_second,
        );
    }
}

fn per_nanosecond(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_nanos() as f64
}

/// m tokens by every matrix of the set.
fn ternary(plan: Plan<'_>, limits: &Limits, set: &[TernaryMatrix], (m, what): (usize, &str)) {
    let (rows, columns) = (set[0].rows(), set[0].columns());
    let mut x = QuantizedActivations::new(m, columns);
    x.reset(m, columns);
    let values: Vec<f32> = (0..columns).map(|i| i as f32).collect();
    x.tokens_mut()
        .for_each(|mut token| plan.kernels.quantize(&values, &mut token));
    // Many tokens are limited by the multiplier, which needs no gigabyte to be measured.
    let set = &set[..set.len().div_ceil(m.div_ceil(8))];
    let time = plan.best(plan.passes.min(3), |thread| {
        let panels = plan.share(set[0].panels(), thread);
        // As the engine does: products pass through a small buffer.
        let at_once = (1 << 16) / (m * PANEL_ROWS);
        let (factors, mut out) = (vec![0.1; m], vec![0.0; at_once * m * PANEL_ROWS]);
        for matrix in set {
            for start in panels.clone().step_by(at_once) {
                let panels = start..panels.end.min(start + at_once);
                let out = &mut out[..panels.len() * m * PANEL_ROWS];
                plan.kernels.ternary_matmul(
                    matrix,
                    panels,
                    ScaledActivations {
                        activations: &x,
                        factors: &factors,
                    },
                    out,
                    &mut PrefetchQueue::empty(),
                );
                black_box(out);
            }
        }
    });
    let bytes: usize = set.iter().map(TernaryMatrix::bytes).sum();
    let operations = 2 * set.len() * rows * columns * m;
    plan.print(limits, what, (bytes, operations), time);
}

/// m tokens by an 8-bit head.
fn int8(plan: Plan<'_>, limits: &Limits, head: &Int8Matrix, (m, what): (usize, &str)) {
    let mut x = QuantizedActivations::new(m, head.columns());
    x.reset(m, head.columns());
    let values: Vec<f32> = (0..head.columns()).map(|i| i as f32).collect();
    x.tokens_mut()
        .for_each(|mut token| plan.kernels.quantize(&values, &mut token));
    let time = plan.best(plan.passes.min(3), |thread| {
        let (factors, mut sums) = (vec![0.1; m], vec![0; m * PANEL_ROWS]);
        let (mut logits, mut largest) = (vec![0.0; m * PANEL_ROWS], vec![0.0; m]);
        // As the engine does: a panel at a time, and each scaled.
        for panel in plan.share(head.panels(), thread) {
            (plan.kernels).int8_matmul(head, panel..panel + 1, &x, &mut sums);
            let scales = PanelScales {
                row_scales: head.scales(panel),
                token_factors: &factors[..],
            };
            (plan.kernels).scale_panel(&sums, scales, &mut logits, &mut largest);
            black_box(&mut logits);
        }
    });
    let operations = 2 * head.rows() * head.columns() * m;
    plan.print(limits, what, (head.bytes(), operations), time);
}

/// m tokens by a head.
fn dense(plan: Plan<'_>, limits: &Limits, head: &DenseMatrix, (m, what): (usize, &str)) {
    let x = vec![0.5; m * head.columns()];
    let time = plan.best(plan.passes.min(3), |thread| {
        let panels = plan.share(head.panels(), thread);
        let mut out = vec![0.0; panels.len() * m * PANEL_ROWS];
        plan.kernels.dense_matmul(head, panels, &x, m, &mut out);
        black_box(&mut out);
    });
    let operations = 2 * head.rows() * head.columns() * m;
    plan.print(limits, what, (head.bytes(), operations), time);
}

/// The pages of one KV head.
fn pages(store: &[u16]) -> Vec<KvPage<'_>> {
    store
        .chunks(2 * PAGE_TOKENS * HEAD_DIM)
        .map(|both| both.split_at(PAGE_TOKENS * HEAD_DIM))
        .map(|(keys, values)| KvPage { keys, values })
        .collect()
}

/// What queries at some positions from `position` on receive, up to one page's.
fn attend(
    kernels: Kernels,
    run: &[KvPage],
    next: &[KvPage],
    (position, positions): (usize, usize),
    state: &mut AttentionState,
) {
    state.reset(GROUP, positions, HEAD_DIM);
    for query in 0..positions * GROUP {
        state.query_mut(query / GROUP, query % GROUP).fill(0.25);
    }
    let seen = &run[..(position + positions).div_ceil(PAGE_TOKENS)];
    let mut spans = seen.chunks(SPAN_TOKENS / PAGE_TOKENS).peekable();
    let mut before = 0;
    while let Some(pages) = spans.next() {
        let span = Span {
            pages,
            next: spans.peek().copied().unwrap_or(next),
            visible: SPAN_TOKENS.min(position + 1 - before),
        };
        kernels.attention_span(span, state);
        before += SPAN_TOKENS;
    }
}

/// One decode step's attention of one sequence: 30 layers of 5 KV heads with 4 query heads of 128 values each.
fn attention(plan: Plan<'_>, limits: &Limits, context: usize) {
    let kv_heads = if plan.smoke { 2 } else { 30 * 5 };
    let what = format!("attention, {kv_heads} × {context} keys");
    if !plan.measures(&what) {
        return;
    }
    let head_size = 2 * context * HEAD_DIM;
    let mut store = HugeSlice::new(kv_heads * head_size);
    store.fill(0x3800_u16);
    let heads: Vec<_> = store.chunks(head_size).map(pages).collect();
    let time = plan.best(plan.passes, |thread| {
        let mut state = AttentionState::new(GROUP, HEAD_DIM);
        let mut out = vec![0.0; GROUP * HEAD_DIM];
        for head in plan.share(kv_heads, thread) {
            let next = &heads[(head + 1) % kv_heads];
            let next = &next[..next.len().min(SPAN_TOKENS / PAGE_TOKENS)];
            attend(
                plan.kernels,
                &heads[head],
                next,
                (context - 1, 1),
                &mut state,
            );
            plan.kernels.attention_finish(&state, &mut out);
            black_box(&mut out);
        }
    });
    let operations = 4 * kv_heads * GROUP * HEAD_DIM * context;
    plan.print(limits, &what, (2 * store.len(), operations), time);
}

/// A chunk of a prompt at some depth: one layer's attention, beside what this instruction set can multiply and add in single precision.
fn prefill_attention(plan: Plan<'_>, (chunk, depth): (usize, usize)) {
    let what = format!("attention, {chunk} tokens after {depth}");
    if !plan.measures(&what) {
        return;
    }
    let kv_heads = 2 * plan.threads;
    let rounds = if plan.smoke { 1000 } else { 2_000_000 };
    let operations = plan.threads as u64 * plan.kernels.probe_f32(1) * rounds;
    let probe = plan.best(3, |_| {
        plan.kernels.probe_f32(rounds);
    });
    let head_size = 2 * (depth + chunk) * HEAD_DIM;
    let mut store = HugeSlice::new(kv_heads * head_size);
    store.fill(0x3800_u16);
    let heads: Vec<_> = store.chunks(head_size).map(pages).collect();
    let time = plan.best(plan.passes.min(3), |thread| {
        let mut state = AttentionState::new(GROUP, HEAD_DIM);
        let mut out = vec![0.0; PAGE_TOKENS * GROUP * HEAD_DIM];
        for head in plan.share(kv_heads, thread) {
            for position in (depth..depth + chunk).step_by(PAGE_TOKENS) {
                let block = (position, PAGE_TOKENS);
                attend(plan.kernels, &heads[head], &[], block, &mut state);
                plan.kernels.attention_finish(&state, &mut out);
                black_box(&mut out);
            }
        }
    });
    let keys: usize = (depth + 1..=depth + chunk).sum();
    let done = per_nanosecond(4 * kv_heads * GROUP * HEAD_DIM * keys, time);
    let peak = operations as f64 / probe.as_nanos() as f64;
    if !plan.smoke {
        println!(
            "  {what:<32} {:>9.3} ms {done:>7.0} Gflop/s, {:.0} % of {peak:.0}",
            time.as_secs_f64() * 1e3,
            100.0 * done / peak,
        );
    }
}

/// The kernels over one token's row, of the width of the feed-forward, from the first cache on one thread.
fn single_rows(plan: Plan<'_>) {
    let width = 6912;
    let rounds = if plan.smoke { 2 } else { 2000 };
    let x: Vec<f32> = (0..width).map(|i| (i as f32 * 0.37).sin()).collect();
    let kernels = plan.kernels;
    let time = |what: &str, work: &mut dyn FnMut()| {
        if !plan.measures(what) {
            return;
        }
        let start = Instant::now();
        (0..rounds).for_each(|_| work());
        let nanoseconds = start.elapsed().as_nanos() as f64 / f64::from(rounds);
        if !plan.smoke {
            println!("  {what:<32} {nanoseconds:>9.0} ns");
        }
    };
    let mut out = vec![0.0; width];
    let mut quantized = QuantizedActivations::new(1, width);
    quantized.reset(1, width);
    time("quantize, 6912 values", &mut || {
        quantized
            .tokens_mut()
            .for_each(|mut token| kernels.quantize(black_box(&x), &mut token))
    });
    time("rms_norm, 6912 values", &mut || {
        kernels.rms_norm(black_box(&x), &x, 1e-5, &mut out)
    });
    time("relu2_gate, 6912 values", &mut || {
        kernels.relu2_gate(black_box(&x), &x, &mut out)
    });
    time("silu_gate, 6912 values", &mut || {
        kernels.silu_gate(black_box(&x), &x, &mut out)
    });
    let (cos, sin) = (vec![0.6; 64], vec![0.8; 64]);
    time("rope, 54 heads of 128", &mut || {
        kernels.rope(black_box(&mut out), 128, &cos, &sin)
    });
    let mut pages = [vec![0; 16 * 128], vec![0; 16 * 128]];
    let [k_page, v_page] = &mut pages;
    time("store_kv, 128 values", &mut || {
        kernels.store_kv(&x[..128], &x[..128], 5, k_page, v_page)
    });
}
