//! Kernels over a single row, from the first-level cache.

use std::hint::black_box;
use std::time::Instant;

use sterna_kernels::{GroupSize, KvDtype, QuantizedActivations, TernaryMatrix};

use crate::measure::KernelBench;

/// Measures the kernels over one token's row of the feed-forward's width, from the first-level
/// cache on one thread.
pub(crate) fn measure(bench: KernelBench<'_>) {
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
