//! Products of ternary matrices, and `lm_head` in every precision.

use std::hint::black_box;

use sterna::bench::{LimitsProbe, MachineLimits};
use sterna_kernels::{
    DenseMatrix, GroupSize, Int8Matrix, Isa, PANEL_ROWS, Packing, PanelScales, PrefetchQueue,
    QuantizedActivations, ScaledActivations, TernaryMatrix,
};

use crate::measure::{KernelBench, Work};

/// One measurement of a product.
struct ProductCase {
    tokens: usize,
    name: String,
}

/// Returns the measurements of one matrix with each of some numbers of tokens.
fn measured_cases(bench: KernelBench<'_>, matrix: &str, tokens: &[usize]) -> Vec<ProductCase> {
    let cases = tokens.iter().map(|&tokens| ProductCase {
        tokens,
        name: format!("{matrix}, {tokens} tokens"),
    });
    cases.filter(|case| bench.measures(&case.name)).collect()
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

/// Measures the ternary matrices of a layer, without groups and with groups of 128, and one of them
/// with all sizes of groups.
pub(crate) fn measure_layers(bench: KernelBench<'_>, probe: &LimitsProbe) {
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
    let cases = measured_cases(bench, &shape.name(), &[1, 2, 4, 8, 16, 32, 64, 128, 512]);
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
pub(crate) fn measure_heads(bench: KernelBench<'_>, probe: &LimitsProbe) {
    let scalar = bench.kernels.isa() == Isa::Scalar;
    let (rows, columns) = if bench.smoke || scalar {
        (1000, 256)
    } else {
        (128_256, 2560)
    };
    let name = format!("head int8 {rows} × {columns}");
    let cases = measured_cases(bench, &name, &[1, 2, 4, 8, 16, 32, 64]);
    if !cases.is_empty() {
        let head = Int8Matrix::new(rows, columns);
        for case in cases {
            int8(bench, &probe.sample(), &head, &case);
        }
    }
    let packing = bench.kernels.packing();
    let shape = MatrixShape::new(rows, columns, packing, Some(GroupSize::G128));
    let name = format!("head {}", shape.name());
    let cases = measured_cases(bench, &name, &[1, 2, 4, 8, 16, 32, 64]);
    if !cases.is_empty() {
        let head = [shape.matrix()];
        for case in cases {
            ternary(bench, &probe.sample(), &head, &case);
        }
    }
    let name = format!("head f16 {rows} × {columns}");
    let cases = measured_cases(bench, &name, &[1, 4, 16]);
    if !cases.is_empty() {
        let head = DenseMatrix::from_f16(rows, columns, vec![0x3c00; rows * columns]);
        for case in cases {
            dense(bench, &probe.sample(), &head, &case);
        }
    }
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
