//! Products of 4-bit weights, and of rows that are rounded to 8 bits.

use sterna_kernels::{DenseMatrix, FourBitMatrix, Int8Matrix, PANEL_ROWS, QuantizedActivations};
use sterna_random::Random;

use crate::{each_isa, floats, scalar};

/// Checks that every instruction set computes the product of these weights and `x` as the formula
/// says.
fn check_four_bit(rows: &[Vec<f32>], x: &QuantizedActivations) {
    let (tokens, columns) = (x.tokens(), rows[0].len());
    let mut weights = FourBitMatrix::new(rows.len(), columns);
    let panels = weights.panels();
    for mut panel in weights.panels_mut() {
        for row in panel.rows() {
            let mut stored = rows[row].clone();
            panel.set_row(row, &mut stored);
        }
    }
    let mut expected = vec![0; panels * tokens * PANEL_ROWS];
    for (row, token) in (0..rows.len()).flat_map(|row| (0..tokens).map(move |token| (row, token))) {
        let products = x.row(token).iter().enumerate();
        expected[row / PANEL_ROWS * tokens * PANEL_ROWS + token * PANEL_ROWS + row % PANEL_ROWS] =
            products
                .map(|(k, &q)| i32::from(weights.weight(row, k)) * i32::from(q))
                .sum();
    }
    let exist = |at: usize| {
        let panel = at / (tokens * PANEL_ROWS);
        panel * PANEL_ROWS + at % PANEL_ROWS < rows.len()
    };
    for kernels in each_isa() {
        let check = |out: &[i32], from: usize| {
            let places = (from..from + out.len()).filter(|at| exist(*at));
            let mut wrong = places.filter(|at| out[at - from] != expected[*at]);
            let wrong = wrong.next();
            let (isa, rows) = (kernels.isa(), rows.len());
            assert_eq!(
                wrong, None,
                "{isa}: {tokens} tokens × {rows} rows × {columns}"
            );
        };
        let mut out = vec![i32::MIN; expected.len()];
        kernels.four_bit_matmul(&weights, 0..panels, x, &mut out);
        check(&out, 0);
        if panels > 1 {
            let mut part = vec![0; tokens * PANEL_ROWS];
            kernels.four_bit_matmul(&weights, 1..2, x, &mut part);
            check(&part, part.len());
        }
    }
}

fn quantized(rows: &[Vec<f32>]) -> QuantizedActivations {
    let mut x = QuantizedActivations::new(rows.len(), rows[0].len());
    x.reset(rows.len(), rows[0].len());
    for (mut token, row) in x.tokens_mut().zip(rows) {
        scalar().quantize(row, &mut token);
    }
    x
}

#[test]
fn four_bit_products_follow_the_formula() {
    let mut random = Random::from_env();
    for tokens in (1..=17).chain([64, 300]) {
        let rows = 1 + random.index(70);
        let columns = random.pick(&[1, 4, 7, 8, 15, 64, 257, 2528]);
        let mut matrix =
            |rows| -> Vec<_> { (0..rows).map(|_| floats(&mut random, columns)).collect() };
        check_four_bit(&matrix(rows), &quantized(&matrix(tokens)));
    }
}

#[test]
fn four_bit_sums_of_extreme_values_do_not_overflow() {
    for (columns, tokens) in [(8, 1), (2560, 5), (FourBitMatrix::MAX_COLUMNS, 2)] {
        // Alternating signs of the activations give each weight the same sign in the product.
        let signs = |columns| (0..columns).map(|k| if k % 2 == 0 { 1.0 } else { -1.0 });
        let x: Vec<f32> = signs(columns).collect();
        let mirrored = x.iter().map(|x| -x).collect();
        check_four_bit(
            &[x.clone(), mirrored, vec![1.0; columns], vec![0.0; columns]],
            &quantized(&vec![x; tokens]),
        );
    }
}

#[test]
fn a_row_is_stored_as_the_nearest_weights() {
    let mut random = Random::from_env();
    for columns in [1, 5, 8, 100] {
        let mut matrix = FourBitMatrix::new(40, columns);
        for mut panel in matrix.panels_mut().skip(1) {
            assert_eq!(panel.rows(), 32..40);
            for row in panel.rows() {
                let (weights, mut stored) = {
                    let weights = floats(&mut random, columns);
                    (weights.clone(), weights)
                };
                panel.set_row(row, &mut stored);
                let squares: f32 = weights.iter().map(|weight| weight * weight).sum();
                let step = 0.3352 * (squares / columns as f32).sqrt();
                for (weight, stored) in weights.iter().zip(&stored) {
                    let error = (weight - stored).abs();
                    let is_outermost = (stored.abs() / step - 7.5).abs() < 1e-3;
                    let is_beyond = is_outermost && weight.abs() > stored.abs();
                    assert!(error <= 0.501 * step || is_beyond, "{weight} as {stored}");
                }
            }
        }
        let all_zero = matrix.scales(0).iter().all(|scale| *scale == 0.0);
        assert!(all_zero, "the other panel is untouched");
    }
    // Zeros, and numbers that are not finite, which only have to be stored as something.
    for odd in [0.0, f32::NAN, f32::INFINITY, 1e-44, f32::MAX] {
        let mut matrix = FourBitMatrix::new(1, 9);
        let mut stored = vec![odd; 9];
        matrix.panels_mut().next().unwrap().set_row(0, &mut stored);
        assert!(
            stored.iter().all(|stored| *stored == 0.0),
            "{odd} {stored:?}"
        );
    }
}

/// A row that is rounded on the way has the sums of the same row in an 8-bit matrix.
#[test]
fn a_rounded_row_gives_the_sum_of_an_8_bit_matrix() {
    let mut random = Random::from_env();
    for columns in [1, 15, 16, 257, 2560, 8192, 8193, Int8Matrix::MAX_COLUMNS] {
        let signs: Vec<f32> = (0..columns).map(|_| random.pick(&[1.0, -1.0])).collect();
        for weights in [floats(&mut random, columns), signs, vec![0.0; columns]] {
            let mut matrix = Int8Matrix::new(1, columns);
            let mut panel = matrix.panels_mut().next().unwrap();
            panel.set_row(0, &weights);
            let x = quantized(&[floats(&mut random, columns), weights.clone()]);
            let mut expected = [0; 2 * PANEL_ROWS];
            scalar().int8_matmul(&matrix, 0..1, &x, &mut expected);
            for kernels in each_isa() {
                for token in 0..2 {
                    let sum = kernels.rounded_dot(&weights, matrix.scales(0)[0], x.row(token));
                    assert_eq!(sum, expected[token * PANEL_ROWS], "{}", kernels.isa());
                }
                // The row of a stored matrix has the same bits.
                let stored = DenseMatrix::from_f32(1, columns, weights.clone());
                let mut row = vec![0.0; columns];
                kernels.dense_row(&stored, 0, &mut row);
                assert_eq!(row, weights);
            }
        }
    }
}
