//! Products of 8-bit weights, and their scaling.

use sterna_kernels::{Int8Matrix, PANEL_ROWS, PanelScales, QuantizedActivations};
use sterna_random::Random;

use crate::{each_isa, floats, scalar};

/// Checks that every instruction set computes the product of these weights and `x` as the formula
/// says.
fn check_int8(rows: &[Vec<f32>], x: &QuantizedActivations) {
    let (tokens, columns) = (x.tokens(), rows[0].len());
    let mut weights = Int8Matrix::new(rows.len(), columns);
    for mut panel in weights.panels_mut() {
        for row in panel.rows() {
            panel.set_row(row, &rows[row]);
        }
    }
    let mut expected = vec![0; weights.panels() * tokens * PANEL_ROWS];
    for (row, token) in (0..rows.len()).flat_map(|row| (0..tokens).map(move |token| (row, token))) {
        let products = x.row(token).iter().enumerate();
        expected[row / PANEL_ROWS * tokens * PANEL_ROWS + token * PANEL_ROWS + row % PANEL_ROWS] =
            products
                .map(|(k, &q)| i32::from(weights.weight(row, k)) * i32::from(q))
                .sum();
    }
    for kernels in each_isa() {
        let mut out = vec![i32::MIN; expected.len()];
        kernels.int8_matmul(&weights, 0..weights.panels(), x, &mut out);
        assert!(
            out == expected,
            "{}: {tokens} tokens × {} rows × {columns} columns",
            kernels.isa(),
            rows.len()
        );
        if weights.panels() > 1 {
            let mut part = vec![0; tokens * PANEL_ROWS];
            kernels.int8_matmul(&weights, 1..2, x, &mut part);
            assert_eq!(part, out[tokens * PANEL_ROWS..2 * tokens * PANEL_ROWS]);
        }
    }
}

#[test]
fn int8_products_follow_the_formula() {
    let mut random = Random::from_env();
    for tokens in (1..=17).chain([64, 300]) {
        let rows = 1 + random.index(70);
        let columns = random.pick(&[1, 4, 15, 64, 257, 2560]);
        let rows: Vec<Vec<f32>> = (0..rows).map(|_| floats(&mut random, columns)).collect();
        let mut x = QuantizedActivations::new(tokens, columns);
        x.reset(tokens, columns);
        for mut token in x.tokens_mut() {
            scalar().quantize(&floats(&mut random, columns), &mut token);
        }
        check_int8(&rows, &x);
    }
}

#[test]
fn int8_sums_of_extreme_values_do_not_overflow() {
    let shapes = [(4, 1.0), (2560, -1.0), (65_536, 1.0), (65_536, -1.0)];
    for ((columns, sign), tokens) in shapes
        .into_iter()
        .flat_map(|shape| [(shape, 3), (shape, 5)])
    {
        let mut x = QuantizedActivations::new(tokens, columns);
        x.reset(tokens, columns);
        for mut token in x.tokens_mut() {
            scalar().quantize(&vec![sign; columns], &mut token);
        }
        check_int8(&[1.0, -1.0, 0.0].map(|weight| vec![weight; columns]), &x);
    }
}

#[test]
fn every_isa_scales_a_panel_and_finds_the_largest_outputs() {
    let mut random = Random::from_env();
    for rows in 1..=PANEL_ROWS {
        let tokens = 1 + random.index(5);
        let mut sums: Vec<i32> = (0..tokens * PANEL_ROWS)
            .map(|_| random.next_u64() as i32 >> 8)
            .collect();
        sums[0] = 0;
        let (mut scales, factors) = (floats(&mut random, rows), floats(&mut random, tokens));
        scales[0] = random.pick(&[1.0, f32::INFINITY]); // Infinity times 0 is NaN.
        let mut expected = vec![0.0; sums.len()];
        let mut expected_largest = vec![f32::NEG_INFINITY; tokens];
        for (token, row) in (0..tokens).flat_map(|token| (0..rows).map(move |row| (token, row))) {
            let at = token * PANEL_ROWS + row;
            expected[at] = sums[at] as f32 * (scales[row] * factors[token]);
            expected_largest[token] = expected_largest[token].max(expected[at]);
        }
        for kernels in each_isa() {
            let (mut out, mut largest) = (vec![1.0; sums.len()], vec![0.0; tokens]);
            let scales = PanelScales {
                row_scales: &scales,
                token_factors: &factors,
            };
            kernels.scale_panel(&sums, scales, &mut out, &mut largest);
            let bits = |values: &[f32]| -> Vec<u32> {
                let one_nan = |value: &f32| if value.is_nan() { f32::NAN } else { *value };
                values
                    .iter()
                    .map(|value| one_nan(value).to_bits())
                    .collect()
            };
            assert_eq!(bits(&out), bits(&expected), "{}", kernels.isa());
            assert_eq!(largest, expected_largest, "{}", kernels.isa());
        }
    }
}
