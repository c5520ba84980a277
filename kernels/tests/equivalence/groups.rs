//! Products of ternary weights with a scale for each group of columns, and their rows as floats.

use sterna_kernels::{
    GroupSize, Kernels, PANEL_ROWS, Packing, PrefetchQueue, QuantizedActivations,
    ScaledActivations, TernaryMatrix, f16_from_f32, f32_from_f16,
};
use sterna_random::Random;

use crate::{bits, each_isa, float, scalar};

/// The dimensions of a product, in groups instead of columns.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tokens: usize,
    rows: usize,
    groups: usize,
    size: GroupSize,
}

impl Shape {
    fn columns(self) -> usize {
        self.groups * self.size.columns()
    }
}

struct GroupCase {
    shape: Shape,
    codes: Vec<Vec<u8>>,         // [row][column]
    scales: Vec<Vec<u16>>,       // [row][group]
    weights: [TernaryMatrix; 2], // In both packings.
    tokens: Vec<Vec<f32>>,
    x: QuantizedActivations,
}

impl GroupCase {
    /// `code(row, column)` is a weight plus one, `scale(row, group)` the bits of a scale,
    /// `value(token, column)` an activation.
    fn new(
        shape: Shape,
        mut code: impl FnMut(usize, usize) -> u8,
        mut scale: impl FnMut(usize, usize) -> u16,
        mut value: impl FnMut(usize, usize) -> f32,
    ) -> GroupCase {
        let (rows, columns) = (shape.rows, shape.columns());
        let table = |row| (0..columns).map(|column| code(row, column)).collect();
        let codes: Vec<Vec<u8>> = (0..rows).map(table).collect();
        let table = |row| (0..shape.groups).map(|group| scale(row, group)).collect();
        let scales: Vec<Vec<u16>> = (0..rows).map(table).collect();
        let table = |token| (0..columns).map(|column| value(token, column)).collect();
        let tokens: Vec<Vec<f32>> = (0..shape.tokens).map(table).collect();
        let packed = |packing| {
            let mut weights = TernaryMatrix::with_groups(rows, columns, packing, shape.size)
                .expect("whole groups");
            for mut panel in weights.panels_mut() {
                for row in panel.rows() {
                    panel.set_scales(row, &scales[row]);
                    panel.set_row(row, &codes[row]);
                }
            }
            weights
        };
        let weights = [Packing::TwoBit, Packing::FiveTrit].map(packed);
        let mut x = QuantizedActivations::new(shape.tokens, columns);
        quantize(scalar(), shape, &tokens, &mut x);
        GroupCase {
            shape,
            codes,
            scales,
            weights,
            tokens,
            x,
        }
    }

    fn random(random: &mut Random, shape: Shape) -> GroupCase {
        let mut codes = Random::new(random.next_u64());
        let mut scales = Random::new(random.next_u64());
        // Some groups of activations are all zero, some are large.
        let mut sizes = Random::new(random.next_u64());
        let mut size = 1.0;
        GroupCase::new(
            shape,
            |_, _| codes.below(3) as u8,
            |_, _| match scales.below(8) {
                0 => 0,
                _ => f16_from_f32(0.1 * float(&mut scales)),
            },
            |_, column| {
                if column.is_multiple_of(shape.size.columns()) {
                    size = sizes.pick(&[0.0, 1e-3, 1.0, 30.0]);
                }
                size * float(random)
            },
        )
    }

    /// Returns 1 / s of every token and group.
    fn factors(&self) -> Vec<f32> {
        self.x.scales().iter().map(|scale| 1.0 / scale).collect()
    }

    fn run(&self, kernels: Kernels, weights: &TernaryMatrix) -> Vec<f32> {
        let mut out = vec![f32::NAN; weights.panels() * self.shape.tokens * PANEL_ROWS];
        let factors = self.factors();
        let x = ScaledActivations {
            activations: &self.x,
            factors: &factors,
        };
        // Prefetches do not change the result.
        let memory = [0; 5000];
        let mut pieces = [&memory[..], &[], &memory[7..207]].into_iter();
        let mut prefetches = PrefetchQueue::new(&mut pieces);
        let panels = 0..weights.panels();
        kernels.ternary_matmul(weights, panels, x, &mut out, &mut prefetches);
        out
    }

    /// Returns every instruction set with every packing that it reads.
    fn combinations(&self) -> impl Iterator<Item = (Kernels, &TernaryMatrix)> {
        let all = each_isa().flat_map(|isa| self.weights.iter().map(move |w| (isa, w)));
        all.filter(|(kernels, weights)| kernels.reads(weights.packing()))
    }

    /// Calls `output(row, token, place)` for every output. Rows beyond the last are `None`.
    fn for_each_output(&self, mut output: impl FnMut(Option<usize>, usize, usize)) {
        let panels = self.shape.rows.div_ceil(PANEL_ROWS);
        for place in 0..panels * self.shape.tokens * PANEL_ROWS {
            let panel = place / (self.shape.tokens * PANEL_ROWS);
            let row = panel * PANEL_ROWS + place % PANEL_ROWS;
            let token = place / PANEL_ROWS % self.shape.tokens;
            output((row < self.shape.rows).then_some(row), token, place);
        }
    }

    /// Computes the product by its definition, from the codes and scales.
    fn expected(&self) -> Vec<f32> {
        let (columns, factors) = (self.shape.size.columns(), self.factors());
        let mut out = Vec::new();
        self.for_each_output(|row, token, _| {
            let mut sum = 0.0;
            for group in 0..row.map_or(0, |_| self.shape.groups) {
                let row = row.unwrap_or_default();
                let span = group * columns..(group + 1) * columns;
                let pairs = self.codes[row][span.clone()]
                    .iter()
                    .zip(&self.x.row(token)[span]);
                let products = pairs.map(|(&code, &q)| (i32::from(code) - 1) * i32::from(q));
                let scale = f32_from_f16(self.scales[row][group]);
                let factor = scale * factors[token * self.shape.groups + group];
                sum = (products.sum::<i32>() as f32).mul_add(factor, sum);
            }
            out.push(sum);
        });
        out
    }

    fn check(&self, what: &str) {
        let expected = bits(&self.run(scalar(), &self.weights[0]));
        for (kernels, weights) in self.combinations() {
            assert!(
                bits(&self.run(kernels, weights)) == expected,
                "{what}: {}, {:?}, {:?}",
                kernels.isa(),
                weights.packing(),
                self.shape
            );
        }
    }
}

fn quantize(kernels: Kernels, shape: Shape, tokens: &[Vec<f32>], x: &mut QuantizedActivations) {
    x.reset_groups(shape.tokens, shape.columns(), shape.size)
        .expect("whole groups");
    for (row, mut out) in tokens.iter().zip(x.tokens_mut()) {
        kernels.quantize(row, &mut out);
    }
}

#[test]
fn grouped_products_follow_the_definition() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        for _ in 0..8 {
            let shape = Shape {
                tokens: 1 + random.index(9),
                rows: 1 + random.index(70),
                groups: 1 + random.index(9),
                size,
            };
            let case = GroupCase::random(&mut random, shape);
            let scalars = case.run(scalar(), &case.weights[0]);
            assert_eq!(bits(&scalars), bits(&case.expected()), "{shape:?}");
            case.check("a small shape");
        }
    }
}

#[test]
fn grouped_products_are_near_the_sum_in_double_precision() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        let shape = Shape {
            tokens: 3,
            rows: 40,
            groups: 2048 / size.columns(),
            size,
        };
        let case = GroupCase::random(&mut random, shape);
        let scales = case.x.scales();
        for (kernels, weights) in case.combinations() {
            let out = case.run(kernels, weights);
            case.for_each_output(|row, token, place| {
                let Some(row) = row else {
                    return assert_eq!(out[place], 0.0);
                };
                let (mut sum, mut magnitude) = (0.0, 0.0);
                for k in 0..shape.columns() {
                    let group = k / size.columns();
                    let weight = f64::from(case.codes[row][k]) - 1.0;
                    let weight = weight * f64::from(f32_from_f16(case.scales[row][group]));
                    let scale = f64::from(scales[token * shape.groups + group]);
                    let product = weight * f64::from(case.x.row(token)[k]) / scale;
                    sum += product;
                    magnitude += product.abs();
                }
                // Each group rounds twice in the factor and once in the sum.
                let bound = magnitude * f64::from(f32::EPSILON) * (shape.groups + 3) as f64;
                let error = (f64::from(out[place]) - sum).abs();
                assert!(
                    error <= bound,
                    "{error} > {bound} at row {row}, token {token}"
                );
            });
        }
    }
}

#[test]
fn grouped_products_are_equal_at_the_widths_of_real_checkpoints() {
    let mut random = Random::from_env();
    for columns in [512, 2048, 2560, 4096, 6144, 12_288] {
        let size = random.pick(&GroupSize::ALL);
        let shape = Shape {
            rows: 1 + random.index(40),
            tokens: random.pick(&[1, 2, 3, 4, 5, 8, 9]),
            groups: columns / size.columns(),
            size,
        };
        GroupCase::random(&mut random, shape).check("a real width");
    }
}

#[test]
fn grouped_products_are_equal_for_every_number_of_tokens() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        for tokens in (1..=17).chain([31, 33, 64, 65, 257]) {
            let shape = Shape {
                tokens,
                rows: 1 + random.index(40),
                groups: 1 + random.index(9),
                size,
            };
            GroupCase::random(&mut random, shape).check("a number of tokens");
        }
    }
}

#[test]
fn grouped_products_of_extreme_values_are_exact() {
    for size in GroupSize::ALL {
        for tokens in 1..=9 {
            let shape = Shape {
                tokens,
                rows: 33,
                groups: 3,
                size,
            };
            let one = |_, _| f16_from_f32(1.0);
            for sign in [1.0, -1.0] {
                for code in 0..=2 {
                    GroupCase::new(shape, |_, _| code, one, |_, _| sign).check("equal codes");
                }
                let alternating = |_, k: usize| [sign, -sign][k % 2];
                let code = |_, k: usize| [2, 0][k % 2];
                GroupCase::new(shape, code, one, alternating).check("alternating");
            }
            let zero = GroupCase::new(shape, |_, k| (k % 3) as u8, |_, _| 0, |_, _| 1.0);
            zero.check("scales of zero");
            let zero = GroupCase::new(shape, |_, _| 2, one, |_, _| 0.0);
            zero.check("activations of zero");
            assert!(
                zero.run(scalar(), &zero.weights[0])
                    .iter()
                    .all(|&out| out == 0.0)
            );
            let largest = |row, _| [0x7bff, 0xfbff, 0x0001][row % 3];
            GroupCase::new(shape, |_, _| 2, largest, |_, _| 1e30).check("extreme scales");
        }
    }
}

#[test]
fn a_token_and_a_range_of_panels_alone_give_the_same_bits() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        let shape = Shape {
            tokens: 11,
            rows: 150,
            groups: 5,
            size,
        };
        let case = GroupCase::random(&mut random, shape);
        let alone = Shape { tokens: 1, ..shape };
        let mut one = QuantizedActivations::new(1, shape.columns());
        quantize(scalar(), alone, &case.tokens[7..8], &mut one);
        let factors: Vec<f32> = one.scales().iter().map(|scale| 1.0 / scale).collect();
        for (kernels, weights) in case.combinations() {
            let whole = case.run(kernels, weights);
            let mut part = vec![0.0; 2 * PANEL_ROWS];
            let x = ScaledActivations {
                activations: &one,
                factors: &factors,
            };
            let mut prefetches = PrefetchQueue::empty();
            kernels.ternary_matmul(weights, 1..3, x, &mut part, &mut prefetches);
            for (i, part) in part.chunks_exact(PANEL_ROWS).enumerate() {
                let place = ((1 + i) * shape.tokens + 7) * PANEL_ROWS;
                assert_eq!(bits(part), bits(&whole[place..][..PANEL_ROWS]));
            }
        }
    }
}

#[test]
fn quantization_by_groups_is_that_of_each_group_alone_on_every_isa() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        let shape = Shape {
            tokens: 3,
            rows: 1,
            groups: 1 + random.index(6),
            size,
        };
        let case = GroupCase::random(&mut random, shape);
        for kernels in each_isa() {
            let mut x = QuantizedActivations::new(shape.tokens, shape.columns());
            quantize(kernels, shape, &case.tokens, &mut x);
            let mut alone = QuantizedActivations::new(1, size.columns());
            for (place, values) in case.tokens.iter().enumerate().flat_map(|(token, row)| {
                let groups = row.chunks_exact(size.columns()).enumerate();
                groups.map(move |(group, values)| ((token, group), values))
            }) {
                let (token, group) = place;
                alone.reset(1, size.columns());
                let mut only = alone.tokens_mut().next().unwrap();
                scalar().quantize(values, &mut only);
                let columns = group * size.columns()..(group + 1) * size.columns();
                assert_eq!(x.row(token)[columns], *alone.row(0));
                assert_eq!(x.sums(token)[group], alone.sum(0));
                let scale = x.scales()[token * shape.groups + group];
                assert_eq!(scale.to_bits(), alone.scales()[0].to_bits());
            }
        }
    }
}

#[test]
fn rows_and_weights_read_back_as_written() {
    let mut random = Random::from_env();
    for size in GroupSize::ALL {
        let shape = Shape {
            tokens: 1,
            rows: 70,
            groups: 3,
            size,
        };
        let mut case = GroupCase::random(&mut random, shape);
        TernaryMatrix::put_side_by_side(&mut case.weights.each_mut()[..]);
        for (weights, row) in case
            .weights
            .iter()
            .flat_map(|w| (0..70).map(move |row| (w, row)))
        {
            let mut values = vec![f32::NAN; shape.columns()];
            weights.copy_row(row, &mut values);
            for (k, value) in values.into_iter().enumerate() {
                let (weight, group) = (case.codes[row][k] as i8 - 1, k / size.columns());
                let scale = f32_from_f16(case.scales[row][group]);
                assert_eq!(weights.weight(row, k), weight);
                assert_eq!(weights.scale(row, group), scale);
                assert_eq!(value, f32::from(weight) * scale);
            }
        }
    }
}

#[test]
fn a_binary_weight_is_a_ternary_weight_that_is_never_zero() {
    let mut random = Random::from_env();
    let shape = Shape {
        tokens: 9,
        rows: 64,
        groups: 4,
        size: GroupSize::G128,
    };
    let mut codes = Random::new(random.next_u64());
    let code = |_, _| [0, 2][codes.index(2)];
    let scale = |row: usize, _| f16_from_f32(row as f32 / 64.0);
    let case = GroupCase::new(shape, code, scale, |_, _| float(&mut random));
    assert_eq!(
        bits(&case.run(scalar(), &case.weights[0])),
        bits(&case.expected())
    );
    case.check("binary weights");
}

#[test]
fn columns_that_are_not_whole_groups_are_refused() {
    for packing in [Packing::TwoBit, Packing::FiveTrit] {
        let refused = TernaryMatrix::with_groups(32, 320, packing, GroupSize::G128);
        let message = refused.err().unwrap().to_string();
        assert!(
            message.contains("320 columns is not whole groups of 128"),
            "{message}"
        );
        assert!(TernaryMatrix::with_groups(32, 320, packing, GroupSize::G64).is_ok());
    }
    let mut x = QuantizedActivations::new(1, 320);
    assert!(x.reset_groups(1, 320, GroupSize::G256).is_err());
}

#[test]
fn a_product_of_different_groups_panics() {
    for kernels in each_isa() {
        let product = |weights: Option<GroupSize>, activations: Option<GroupSize>| {
            let weights = match weights {
                None => TernaryMatrix::new(1, 256, Packing::TwoBit),
                Some(size) => TernaryMatrix::with_groups(1, 256, Packing::TwoBit, size).unwrap(),
            };
            let mut x = QuantizedActivations::new(1, 256);
            match activations {
                None => x.reset(1, 256),
                Some(size) => x.reset_groups(1, 256, size).unwrap(),
            }
            let factors = vec![1.0; x.scales().len()];
            std::panic::catch_unwind(|| {
                let mut out = [0.0; PANEL_ROWS];
                let x = ScaledActivations {
                    activations: &x,
                    factors: &factors,
                };
                let mut prefetches = PrefetchQueue::empty();
                kernels.ternary_matmul(&weights, 0..1, x, &mut out, &mut prefetches);
            })
        };
        let sizes = [None, Some(GroupSize::G64), Some(GroupSize::G256)];
        for (a, b) in sizes.into_iter().flat_map(|a| sizes.map(|b| (a, b))) {
            assert_eq!(product(a, b).is_ok(), a == b, "{a:?}, {b:?}");
        }
    }
}
