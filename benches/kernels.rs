//! Measures kernels, and prints each beside this machine's limits: how fast it reads memory and how
//! fast it multiplies small integers, sampled in the same run.
//!
//! `cargo bench --bench kernels` measures the shapes of BitNet b1.58 2B-4T. It streams enough
//! distinct matrices that none comes from a cache. `-- avx2 head int8` measures only kernels of
//! AVX2 whose names contain both words.
//!
//! Without `--bench` (so in `cargo test --benches`), or with `--test`, everything runs once on
//! small shapes and prints no figures, which would be meaningless.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sterna::bench::{LimitsProbe, MachineLimits};
use sterna::cores;
use sterna_kernels::{
    AttentionState, DenseMatrix, GroupSize, HugeSlice, Int8Matrix, Isa, Kernels, KvDtype,
    PAGE_TOKENS, PANEL_ROWS, Packing, PanelScales, PrefetchQueue, QuantizedActivations,
    SPAN_TOKENS, ScaledActivations, Span, TernaryMatrix,
};

/// Query heads that share a KV head.
const GROUP: usize = 4;

const HEAD_DIM: usize = 128;

/// The measurements of one instruction set with some threads.
#[derive(Clone, Copy)]
struct KernelBench<'a> {
    kernels: Kernels,
    threads: usize,
    /// Only kernels whose names contain all of these words are measured.
    words: &'a [&'a str],
    /// The number of kernels that were measured, of all instruction sets.
    measured: &'a AtomicUsize,
    /// The size of the weights of one pass.
    stream_bytes: usize,
    passes: usize,
    /// Whether everything runs once on small shapes.
    smoke: bool,
}

/// One measurement of a product.
struct ProductCase {
    tokens: usize,
    name: String,
}

/// A ternary matrix to be measured.
struct MatrixShape {
    rows: usize,
    columns: usize,
    packing: Packing,
    group: Option<GroupSize>,
}

impl MatrixShape {
    fn new(rows: usize, columns: usize, packing: Packing, group: Option<GroupSize>) -> MatrixShape {
        MatrixShape {
            rows,
            columns,
            packing,
            group,
        }
    }

    fn name(&self) -> String {
        let group = (self.group).map_or(String::new(), |group| format!("/{}", group.columns()));
        format!("{:?}{group} {} × {}", self.packing, self.rows, self.columns)
    }

    fn matrix(&self) -> TernaryMatrix {
        let MatrixShape {
            rows,
            columns,
            packing,
            group,
        } = *self;
        group.map_or_else(
            || TernaryMatrix::new(rows, columns, packing),
            |group| {
                TernaryMatrix::with_groups(rows, columns, packing, group).expect("whole groups")
            },
        )
    }
}

/// What a measured kernel does.
struct Work {
    /// Bytes that it reads from memory.
    bytes: usize,
    /// Multiplications and additions.
    operations: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = given("--test") || !given("--bench");
    let only: Vec<Isa> = arguments.iter().filter_map(|a| Isa::named(a)).collect();
    if let Some(isa) = only.iter().find(|isa| !isa.is_available()) {
        eprintln!("this CPU has no {isa}");
        std::process::exit(2);
    }
    let words: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with("--") && Isa::named(argument).is_none())
        .collect();
    let measured = AtomicUsize::new(0);
    for isa in Isa::available().filter(|isa| only.is_empty() || only.contains(isa)) {
        let kernels = Kernels::new(isa).expect("an available instruction set has kernels");
        for threads in BTreeSet::from([1, cores::usable()]) {
            let (stream_bytes, passes) = match (smoke, isa) {
                (true, _) => (1 << 16, 1),
                (false, Isa::Scalar) => (4 << 20, 2), // So slow that memory is never the limit.
                (false, _) => (1 << 30, 5),
            };
            run(KernelBench {
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
        eprintln!("no kernel has a name that contains all of {words:?}");
        std::process::exit(2);
    }
}

fn run(bench: KernelBench<'_>) {
    let probe = if bench.smoke {
        LimitsProbe::smoke(bench.kernels, bench.threads)
    } else {
        LimitsProbe::new(bench.kernels, bench.threads, bench.stream_bytes)
    };
    let (isa, threads) = (bench.kernels.isa(), bench.threads);
    if bench.smoke {
        println!("{isa}, {threads} thread(s): a smoke run");
    } else {
        let mebibytes = bench.stream_bytes >> 20;
        println!("\n{isa}, {threads} thread(s), {mebibytes} MiB of weights a pass");
    }
    ternary_products(bench, &probe);
    heads(bench, &probe);
    let scalar = bench.kernels.isa() == Isa::Scalar;
    for context in [256, 512, 2048, 4096] {
        let shrink = if bench.smoke || scalar { 16 } else { 1 };
        for dtype in KvDtype::ALL {
            attention(bench, &probe.sample(), dtype, context / shrink);
        }
    }
    for (chunk, depth) in [128, 512]
        .into_iter()
        .flat_map(|chunk| [0, 2048, 4096].map(|depth| (chunk, depth)))
    {
        let shrink = if bench.smoke || scalar { 8 } else { 1 };
        for dtype in KvDtype::ALL {
            prefill_attention(bench, dtype, chunk / shrink, depth / shrink);
        }
    }
    if bench.threads == 1 {
        single_rows(bench);
    }
}

/// Measures the ternary matrices of a layer, without groups and with groups of 128, and one of them
/// with all sizes of groups.
fn ternary_products(bench: KernelBench<'_>, probe: &LimitsProbe) {
    for (rows, columns) in [(640, 2560), (2560, 2560), (6912, 2560), (2560, 6912)] {
        let (rows, columns) = if bench.smoke {
            (rows / 20, columns / 256 * 32)
        } else {
            (rows, columns)
        };
        for packing in [Packing::TwoBit, Packing::FiveTrit] {
            ternary_matrices(
                bench,
                probe,
                &MatrixShape::new(rows, columns, packing, None),
            );
            for group in GroupSize::ALL {
                let is_square = rows == columns || bench.smoke;
                if is_square && columns.is_multiple_of(group.columns()) || group == GroupSize::G128
                {
                    let shape = MatrixShape::new(rows, columns, packing, Some(group));
                    ternary_matrices(bench, probe, &shape);
                }
            }
        }
    }
}

/// Measures products of matrices of one shape.
fn ternary_matrices(bench: KernelBench<'_>, probe: &LimitsProbe, shape: &MatrixShape) {
    if !bench.kernels.reads(shape.packing) {
        return;
    }
    let cases = bench.cases(&shape.name(), &[1, 2, 4, 8, 16, 32, 64, 128, 512]);
    if cases.is_empty() {
        return;
    }
    let bytes = shape.matrix().bytes();
    let mut set: Vec<_> = (0..bench.stream_bytes.div_ceil(bytes))
        .map(|_| shape.matrix())
        .collect();
    // As in a model: a single matrix would end in small pages, which are slower.
    TernaryMatrix::put_side_by_side(&mut set.iter_mut().collect::<Vec<_>>());
    for case in cases {
        // The limits are sampled for each case: the bandwidth of a shared machine changes from
        // second to second.
        ternary(bench, &probe.sample(), &set, &case);
    }
}

/// Measures `lm_head` in every precision.
fn heads(bench: KernelBench<'_>, probe: &LimitsProbe) {
    let scalar = bench.kernels.isa() == Isa::Scalar;
    let (rows, columns) = if bench.smoke || scalar {
        (1000, 256)
    } else {
        (128_256, 2560)
    };
    let name = format!("head int8 {rows} × {columns}");
    let cases = bench.cases(&name, &[1, 2, 4, 8, 16, 32, 64]);
    if !cases.is_empty() {
        let head = Int8Matrix::new(rows, columns);
        for case in cases {
            int8(bench, &probe.sample(), &head, &case);
        }
    }
    let packing = bench.kernels.packing();
    let shape = MatrixShape::new(rows, columns, packing, Some(GroupSize::G128));
    let name = format!("head {}", shape.name());
    let cases = bench.cases(&name, &[1, 2, 4, 8, 16, 32, 64]);
    if !cases.is_empty() {
        let head = [shape.matrix()];
        for case in cases {
            ternary(bench, &probe.sample(), &head, &case);
        }
    }
    let name = format!("head f16 {rows} × {columns}");
    let cases = bench.cases(&name, &[1, 4, 16]);
    if !cases.is_empty() {
        let head = DenseMatrix::from_f16(rows, columns, vec![0x3c00; rows * columns]);
        for case in cases {
            dense(bench, &probe.sample(), &head, &case);
        }
    }
}

impl KernelBench<'_> {
    /// Returns whether the kernel of this name is measured, and counts it if so.
    fn measures(&self, name: &str) -> bool {
        let is_wanted = self.words.iter().all(|word| name.contains(word));
        self.measured
            .fetch_add(usize::from(is_wanted), Ordering::Relaxed);
        is_wanted
    }

    /// Returns the measurements of one matrix with each of some numbers of tokens.
    fn cases(&self, matrix: &str, tokens: &[usize]) -> Vec<ProductCase> {
        let cases = tokens.iter().map(|&tokens| ProductCase {
            tokens,
            name: format!("{matrix}, {tokens} tokens"),
        });
        cases.filter(|case| self.measures(&case.name)).collect()
    }

    /// Runs `work(thread)` on all threads at once, `passes` times, and returns the shortest time.
    /// Each thread has its own core if the system allows it.
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

    /// Returns the part of `count` items that a thread works on.
    fn share(&self, count: usize, thread: usize) -> Range<usize> {
        thread * count / self.threads..(thread + 1) * count / self.threads
    }

    fn print(&self, limits: &MachineLimits, name: &str, work: Work, time: Duration) {
        let read = per_nanosecond(work.bytes, time);
        let computed = per_nanosecond(work.operations, time);
        if self.smoke {
            return;
        }
        println!(
            "  {name:<36} {:>9.3} ms {read:>7.1} GB/s, {:>3.0} % of {:>4.1} \
             {computed:>7.0} Gop/s, {:>3.0} % of {:>4.0}",
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

/// Measures the product of some tokens and every matrix of the set.
fn ternary(
    bench: KernelBench<'_>,
    limits: &MachineLimits,
    set: &[TernaryMatrix],
    case: &ProductCase,
) {
    let tokens = case.tokens;
    let (rows, columns) = (set[0].rows(), set[0].columns());
    let mut x = QuantizedActivations::new(tokens, columns);
    match set[0].group() {
        None => x.reset(tokens, columns),
        Some(group) => x
            .reset_groups(tokens, columns, group)
            .expect("whole groups"),
    }
    let values: Vec<f32> = (0..columns).map(|i| i as f32).collect();
    x.tokens_mut()
        .for_each(|mut token| bench.kernels.quantize(&values, &mut token));
    // Multiplication limits products of many tokens, so these need fewer matrices.
    let set = &set[..set.len().div_ceil(tokens.div_ceil(8))];
    let time = bench.best(bench.passes.min(3), |thread| {
        let panels = bench.share(set[0].panels(), thread);
        // As in the engine, products pass through a small buffer.
        let at_once = (1 << 16) / (tokens * PANEL_ROWS);
        let (mut factors, mut out) = (Vec::new(), vec![0.0; at_once * tokens * PANEL_ROWS]);
        for matrix in set {
            factors.clear();
            factors.extend(x.scales().iter().map(|scale| 0.1 / scale));
            for start in panels.clone().step_by(at_once) {
                let panels = start..panels.end.min(start + at_once);
                let out = &mut out[..panels.len() * tokens * PANEL_ROWS];
                bench.kernels.ternary_matmul(
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
    let operations = 2 * set.len() * rows * columns * tokens;
    bench.print(limits, &case.name, Work { bytes, operations }, time);
}

/// Measures the product of some tokens and an 8-bit head.
fn int8(bench: KernelBench<'_>, limits: &MachineLimits, head: &Int8Matrix, case: &ProductCase) {
    let tokens = case.tokens;
    let mut x = QuantizedActivations::new(tokens, head.columns());
    x.reset(tokens, head.columns());
    let values: Vec<f32> = (0..head.columns()).map(|i| i as f32).collect();
    x.tokens_mut()
        .for_each(|mut token| bench.kernels.quantize(&values, &mut token));
    let time = bench.best(bench.passes.min(3), |thread| {
        let (factors, mut sums) = (vec![0.1; tokens], vec![0; tokens * PANEL_ROWS]);
        let (mut logits, mut largest) = (vec![0.0; tokens * PANEL_ROWS], vec![0.0; tokens]);
        // As in the engine, each panel is multiplied and then scaled.
        for panel in bench.share(head.panels(), thread) {
            (bench.kernels).int8_matmul(head, panel..panel + 1, &x, &mut sums);
            let scales = PanelScales {
                row_scales: head.scales(panel),
                token_factors: &factors[..],
            };
            (bench.kernels).scale_panel(&sums, scales, &mut logits, &mut largest);
            black_box(&mut logits);
        }
    });
    let operations = 2 * head.rows() * head.columns() * tokens;
    let bytes = head.bytes();
    bench.print(limits, &case.name, Work { bytes, operations }, time);
}

/// Measures the product of some tokens and a float head.
fn dense(bench: KernelBench<'_>, limits: &MachineLimits, head: &DenseMatrix, case: &ProductCase) {
    let tokens = case.tokens;
    let x = vec![0.5; tokens * head.columns()];
    let time = bench.best(bench.passes.min(3), |thread| {
        let panels = bench.share(head.panels(), thread);
        let mut out = vec![0.0; panels.len() * tokens * PANEL_ROWS];
        bench
            .kernels
            .dense_matmul(head, panels, &x, tokens, &mut out);
        black_box(&mut out);
    });
    let operations = 2 * head.rows() * head.columns() * tokens;
    let bytes = head.bytes();
    bench.print(limits, &case.name, Work { bytes, operations }, time);
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
fn attention(bench: KernelBench<'_>, limits: &MachineLimits, dtype: KvDtype, context: usize) {
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
fn prefill_attention(bench: KernelBench<'_>, dtype: KvDtype, chunk: usize, depth: usize) {
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

/// Measures the kernels over one token's row of the feed-forward's width, from the first-level
/// cache on one thread.
fn single_rows(bench: KernelBench<'_>) {
    let width = 6912;
    let rounds = if bench.smoke { 2 } else { 2000 };
    let x: Vec<f32> = (0..width).map(|i| (i as f32 * 0.37).sin()).collect();
    let kernels = bench.kernels;
    let time = |name: &str, work: &mut dyn FnMut()| {
        if !bench.measures(name) {
            return;
        }
        let start = Instant::now();
        (0..rounds).for_each(|_| work());
        let nanoseconds = start.elapsed().as_nanos() as f64 / f64::from(rounds);
        if !bench.smoke {
            println!("  {name:<32} {nanoseconds:>9.0} ns");
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
    let mut grouped = QuantizedActivations::new(1, width);
    grouped
        .reset_groups(1, width, GroupSize::G128)
        .expect("whole groups");
    time("quantize, 6912 values by 128", &mut || {
        grouped
            .tokens_mut()
            .for_each(|mut token| kernels.quantize(black_box(&x), &mut token))
    });
    let mut table = TernaryMatrix::with_groups(32, width, kernels.packing(), GroupSize::G128)
        .expect("whole groups");
    for mut panel in table.panels_mut() {
        panel
            .rows()
            .for_each(|row| panel.set_scales(row, &[0x3800; 54]));
    }
    time("copy_row, 6912 values by 128", &mut || {
        black_box(&table).copy_row(black_box(7), &mut out)
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
    for dtype in KvDtype::ALL {
        let mut page = vec![0; dtype.page_bytes(128)];
        time(&format!("store_kv {dtype}, 128 values"), &mut || {
            kernels.store_kv(dtype, black_box(&x[..128]), &x[..128], 5, &mut page)
        });
    }
}
