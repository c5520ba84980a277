//! Measures kernels, and prints each beside two limits of the machine: its read bandwidth and its
//! rate of products of small integers. The limits are sampled in the same run.
//!
//! `cargo bench --bench kernels` measures the shapes of BitNet b1.58 2B-4T. It reads so many
//! distinct matrices that none comes from a cache. `-- avx2 head int8` measures only kernels of
//! AVX2 whose names contain both words.
//!
//! Without `--bench` (as in `cargo test --benches`), or with `--test`, each kernel runs once on
//! small shapes and nothing is printed: such figures would mean nothing.

mod attention;
mod measure;
mod products;
mod single_rows;

use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;

use sterna::bench::LimitsProbe;
use sterna::cores;
use sterna_kernels::{Isa, Kernels};

use measure::KernelBench;

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
    products::measure_layers(bench, &probe);
    products::measure_heads(bench, &probe);
    attention::measure(bench, &probe);
    if bench.threads == 1 {
        single_rows::measure(bench);
    }
}
