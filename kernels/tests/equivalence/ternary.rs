//! Products of ternary weights.

use sterna_kernels::{
    DenseMatrix, Kernels, PANEL_ROWS, Packing, PrefetchQueue, QuantizedActivations,
    ScaledActivations, TernaryMatrix,
};
use sterna_random::Random;

use crate::{bits, each_isa, float, floats, scalar};

/// The dimensions of a product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tokens: usize,
    rows: usize,
    columns: usize,
}

struct TernaryCase {
    weights: [TernaryMatrix; 2], // In both packings.
    x: QuantizedActivations,
    factors: Vec<f32>, // By token. Every other one is 1, so that the output is the exact sum.
}

impl TernaryCase {
    /// `code(row, column)` is a weight plus one, `q(token, column)` an activation.
    fn new(
        shape: Shape,
        mut code: impl FnMut(usize, usize) -> u8,
        mut q: impl FnMut(usize, usize) -> f32,
    ) -> TernaryCase {
        let Shape {
            tokens,
            rows,
            columns,
        } = shape;
        let codes = (0..rows).map(|row| (0..columns).map(|column| code(row, column)).collect());
        let codes: Vec<Vec<u8>> = codes.collect();
        let packed = |packing| {
            let mut weights = TernaryMatrix::new(rows, columns, packing);
            for mut panel in weights.panels_mut() {
                for row in panel.rows() {
                    panel.set_row(row, &codes[row]);
                }
            }
            weights
        };
        let weights = [Packing::TwoBit, Packing::FiveTrit].map(packed);
        let mut x = QuantizedActivations::new(tokens + 1, columns + 5);
        x.reset(tokens, columns);
        for (token, mut out) in x.tokens_mut().enumerate() {
            let row: Vec<f32> = (0..columns).map(|column| q(token, column)).collect();
            scalar().quantize(&row, &mut out);
        }
        let factors = (0..tokens).map(|token| [1.0, 0.37 / tokens as f32][token % 2]);
        let factors = factors.collect();
        TernaryCase {
            weights,
            x,
            factors,
        }
    }

    fn random(random: &mut Random, shape: Shape) -> TernaryCase {
        let mut codes = Random::new(random.next_u64());
        TernaryCase::new(shape, |_, _| codes.below(3) as u8, |_, _| float(random))
    }

    fn run(&self, kernels: Kernels, weights: &TernaryMatrix) -> Vec<u32> {
        let mut out = vec![f32::NAN; weights.panels() * self.x.tokens() * PANEL_ROWS];
        let panels = 0..weights.panels();
        // Prefetches do not change the result.
        let memory = [0; 5000];
        let mut pieces = [&memory[..], &[], &memory[7..207], &memory[..4096]].into_iter();
        let mut prefetches = PrefetchQueue::new(&mut pieces);
        kernels.ternary_matmul(weights, panels, self.scaled(), &mut out, &mut prefetches);
        bits(&out)
    }

    fn scaled(&self) -> ScaledActivations<'_> {
        ScaledActivations {
            activations: &self.x,
            factors: &self.factors,
        }
    }

    /// Returns every instruction set with every packing that it reads.
    fn combinations(&self) -> impl Iterator<Item = (Kernels, &TernaryMatrix)> {
        let all = each_isa().flat_map(|isa| self.weights.iter().map(move |w| (isa, w)));
        all.filter(|(kernels, weights)| kernels.reads(weights.packing()))
    }

    /// Computes the product by its formula, from single weights.
    fn expected(&self) -> Vec<u32> {
        let [weights, _] = &self.weights;
        let mut out = Vec::new();
        for panel in 0..weights.panels() {
            for token in 0..self.x.tokens() {
                for row in panel * PANEL_ROWS..(panel + 1) * PANEL_ROWS {
                    let exists = row < weights.rows();
                    let q = self.x.row(token).iter().enumerate();
                    let dot = q.map(|(k, &q)| i32::from(weights.weight(row, k)) * i32::from(q));
                    let sum: i32 = if exists { dot.sum() } else { 0 };
                    out.push((sum as f32 * self.factors[token]).to_bits());
                }
            }
        }
        out
    }

    fn check(&self, what: &str) {
        let expected = self.run(scalar(), &self.weights[0]);
        for (kernels, weights) in self.combinations() {
            assert!(
                self.run(kernels, weights) == expected,
                "{what}: {}, {:?}, {} tokens × {} rows × {} columns",
                kernels.isa(),
                weights.packing(),
                self.x.tokens(),
                weights.rows(),
                weights.columns()
            );
        }
    }
}

#[test]
fn ternary_products_follow_the_formula() {
    let mut random = Random::from_env();
    for _ in 0..40 {
        let shape = Shape {
            tokens: 1 + random.index(9),
            rows: 1 + random.index(70),
            columns: 1 + random.index(150),
        };
        let case = TernaryCase::random(&mut random, shape);
        let scalars = case.run(scalar(), &case.weights[0]);
        assert_eq!(scalars, case.expected(), "{shape:?}");
        case.check("a small shape");
    }
}

#[test]
fn ternary_products_are_equal_at_the_widths_of_real_checkpoints() {
    let mut random = Random::from_env();
    for columns in [192, 320, 640, 896, 2560, 6912, 8192] {
        let shape = Shape {
            rows: 1 + random.index(80),
            tokens: random.pick(&[1, 2, 3, 4, 5, 8, 9]),
            columns,
        };
        TernaryCase::random(&mut random, shape).check("a real width");
    }
}

#[test]
fn ternary_products_are_equal_for_every_number_of_tokens() {
    let mut random = Random::from_env();
    for tokens in (1..=17).chain([31, 33, 64, 128, 257, 300]) {
        let shape = Shape {
            tokens,
            rows: 1 + random.index(40),
            columns: random.pick(&[16, 20, 64, 129, 260]),
        };
        TernaryCase::random(&mut random, shape).check("a number of tokens");
    }
}

#[test]
fn ternary_sums_of_extreme_values_do_not_overflow() {
    for columns in [4, 128, 2560, 8192] {
        for tokens in 1..=8 {
            let shape = Shape {
                tokens,
                rows: 33,
                columns,
            };
            for sign in [1.0, -1.0] {
                TernaryCase::new(shape, |_, _| 2, |_, _| sign).check("all +1");
                TernaryCase::new(shape, |_, _| 0, |_, _| sign).check("all −1");
                TernaryCase::new(shape, |_, _| 1, |_, _| sign).check("all 0");
                TernaryCase::new(
                    shape,
                    |_, k| if k % 2 == 0 { 2 } else { 0 },
                    |_, k| if k % 2 == 0 { sign } else { -sign },
                )
                .check("alternating");
            }
            TernaryCase::new(shape, |_, _| 2, |_, _| 0.0).check("zero activations");
        }
    }
}

#[test]
fn a_range_of_panels_gives_the_same_part_of_the_whole_product() {
    let mut random = Random::from_env();
    let shape = Shape {
        tokens: 5,
        rows: 150,
        columns: 100,
    };
    let case = TernaryCase::random(&mut random, shape);
    let dense = DenseMatrix::from_f32(150, 100, floats(&mut random, 150 * 100));
    let x = floats(&mut random, 5 * 100);
    for (kernels, weights) in case.combinations() {
        let whole = case.run(kernels, weights);
        let mut part = vec![0.0; 2 * 5 * PANEL_ROWS];
        kernels.ternary_matmul(
            weights,
            1..3,
            case.scaled(),
            &mut part,
            &mut PrefetchQueue::empty(),
        );
        assert_eq!(bits(&part), whole[5 * PANEL_ROWS..3 * 5 * PANEL_ROWS]);
    }
    for kernels in each_isa() {
        let mut whole = vec![0.0; dense.panels() * 5 * PANEL_ROWS];
        kernels.dense_matmul(&dense, 0..dense.panels(), &x, 5, &mut whole);
        let mut part = vec![0.0; 2 * 5 * PANEL_ROWS];
        kernels.dense_matmul(&dense, 3..5, &x, 5, &mut part);
        assert_eq!(bits(&part), bits(&whole[3 * 5 * PANEL_ROWS..]));
    }
}

#[test]
fn a_product_with_an_unsupported_packing_panics() {
    for kernels in each_isa() {
        for packing in [Packing::TwoBit, Packing::FiveTrit] {
            let product = || {
                let mut x = QuantizedActivations::new(1, 20);
                x.reset(1, 20);
                let weights = TernaryMatrix::new(1, 20, packing);
                kernels.ternary_matmul(
                    &weights,
                    0..1,
                    ScaledActivations {
                        activations: &x,
                        factors: &[1.0],
                    },
                    &mut [0.0; PANEL_ROWS],
                    &mut PrefetchQueue::empty(),
                );
            };
            let outcome = std::panic::catch_unwind(product);
            assert_eq!(outcome.is_ok(), kernels.reads(packing), "{}", kernels.isa());
        }
        assert!(kernels.reads(kernels.packing()));
    }
}
