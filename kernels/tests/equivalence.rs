//! Every instruction set computes what scalar computes, and scalar what the formulas say, over random and adversarial cases.
//!
//! Integers and floats alike must be equal to the bit. A failing run printed its seed; `STERNA_SEED=<seed>` repeats it.

use std::hash::{BuildHasher, RandomState};

use sterna_kernels::{
    AttentionState, DenseMatrix, Int8Matrix, Isa, Kernels, KvPage, LOGITS_BLOCK, LogitScale,
    PAGE_TOKENS, PANEL_ROWS, Packing, PanelScales, PrefetchQueue, QuantizedActivations,
    SPAN_TOKENS, ScaledActivations, Span, TernaryMatrix, f16_from_f32, f32_from_f16,
};

const F16_NAN: u16 = 0x7e00;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    /// Seeded from `STERNA_SEED`, or freshly. Prints the seed, which the test harness shows when the test fails.
    fn from_env() -> Rng {
        let seed = match std::env::var("STERNA_SEED") {
            Ok(seed) => seed.parse().expect("STERNA_SEED is a whole number"),
            Err(_) => RandomState::new().hash_one(0),
        };
        println!("STERNA_SEED={seed}");
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Uniform in −1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    fn halves(&mut self, count: usize) -> Vec<u16> {
        (0..count).map(|_| f16_from_f32(self.float())).collect()
    }
}

fn each_isa() -> impl Iterator<Item = Kernels> {
    Isa::available().map(|isa| Kernels::new(isa).expect("it is available"))
}

fn scalar() -> Kernels {
    Kernels::new(Isa::Scalar).expect("every machine runs scalar")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn the_required_isa_is_detected() {
    if let Ok(required) = std::env::var("REQUIRE_ISA") {
        let required: Isa = required.parse().unwrap();
        assert!(
            required.is_available(),
            "this CPU was to have {required}; best is {}",
            Isa::best()
        );
    }
    println!("available: {:?}", Isa::available().collect::<Vec<_>>());
}

// Ternary products.

struct Ternary {
    weights: [TernaryMatrix; 2], // In both packings.
    x: QuantizedActivations,
    factors: Vec<f32>, // By token; 1 for every other, so that sums show as they are.
}

impl Ternary {
    /// `code(row, column)` is a weight plus one, `q(token, column)` an activation; at least one activation of a token must be ±127.
    fn new(
        [m, n, k]: [usize; 3],
        mut code: impl FnMut(usize, usize) -> u8,
        mut q: impl FnMut(usize, usize) -> f32,
    ) -> Ternary {
        let rows = (0..n).map(|row| (0..k).map(|column| code(row, column)).collect());
        let rows: Vec<Vec<u8>> = rows.collect();
        let packed = |packing| {
            let mut weights = TernaryMatrix::new(n, k, packing);
            for mut panel in weights.panels_mut() {
                for row in panel.rows() {
                    panel.set_row(row, &rows[row]);
                }
            }
            weights
        };
        let weights = [Packing::TwoBit, Packing::FiveTrit].map(packed);
        let mut x = QuantizedActivations::new(m + 1, k + 5);
        x.reset(m, k);
        for (token, mut out) in x.tokens_mut().enumerate() {
            let row: Vec<f32> = (0..k).map(|column| q(token, column)).collect();
            scalar().quantize(&row, &mut out);
        }
        let factors = (0..m).map(|token| [1.0, 0.37 / m as f32][token % 2]);
        let factors = factors.collect();
        Ternary {
            weights,
            x,
            factors,
        }
    }

    fn random(rng: &mut Rng, [m, n, k]: [usize; 3]) -> Ternary {
        let mut codes = Rng(rng.next());
        Ternary::new([m, n, k], |_, _| codes.below(3) as u8, |_, _| rng.float())
    }

    fn run(&self, kernels: Kernels, weights: &TernaryMatrix) -> Vec<u32> {
        let mut out = vec![f32::NAN; weights.panels() * self.x.tokens() * PANEL_ROWS];
        let panels = 0..weights.panels();
        // What is asked for meanwhile changes nothing, however much there is of it.
        let memory = [0; 5000];
        let mut pieces = [&memory[..], &[], &memory[7..207], &memory[..4096]].into_iter();
        let mut ahead = PrefetchQueue::new(&mut pieces);
        kernels.ternary_matmul(weights, panels, self.scaled(), &mut out, &mut ahead);
        bits(&out)
    }

    fn scaled(&self) -> ScaledActivations<'_> {
        ScaledActivations {
            activations: &self.x,
            factors: &self.factors,
        }
    }

    /// Every instruction set with every packing that it reads.
    fn ways(&self) -> impl Iterator<Item = (Kernels, &TernaryMatrix)> {
        let ways = each_isa().flat_map(|isa| self.weights.iter().map(move |w| (isa, w)));
        ways.filter(|(kernels, weights)| kernels.reads(weights.packing()))
    }

    /// The product by its formula, from single weights.
    fn expected(&self) -> Vec<u32> {
        let [weights, _] = &self.weights;
        let mut out = Vec::new();
        for panel in 0..weights.panels() {
            for token in 0..self.x.tokens() {
                for row in panel * PANEL_ROWS..(panel + 1) * PANEL_ROWS {
                    let real = row < weights.rows();
                    let q = self.x.row(token).iter().enumerate();
                    let dot = q.map(|(k, &q)| i32::from(weights.weight(row, k)) * i32::from(q));
                    let sum: i32 = if real { dot.sum() } else { 0 };
                    out.push((sum as f32 * self.factors[token]).to_bits());
                }
            }
        }
        out
    }

    fn check(&self, what: &str) {
        let expected = self.run(scalar(), &self.weights[0]);
        for (kernels, weights) in self.ways() {
            let (m, n, k) = (self.x.tokens(), weights.rows(), weights.columns());
            assert!(
                self.run(kernels, weights) == expected,
                "{what}: {}, {:?} at m {m}, n {n}, k {k}",
                kernels.isa(),
                weights.packing()
            );
        }
    }
}

#[test]
fn ternary_products_follow_the_formula() {
    let mut rng = Rng::from_env();
    for _ in 0..40 {
        let shape = [1 + rng.below(9), 1 + rng.below(70), 1 + rng.below(150)];
        let case = Ternary::random(&mut rng, shape);
        let scalars = case.run(scalar(), &case.weights[0]);
        assert_eq!(scalars, case.expected(), "{shape:?}");
        case.check("a small shape");
    }
}

#[test]
fn ternary_products_are_equal_at_the_widths_of_real_checkpoints() {
    let mut rng = Rng::from_env();
    for k in [192, 320, 640, 896, 2560, 6912, 8192] {
        let n = 1 + rng.below(80);
        let m = rng.pick(&[1, 2, 3, 4, 5, 8, 9]);
        Ternary::random(&mut rng, [m, n, k]).check("a real width");
    }
}

#[test]
fn ternary_products_are_equal_for_every_number_of_tokens() {
    let mut rng = Rng::from_env();
    for m in (1..=17).chain([31, 33, 64, 128, 257, 300]) {
        let n = 1 + rng.below(40);
        let k = rng.pick(&[16, 20, 64, 129, 260]);
        Ternary::random(&mut rng, [m, n, k]).check("a number of tokens");
    }
}

#[test]
fn ternary_sums_of_extremes_do_not_overflow() {
    for k in [4, 128, 2560, 8192] {
        for m in 1..=8 {
            for sign in [1.0, -1.0] {
                let shape = [m, 33, k];
                Ternary::new(shape, |_, _| 2, |_, _| sign).check("all +1");
                Ternary::new(shape, |_, _| 0, |_, _| sign).check("all −1");
                Ternary::new(shape, |_, _| 1, |_, _| sign).check("all 0");
                Ternary::new(
                    shape,
                    |_, k| if k % 2 == 0 { 2 } else { 0 },
                    |_, k| if k % 2 == 0 { sign } else { -sign },
                )
                .check("alternating");
            }
            Ternary::new([m, 33, k], |_, _| 2, |_, _| 0.0).check("zero activations");
        }
    }
}

#[test]
fn a_range_of_panels_is_that_part_of_the_whole() {
    let mut rng = Rng::from_env();
    let case = Ternary::random(&mut rng, [5, 150, 100]);
    let dense = DenseMatrix::from_f32(150, 100, rng.floats(150 * 100));
    let x = rng.floats(5 * 100);
    for (kernels, weights) in case.ways() {
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
fn a_packing_that_an_isa_does_not_read_is_refused() {
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

// Products with 8-bit weights.

/// A matrix of the given weights, and the product with `x` by every instruction set, which must be that of the formula.
fn check_int8(rows: &[Vec<f32>], x: &QuantizedActivations) {
    let (n, k, m) = (rows.len(), rows[0].len(), x.tokens());
    let mut weights = Int8Matrix::new(n, k);
    for mut panel in weights.panels_mut() {
        for row in panel.rows() {
            panel.set_row(row, &rows[row]);
        }
    }
    let mut expected = vec![0; weights.panels() * m * PANEL_ROWS];
    for (row, token) in (0..n).flat_map(|row| (0..m).map(move |token| (row, token))) {
        let products = x.row(token).iter().enumerate();
        expected[row / PANEL_ROWS * m * PANEL_ROWS + token * PANEL_ROWS + row % PANEL_ROWS] =
            products
                .map(|(k, &q)| i32::from(weights.weight(row, k)) * i32::from(q))
                .sum();
    }
    for kernels in each_isa() {
        let mut out = vec![i32::MIN; expected.len()];
        kernels.int8_matmul(&weights, 0..weights.panels(), x, &mut out);
        assert!(out == expected, "{} at m {m}, n {n}, k {k}", kernels.isa());
        if weights.panels() > 1 {
            let mut part = vec![0; m * PANEL_ROWS];
            kernels.int8_matmul(&weights, 1..2, x, &mut part);
            assert_eq!(part, out[m * PANEL_ROWS..2 * m * PANEL_ROWS]);
        }
    }
}

#[test]
fn int8_products_are_equal() {
    let mut rng = Rng::from_env();
    for m in (1..=17).chain([64, 300]) {
        let n = 1 + rng.below(70);
        let k = rng.pick(&[1, 4, 15, 64, 257, 2560]);
        let rows: Vec<Vec<f32>> = (0..n).map(|_| rng.floats(k)).collect();
        let mut x = QuantizedActivations::new(m, k);
        x.reset(m, k);
        for mut token in x.tokens_mut() {
            scalar().quantize(&rng.floats(k), &mut token);
        }
        check_int8(&rows, &x);
    }
}

#[test]
fn int8_sums_of_extremes_do_not_overflow() {
    let shapes = [(4, 1.0), (2560, -1.0), (65_536, 1.0), (65_536, -1.0)];
    for ((k, sign), m) in shapes
        .into_iter()
        .flat_map(|shape| [(shape, 3), (shape, 5)])
    {
        let mut x = QuantizedActivations::new(m, k);
        x.reset(m, k);
        for mut token in x.tokens_mut() {
            scalar().quantize(&vec![sign; k], &mut token);
        }
        check_int8(&[vec![1.0; k], vec![-1.0; k], vec![0.0; k]], &x);
    }
}

#[test]
fn panels_are_scaled_equally_and_the_largest_found() {
    let mut rng = Rng::from_env();
    for rows in 1..=PANEL_ROWS {
        let m = 1 + rng.below(5);
        let mut acc: Vec<i32> = (0..m * PANEL_ROWS)
            .map(|_| rng.next() as i32 >> 8)
            .collect();
        acc[0] = 0;
        let (mut scales, factors) = (rng.floats(rows), rng.floats(m));
        scales[0] = rng.pick(&[1.0, f32::INFINITY]); // Times 0, that is no number.
        let mut expected = vec![0.0; acc.len()];
        let mut expected_largest = vec![f32::NEG_INFINITY; m];
        for (token, row) in (0..m).flat_map(|token| (0..rows).map(move |row| (token, row))) {
            let at = token * PANEL_ROWS + row;
            expected[at] = acc[at] as f32 * (scales[row] * factors[token]);
            expected_largest[token] = expected_largest[token].max(expected[at]);
        }
        for kernels in each_isa() {
            let (mut out, mut largest) = (vec![1.0; acc.len()], vec![0.0; m]);
            let scales = PanelScales {
                row_scales: &scales,
                token_factors: &factors,
            };
            kernels.scale_panel(&acc, scales, &mut out, &mut largest);
            let bits = |values: &[f32]| -> Vec<u32> {
                let number = |value: &f32| if value.is_nan() { f32::NAN } else { *value };
                values.iter().map(|value| number(value).to_bits()).collect()
            };
            assert_eq!(bits(&out), bits(&expected), "{}", kernels.isa());
            assert_eq!(largest, expected_largest, "{}", kernels.isa());
        }
    }
}

// Float products.

#[test]
fn dense_products_are_equal_and_do_not_depend_on_company() {
    let mut rng = Rng::from_env();
    for round in 0..60 {
        let (m, n) = (1 + rng.below(11), 1 + rng.below(70));
        let k = rng.pick(&[1, 15, 16, 17, 64, 100, 192, 257]);
        let x = rng.floats(m * k);
        let weights = match round % 2 {
            0 => DenseMatrix::from_f16(n, k, rng.halves(n * k)),
            _ => DenseMatrix::from_f32(n, k, rng.floats(n * k)),
        };
        let product = |kernels: Kernels, x: &[f32]| {
            let m = x.len() / k;
            let mut out = vec![f32::NAN; weights.panels() * m * PANEL_ROWS];
            kernels.dense_matmul(&weights, 0..weights.panels(), x, m, &mut out);
            out
        };
        let expected = product(scalar(), &x);
        check_dense(&weights, &x, m, &expected);
        for kernels in each_isa() {
            assert_eq!(
                bits(&product(kernels, &x)),
                bits(&expected),
                "{} at m {m}, n {n}, k {k}",
                kernels.isa()
            );
            // Every row, descending, then again.
            let rows: Vec<u32> = (0..n as u32).rev().chain(0..n as u32).collect();
            let mut dots = vec![f32::NAN; rows.len()];
            for token in 0..m {
                kernels.dense_dots(&weights, &rows, &x[token * k..(token + 1) * k], &mut dots);
                for (row, dot) in rows.iter().map(|row| *row as usize).zip(&dots) {
                    let at = (row / PANEL_ROWS * m + token) * PANEL_ROWS + row % PANEL_ROWS;
                    assert_eq!(dot.to_bits(), expected[at].to_bits(), "{}", kernels.isa());
                }
            }
            for token in 0..m {
                let alone = product(kernels, &x[token * k..(token + 1) * k]);
                for (panel, alone) in alone.chunks(PANEL_ROWS).enumerate() {
                    let together = &expected[(panel * m + token) * PANEL_ROWS..][..PANEL_ROWS];
                    assert_eq!(
                        bits(alone),
                        bits(together),
                        "{}: token {token} of {m}",
                        kernels.isa()
                    );
                }
            }
        }
    }
}

/// Within f32 rounding of the exact product; zero in the rows that only fill a panel.
fn check_dense(weights: &DenseMatrix, x: &[f32], m: usize, out: &[f32]) {
    let mut row_values = vec![0.0; weights.columns()];
    for row in 0..weights.panels() * PANEL_ROWS {
        row_values.fill(0.0);
        if row < weights.rows() {
            scalar().dense_row(weights, row, &mut row_values);
        }
        for (token, x) in x.chunks(weights.columns()).enumerate() {
            let exact: f64 = row_values
                .iter()
                .zip(x)
                .map(|(&w, &x)| f64::from(w) * f64::from(x))
                .sum();
            let value =
                out[row / PANEL_ROWS * m * PANEL_ROWS + token * PANEL_ROWS + row % PANEL_ROWS];
            assert!(
                (f64::from(value) - exact).abs() < 1e-4,
                "row {row}, token {token}: {value}, exactly {exact}"
            );
        }
    }
}

#[test]
fn dense_rows_are_equal() {
    let mut rng = Rng::from_env();
    for k in [1, 16, 77, 256] {
        let values = rng.halves(3 * k);
        let weights = DenseMatrix::from_f16(3, k, values.clone());
        for kernels in each_isa() {
            let mut row = vec![0.0; k];
            kernels.dense_row(&weights, 1, &mut row);
            let expected: Vec<f32> = values[k..2 * k]
                .iter()
                .map(|&half| f32_from_f16(half))
                .collect();
            assert_eq!(bits(&row), bits(&expected));
        }
    }
}

// Single rows.

#[test]
fn row_kernels_are_equal() {
    let mut rng = Rng::from_env();
    for _ in 0..200 {
        let count = 1 + rng.below(300);
        let scale = rng.pick(&[1e-6, 0.1, 1.0, 30.0, 1e4]);
        let x: Vec<f32> = rng.floats(count).iter().map(|x| x * scale).collect();
        let y = rng.floats(count);
        let run = |kernels: Kernels| {
            let mut outs = vec![vec![f32::NAN; count]; 3];
            kernels.rms_norm(&x, &y, 1e-5, &mut outs[0]);
            kernels.relu2_gate(&x, &y, &mut outs[1]);
            kernels.silu_gate(&x, &y, &mut outs[2]);
            bits(&outs.concat())
        };
        let expected = run(scalar());
        for kernels in each_isa() {
            assert_eq!(
                run(kernels),
                expected,
                "{} with {count} values up to {scale}",
                kernels.isa()
            );
        }
    }
}

#[test]
fn quantization_is_equal() {
    let mut rng = Rng::from_env();
    for round in 0..200 {
        let count = 1 + rng.below(300);
        let scale = rng.pick(&[0.0, 1e-7, 1.0, 1e5]);
        // Every other row is made of exact halves, which round to even.
        let halves = |x: f32| (x * 254.0).round() / 2.0;
        let mut x: Vec<f32> = rng
            .floats(count)
            .iter()
            .map(|x| {
                if round % 2 == 0 {
                    x * scale
                } else {
                    halves(*x)
                }
            })
            .collect();
        if round % 2 == 1 {
            x[count / 2] = 127.0;
        }
        let run = |kernels: Kernels| {
            let mut out = QuantizedActivations::new(2, 300);
            out.reset(1, count);
            out.tokens_mut()
                .for_each(|mut token| kernels.quantize(&x, &mut token));
            (out.row(0).to_vec(), out.scales()[0].to_bits(), out.sum(0))
        };
        let expected = run(scalar());
        assert_eq!(
            expected.2,
            expected.0.iter().map(|&q| i32::from(q)).sum::<i32>()
        );
        for kernels in each_isa() {
            assert_eq!(run(kernels), expected, "{}", kernels.isa());
        }
    }
}

#[test]
fn rotations_are_equal() {
    let mut rng = Rng::from_env();
    for head_dim in [2, 16, 64, 80, 128] {
        let x = rng.floats(3 * head_dim);
        let angles = rng.floats(head_dim / 2);
        let cos: Vec<f32> = angles.iter().map(|a| (4.0 * a).cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| (4.0 * a).sin()).collect();
        let run = |kernels: Kernels| {
            let mut x = x.clone();
            kernels.rope(&mut x, head_dim, &cos, &sin);
            bits(&x)
        };
        let expected = run(scalar());
        for kernels in each_isa() {
            assert_eq!(
                run(kernels),
                expected,
                "{} with heads of {head_dim}",
                kernels.isa()
            );
        }
    }
}

// Rows of logits.

/// Rows shorter than a block, of whole blocks, with tails of every length; with ties, with what is not finite, and what weighs nothing.
fn row_of_logits(rng: &mut Rng) -> Vec<f32> {
    let count = match rng.below(3) {
        0 => 1 + rng.below(300),
        1 => LOGITS_BLOCK * (1 + rng.below(4)),
        _ => 1 + rng.below(5 * LOGITS_BLOCK),
    };
    let spread = rng.pick(&[0.0, 1.0, 10.0, 200.0]);
    let is_tied = rng.below(2) == 0;
    let step = |x: f32| if is_tied { x.round() } else { x };
    let mut logits: Vec<f32> = (0..count).map(|_| step(rng.float() * spread)).collect();
    if rng.below(4) == 0 {
        let odd = rng.pick(&[f32::NEG_INFINITY, f32::INFINITY, f32::NAN]);
        logits[rng.below(count)] = odd;
    }
    logits
}

#[test]
fn logits_are_scanned_alike() {
    let mut rng = Rng::from_env();
    for _ in 0..500 {
        let logits = row_of_logits(&mut rng);
        let larger = |a, &b: &f32| if b > a { b } else { a };
        let blocks = logits.chunks(LOGITS_BLOCK);
        let expected: Vec<f32> = blocks
            .map(|block| block.iter().fold(f32::NEG_INFINITY, larger))
            .collect();
        for kernels in each_isa() {
            let mut peaks = vec![f32::NAN; expected.len()];
            let is_finite = kernels.scan_logits(&logits, &mut peaks);
            assert_eq!(peaks, expected, "{}", kernels.isa());
            assert_eq!(is_finite, logits.iter().all(|logit| logit.is_finite()));
        }
    }
}

#[test]
fn logits_are_weighed_alike() {
    let mut rng = Rng::from_env();
    for _ in 0..500 {
        let mut logits = row_of_logits(&mut rng);
        let forbidden = |logit: &mut f32| *logit = f32::NEG_INFINITY;
        let odd = logits.iter_mut().filter(|logit| !logit.is_finite());
        odd.for_each(forbidden);
        logits.push(rng.float());
        let scale = LogitScale {
            largest: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            inverse_temperature: rng.pick(&[1.0, 0.5, 1.25, 30.0]),
        };
        let blocks = logits.len().div_ceil(LOGITS_BLOCK);
        let bar = rng.pick(&[1e-30, 0.01, 0.3, 1.0]);
        let run = |kernels: Kernels| {
            let mut weights = vec![f32::NAN; logits.len()];
            let [mut masses, mut heaviest, mut sums] = [(); 3].map(|()| vec![f32::NAN; blocks]);
            kernels.weigh_logits(&logits, scale, &mut weights, &mut masses, &mut heaviest);
            kernels.sum_weights(&logits, scale, &mut sums);
            assert_eq!(bits(&sums), bits(&masses), "with and without weights");
            let (mass, count) = kernels.weights_from(bar, &weights, &heaviest);
            let all = [&weights[..], &masses, &heaviest].concat();
            let expected = weights.iter().filter(|weight| **weight >= bar).count();
            assert_eq!(count, expected, "{} from {bar} up", kernels.isa());
            kernels.drop_weights(bar, &mut weights, &heaviest, &mut masses);
            let left: f64 = masses.iter().copied().map(f64::from).sum();
            assert_eq!(
                left.to_bits(),
                mass.to_bits(),
                "what is left is what counts"
            );
            (bits(&all), bits(&weights), bits(&masses))
        };
        let expected = run(scalar());
        for (weight, &logit) in expected.0.iter().zip(&logits) {
            assert_eq!(*weight, scale.weight(logit).to_bits());
            let exact = f64::from((logit - scale.largest) * scale.inverse_temperature).exp();
            let error = (f64::from(f32::from_bits(*weight)) - exact).abs();
            assert!(error <= 3e-7 * exact + 1e-37, "{error} off {exact}");
        }
        for kernels in each_isa() {
            assert_eq!(run(kernels), expected, "{}", kernels.isa());
        }
    }
}

// Attention.

/// Queries of a group, and a KV head's pages. What no query may read is NaN.
struct Attention {
    head_dim: usize,
    group: usize,
    keys: usize,
    queries: Vec<f32>,
    pages: Vec<(Vec<u16>, Vec<u16>)>,
}

impl Attention {
    fn random(rng: &mut Rng, group: usize, head_dim: usize, keys: usize) -> Attention {
        let sharpness = rng.pick(&[1.0, 8.0, 100.0]);
        let queries = rng
            .floats(group * head_dim)
            .iter()
            .map(|x| x * sharpness)
            .collect();
        let page = (
            vec![F16_NAN; PAGE_TOKENS * head_dim],
            vec![F16_NAN; PAGE_TOKENS * head_dim],
        );
        let mut pages = vec![page; keys.div_ceil(PAGE_TOKENS)];
        for token in 0..keys {
            let (k_page, v_page) = &mut pages[token / PAGE_TOKENS];
            let (key, value) = (rng.floats(head_dim), rng.floats(head_dim));
            scalar().store_kv(&key, &value, token % PAGE_TOKENS, k_page, v_page);
        }
        Attention {
            head_dim,
            group,
            keys,
            queries,
            pages,
        }
    }

    /// The output when only the first `visible` keys are seen.
    fn run(&self, kernels: Kernels, visible: usize) -> Vec<f32> {
        self.run_block(kernels, &self.queries, visible)
    }

    /// The output of queries `[position][g][d]` of neighbouring positions, of which the first sees `visible` keys and each further one
    /// one more; all in one span.
    fn run_block(&self, kernels: Kernels, queries: &[f32], visible: usize) -> Vec<f32> {
        let pages: Vec<KvPage> = self
            .pages
            .iter()
            .map(|(keys, values)| KvPage { keys, values })
            .collect();
        let positions = queries.len() / (self.group * self.head_dim);
        let mut state = AttentionState::new(self.group + 1, self.head_dim);
        state.reset(self.group, positions, self.head_dim);
        for (i, query) in queries.chunks(self.head_dim).enumerate() {
            state
                .query_mut(i / self.group, i % self.group)
                .copy_from_slice(query);
        }
        let pages = &pages[..(visible + positions - 1).div_ceil(PAGE_TOKENS)];
        let mut spans = pages.chunks(SPAN_TOKENS / PAGE_TOKENS).peekable();
        let mut before = 0;
        while let Some(pages) = spans.next() {
            let span = Span {
                pages,
                next: spans.peek().copied().unwrap_or(&[]),
                visible: SPAN_TOKENS.min(visible - before),
            };
            kernels.attention_span(span, &mut state);
            before += SPAN_TOKENS;
        }
        let mut out = vec![f32::NAN; queries.len()];
        kernels.attention_finish(&state, &mut out);
        out
    }

    /// Softmax attention by its formula, in f64.
    fn expected(&self, visible: usize) -> Vec<f64> {
        let d = self.head_dim;
        let key = |token: usize, i: usize| {
            f64::from(f32_from_f16(self.pages[token / 16].0[i * 16 + token % 16]))
        };
        let value = |token: usize, i: usize| {
            f64::from(f32_from_f16(self.pages[token / 16].1[token % 16 * d + i]))
        };
        let mut out = Vec::new();
        for query in self.queries.chunks(d) {
            let score = |token| {
                (0..d)
                    .map(|i| f64::from(query[i]) * key(token, i))
                    .sum::<f64>()
                    / (d as f64).sqrt()
            };
            let scores: Vec<f64> = (0..visible).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..d).map(|i| {
                (0..visible)
                    .map(|token| weights[token] * value(token, i))
                    .sum::<f64>()
                    / sum
            }));
        }
        out
    }

    fn check(&self, visible: usize) {
        let what = format!(
            "g {}, d {}, {visible} of {} keys",
            self.group, self.head_dim, self.keys
        );
        let scalar_out = self.run(scalar(), visible);
        for (value, exact) in scalar_out.iter().zip(self.expected(visible)) {
            assert!(
                (f64::from(*value) - exact).abs() < 1e-4,
                "{what}: {value}, exactly {exact}"
            );
        }
        for kernels in each_isa() {
            assert_eq!(
                bits(&self.run(kernels, visible)),
                bits(&scalar_out),
                "{}: {what}",
                kernels.isa()
            );
        }
    }
}

#[test]
fn attention_is_softmax_and_equal_everywhere() {
    let mut rng = Rng::from_env();
    for group in 1..=9 {
        for head_dim in [16, 32, 64, 80, 128, 256] {
            let keys = 1 + rng.below(SPAN_TOKENS);
            Attention::random(&mut rng, group, head_dim, keys).check(keys);
        }
    }
}

#[test]
fn attention_merges_spans() {
    let mut rng = Rng::from_env();
    for keys in [256, 257, 512, 600, 1025] {
        Attention::random(&mut rng, 4, 64, keys).check(keys);
    }
}

#[test]
fn attention_does_not_see_what_comes_later() {
    let mut rng = Rng::from_env();
    let long = Attention::random(&mut rng, 5, 32, 300);
    for visible in [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 299] {
        // The same sequence when it was shorter: beyond its keys, memory is NaN.
        let mut short = Attention {
            keys: visible,
            queries: long.queries.clone(),
            pages: long.pages.clone(),
            ..long
        };
        for token in visible..short.pages.len() * PAGE_TOKENS {
            let (keys, values) = &mut short.pages[token / PAGE_TOKENS];
            keys.iter_mut()
                .skip(token % PAGE_TOKENS)
                .step_by(PAGE_TOKENS)
                .for_each(|key| *key = F16_NAN);
            values[token % PAGE_TOKENS * 32..][..32].fill(F16_NAN);
        }
        short.check(visible);
        for kernels in each_isa() {
            assert_eq!(
                bits(&short.run(kernels, visible)),
                bits(&long.run(kernels, visible)),
                "{visible} keys"
            );
        }
    }
}

#[test]
fn neighbouring_positions_are_as_each_alone() {
    let mut rng = Rng::from_env();
    for _ in 0..80 {
        let (group, head_dim) = (1 + rng.below(9), rng.pick(&[16, 32, 48, 80, 128, 256]));
        let (positions, before) = (1 + rng.below(PAGE_TOKENS), rng.below(600));
        let before = match before % SPAN_TOKENS + positions {
            in_span if in_span > SPAN_TOKENS => before / SPAN_TOKENS * SPAN_TOKENS,
            _ => before,
        };
        let keys = before + positions;
        let mut case = Attention::random(&mut rng, group, head_dim, keys);
        let width = group * head_dim;
        let queries = rng.floats(positions * width);
        // The last token is such as must not even be multiplied by zero; only its own position sees it.
        let checked = if positions > 1 {
            let last = [f32::NAN, f32::INFINITY].map(|x| vec![x; head_dim]);
            let (k_page, v_page) = case.pages.last_mut().expect("there are keys");
            let slot = (keys - 1) % PAGE_TOKENS;
            scalar().store_kv(&last[0], &last[1], slot, k_page, v_page);
            positions - 1
        } else {
            1
        };
        for kernels in each_isa() {
            let together = case.run_block(kernels, &queries, before + 1);
            for (i, query) in queries.chunks(width).take(checked).enumerate() {
                let what = format!("g {group}, d {head_dim}, position {before} + {i}");
                let alone = bits(&case.run_block(scalar(), query, before + 1 + i));
                let isa = kernels.isa();
                assert_eq!(
                    bits(&together[i * width..][..width]),
                    alone,
                    "{isa}: {what}"
                );
            }
        }
    }
}

#[test]
fn a_head_does_not_depend_on_its_group() {
    let mut rng = Rng::from_env();
    let group = Attention::random(&mut rng, 7, 48, 100);
    for kernels in each_isa() {
        let together = group.run(kernels, 100);
        for (head, query) in group.queries.chunks(48).enumerate() {
            let alone = Attention {
                group: 1,
                queries: query.to_vec(),
                pages: group.pages.clone(),
                ..group
            };
            assert_eq!(
                bits(&alone.run(kernels, 100)),
                bits(&together[head * 48..][..48]),
                "head {head}"
            );
        }
    }
}

#[test]
fn stored_keys_and_values_are_equal_and_touch_nothing_else() {
    let mut rng = Rng::from_env();
    for head_dim in [16, 24, 64, 128] {
        let scale = rng.pick(&[1e-6, 1.0, 1e5]);
        let key: Vec<f32> = rng.floats(head_dim).iter().map(|x| x * scale).collect();
        let value: Vec<f32> = rng.floats(head_dim).iter().map(|x| x * scale).collect();
        let slot = rng.below(PAGE_TOKENS);
        for kernels in each_isa() {
            let mut k_page = vec![F16_NAN; PAGE_TOKENS * head_dim];
            let mut v_page = k_page.clone();
            kernels.store_kv(&key, &value, slot, &mut k_page, &mut v_page);
            for i in 0..head_dim {
                for token in 0..PAGE_TOKENS {
                    let [k, v] = if token == slot {
                        [key[i], value[i]].map(f16_from_f32)
                    } else {
                        [F16_NAN; 2]
                    };
                    assert_eq!(k_page[i * PAGE_TOKENS + token], k, "{}", kernels.isa());
                    assert_eq!(v_page[token * head_dim + i], v, "{}", kernels.isa());
                }
            }
        }
    }
}
