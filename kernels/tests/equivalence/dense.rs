//! Products of float matrices.

use sterna_kernels::{DenseMatrix, Kernels, PANEL_ROWS, f32_from_f16};
use sterna_random::Random;

use crate::{bits, each_isa, floats, halves, scalar};

#[test]
fn a_dense_product_is_equal_on_every_isa_and_for_a_token_alone() {
    let mut random = Random::from_env();
    for round in 0..60 {
        let (tokens, rows) = (1 + random.index(11), 1 + random.index(70));
        let columns = random.pick(&[1, 15, 16, 17, 64, 100, 192, 257]);
        let x = floats(&mut random, tokens * columns);
        let weights = match round % 2 {
            0 => DenseMatrix::from_f16(rows, columns, halves(&mut random, rows * columns)),
            _ => DenseMatrix::from_f32(rows, columns, floats(&mut random, rows * columns)),
        };
        let product = |kernels: Kernels, x: &[f32]| {
            let tokens = x.len() / columns;
            let mut out = vec![f32::NAN; weights.panels() * tokens * PANEL_ROWS];
            kernels.dense_matmul(&weights, 0..weights.panels(), x, tokens, &mut out);
            out
        };
        let expected = product(scalar(), &x);
        check_dense(&weights, &x, tokens, &expected);
        for kernels in each_isa() {
            assert_eq!(
                bits(&product(kernels, &x)),
                bits(&expected),
                "{}: {tokens} tokens × {rows} rows × {columns} columns",
                kernels.isa()
            );
            // Every row, descending, then ascending.
            let order: Vec<u32> = (0..rows as u32).rev().chain(0..rows as u32).collect();
            let mut dots = vec![f32::NAN; order.len()];
            for token in 0..tokens {
                let x = &x[token * columns..(token + 1) * columns];
                kernels.dense_dots(&weights, &order, x, &mut dots);
                for (row, dot) in order.iter().map(|row| *row as usize).zip(&dots) {
                    let at = (row / PANEL_ROWS * tokens + token) * PANEL_ROWS + row % PANEL_ROWS;
                    assert_eq!(dot.to_bits(), expected[at].to_bits(), "{}", kernels.isa());
                }
            }
            for token in 0..tokens {
                let alone = product(kernels, &x[token * columns..(token + 1) * columns]);
                for (panel, alone) in alone.chunks(PANEL_ROWS).enumerate() {
                    let together = &expected[(panel * tokens + token) * PANEL_ROWS..][..PANEL_ROWS];
                    assert_eq!(
                        bits(alone),
                        bits(together),
                        "{}: token {token} of {tokens}",
                        kernels.isa()
                    );
                }
            }
        }
    }
}

/// Checks that the product is exact, except for rounding, and zero in the rows that only fill a
/// panel.
fn check_dense(weights: &DenseMatrix, x: &[f32], tokens: usize, out: &[f32]) {
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
                out[row / PANEL_ROWS * tokens * PANEL_ROWS + token * PANEL_ROWS + row % PANEL_ROWS];
            assert!(
                (f64::from(value) - exact).abs() < 1e-4,
                "row {row}, token {token}: {value} instead of {exact}"
            );
        }
    }
}

#[test]
fn every_isa_copies_a_row_exactly() {
    let mut random = Random::from_env();
    for columns in [1, 16, 77, 256] {
        let values = halves(&mut random, 3 * columns);
        let weights = DenseMatrix::from_f16(3, columns, values.clone());
        for kernels in each_isa() {
            let mut row = vec![0.0; columns];
            kernels.dense_row(&weights, 1, &mut row);
            let expected: Vec<f32> = values[columns..2 * columns]
                .iter()
                .map(|&half| f32_from_f16(half))
                .collect();
            assert_eq!(bits(&row), bits(&expected));
        }
    }
}
