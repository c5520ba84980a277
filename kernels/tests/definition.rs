//! Known values of the scalar kernels: rounding, layouts and formulas.

use sterna_kernels::{
    DeltaUpdate, DenseMatrix, Int8Matrix, Isa, Kernels, KvDtype, Packing, PrefetchQueue,
    QuantizedActivations, ScaledActivations, TernaryMatrix, f16_from_f32, f32_from_f16,
};

fn scalar() -> Kernels {
    Kernels::new(Isa::Scalar).expect("every machine runs scalar")
}

fn quantize(x: &[f32]) -> (Vec<i8>, f32, i32) {
    let mut out = QuantizedActivations::new(1, x.len());
    out.reset(1, x.len());
    out.tokens_mut()
        .for_each(|mut token| scalar().quantize(x, &mut token));
    (out.row(0).to_vec(), out.scales()[0], out.sum(0))
}

#[test]
fn activations_round_half_to_even() {
    let (q, scale, sum) = quantize(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]);
    assert_eq!(q, [127, 0, 2, 2, 0, -2, -2, 126, -126]);
    assert_eq!(scale, 1.0);
    assert_eq!(sum, 127);
}

#[test]
fn a_token_of_zeros_has_a_finite_scale() {
    let (q, scale, sum) = quantize(&[0.0; 20]);
    assert_eq!((q, scale, sum), (vec![0; 20], 127.0 / 1e-5, 0));
}

#[test]
fn the_largest_activation_becomes_127() {
    let (q, scale, _) = quantize(&[0.25, -0.5, 0.1]);
    assert_eq!(q, [64, -127, 25]); // 63.5 rounds to the even 64.
    assert_eq!(scale, 254.0);
}

#[test]
fn the_padding_of_a_shorter_token_is_zero() {
    let mut x = QuantizedActivations::new(2, 64);
    x.reset(2, 64);
    x.tokens_mut()
        .for_each(|mut token| scalar().quantize(&[1.0; 64], &mut token));
    x.reset(2, 17);
    x.tokens_mut()
        .for_each(|mut token| scalar().quantize(&[1.0; 17], &mut token));
    let mut ones = TernaryMatrix::new(1, 17, Packing::TwoBit);
    ones.panels_mut()
        .for_each(|mut panel| panel.set_row(0, &[2; 17]));
    for isa in Isa::available() {
        let mut out = [0.0; 64];
        Kernels::new(isa).unwrap().ternary_matmul(
            &ones,
            0..1,
            ScaledActivations {
                activations: &x,
                factors: &[1.0, 2.0],
            },
            &mut out,
            &mut PrefetchQueue::empty(),
        );
        assert_eq!((out[0], out[32]), (17.0 * 127.0, 34.0 * 127.0), "{isa}");
    }
}

#[test]
fn packed_weights_read_back_as_written() {
    let (rows, columns) = (70, 45);
    let code = |row: usize, column: usize| ((row * 7 + column * 5) % 3) as u8;
    for (packing, bytes) in [
        (Packing::TwoBit, 96 * 48 / 4),
        (Packing::FiveTrit, 96 * 60 / 5),
    ] {
        let mut weights = TernaryMatrix::new(rows, columns, packing);
        assert_eq!(weights.weight(69, 44), 0);
        let mut ranges = Vec::new();
        for mut panel in weights.panels_mut() {
            ranges.push(panel.rows());
            for row in panel.rows() {
                let codes: Vec<u8> = (0..columns).map(|column| code(row, column)).collect();
                panel.set_row(row, &codes);
            }
        }
        assert_eq!(ranges, [0..32, 32..64, 64..70]);
        assert_eq!((weights.panels(), weights.bytes()), (3, bytes));
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(weights.weight(row, column), code(row, column) as i8 - 1);
            }
        }
    }
}

#[test]
fn eight_bit_weights_are_rounded_to_the_nearest_step() {
    let rows = [
        vec![1.0, -1.0, 0.5, -0.25, 0.004, 0.0],
        vec![0.0; 6],
        vec![1e-30, 127e-30, -64.4e-30, 0.0, 0.0, 0.0],
    ];
    let mut weights = Int8Matrix::new(3, 6);
    for mut panel in weights.panels_mut() {
        panel.rows().for_each(|row| panel.set_row(row, &rows[row]));
    }
    let row = |row| [0, 1, 2, 3, 4, 5].map(|column| weights.weight(row, column));
    assert_eq!(row(0), [127, -127, 64, -32, 1, 0]);
    assert_eq!(row(1), [0; 6]);
    assert_eq!(row(2), [1, 127, -64, 0, 0, 0]);
    assert_eq!(weights.scales(0), [1.0 / 127.0, 0.0, 127e-30 / 127.0]);
    assert_eq!(weights.bytes(), 32 * 8 + 3 * 4);
}

#[test]
fn every_half_converts_to_f32_and_back_unchanged() {
    for half in 0..=u16::MAX {
        let value = f32_from_f16(half);
        let is_nan = half & 0x7c00 == 0x7c00 && half & 0x03ff != 0;
        assert_eq!(value.is_nan(), is_nan, "{half:#06x}");
        let quiet = if is_nan { half | 0x0200 } else { half };
        assert_eq!(f16_from_f32(value), quiet, "{half:#06x}");
    }
}

#[test]
fn floats_round_to_the_nearest_half() {
    let cases: [(f32, u16); 16] = [
        (1.0, 0x3c00),
        (-2.0, 0xc000),
        (1.0 + 1.0 / 2048.0, 0x3c00), // A tie: the half below is even.
        (1.0 + 3.0 / 2048.0, 0x3c02), // A tie: the half above is even.
        (1.0 + 1.1 / 2048.0, 0x3c01),
        (2.0 - 1.0 / 4096.0, 0x4000), // Carries into the exponent.
        (65504.0, 0x7bff),
        (65519.9, 0x7bff),
        (65520.0, 0x7c00),
        (1e30, 0x7c00),
        (f32::NEG_INFINITY, 0xfc00),
        (6.103_515_6e-5, 0x0400), // The smallest normal half.
        (5.960_464_5e-8, 0x0001), // The smallest subnormal half, 2⁻²⁴.
        (2.980_232_2e-8, 0x0000), // Half of it: a tie, which rounds to zero.
        (8.940_697e-8, 0x0002),   // One and a half of it.
        (-0.0, 0x8000),
    ];
    for (value, half) in cases {
        assert_eq!(f16_from_f32(value), half, "{value}");
    }
}

#[test]
fn every_isa_converts_halves_and_midpoints_as_scalar_does() {
    let midpoints = (0..0x7bff_u16).flat_map(|half| {
        let middle = f32::midpoint(f32_from_f16(half), f32_from_f16(half + 1));
        [middle.next_down(), middle, middle.next_up(), -middle]
    });
    let values: Vec<f32> = midpoints
        .chain([65520.0, 65519.99, 1e38, f32::INFINITY, f32::NAN, 1e-45])
        .collect();
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let matrix = DenseMatrix::from_f16(1, halves.len(), halves.clone());
    for isa in Isa::available() {
        let kernels = Kernels::new(isa).unwrap();
        let mut row = vec![0.0; halves.len()];
        kernels.dense_row(&matrix, 0, &mut row);
        for (&half, value) in halves.iter().zip(&row) {
            assert_eq!(
                value.to_bits(),
                f32_from_f16(half).to_bits(),
                "{isa}: {half:#06x}"
            );
        }
        for values in values.chunks(64) {
            let mut head = [0.0; 64];
            head[..values.len()].copy_from_slice(values);
            let mut page = vec![0; KvDtype::F16.page_bytes(64)];
            kernels.store_kv(KvDtype::F16, &head, &head, 3, &mut page);
            let (keys, stored) = page.as_chunks::<2>().0.split_at(16 * 64);
            for (i, &value) in head.iter().enumerate() {
                let half = f16_from_f32(value).to_le_bytes();
                assert_eq!(stored[3 * 64 + i], half, "{isa}: {value}");
                assert_eq!(keys[16 * i + 3], half, "{isa}: {value}");
            }
        }
    }
}

#[test]
fn norm_and_gates_follow_their_formulas() {
    let mut out = [0.0; 2];
    scalar().rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
    let root_mean_square = 12.5_f32.sqrt();
    assert!(
        (out[0] - 3.0 / root_mean_square).abs() < 1e-6
            && (out[1] - 8.0 / root_mean_square).abs() < 1e-6
    );

    scalar().relu2_gate(&[-2.0, 3.0], &[5.0, 5.0], &mut out);
    assert_eq!(out, [0.0, 45.0]);

    let mut out = [0.0; 5];
    let gate: [f32; 5] = [0.0, 1.0, -1.0, 1000.0, -1000.0];
    scalar().silu_gate(&gate, &[2.0; 5], &mut out);
    for (value, gate) in out.iter().zip(gate) {
        let exact = 2.0 * f64::from(gate) / (1.0 + f64::from(-gate).exp());
        assert!(
            (f64::from(*value) - exact).abs() <= 1e-6 * exact.abs().max(1e-6),
            "{gate}: {value} instead of {exact}"
        );
    }
}

#[test]
fn rotation_pairs_a_value_with_the_one_half_a_head_later() {
    // The first pair (values 0 and 2 of each head) turns by 90 degrees, the second not at all.
    let mut x = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0];
    scalar().rope(&mut x, 4, &[0.0, 1.0], &[1.0, 0.0]);
    assert_eq!(x, [-3.0, 2.0, 1.0, 4.0, -30.0, 20.0, 10.0, 40.0]);
}

#[test]
fn an_isa_is_found_by_its_name() {
    for isa in Isa::ALL {
        assert_eq!(Isa::named(&isa.to_string()), Some(isa));
    }
    assert_eq!(Isa::named("sse9"), None);
    assert!(Isa::best() >= Isa::Scalar && Isa::best().is_available());
}

#[test]
fn a_hadamard_transform_is_the_product_with_sylvesters_matrix() {
    for block in [1, 2, 8, 16, 64, 512] {
        let x: Vec<f32> = (0..2 * block)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0)
            .collect();
        let mut found = x.clone();
        scalar().hadamard(&mut found, block);
        for (x, found) in x.chunks(block).zip(found.chunks(block)) {
            for (i, found) in found.iter().enumerate() {
                let sign = |j: usize| {
                    if (i & j).count_ones().is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                let terms = x.iter().enumerate();
                let sum: f64 = terms.map(|(j, x)| sign(j) * f64::from(*x)).sum();
                let expected = sum / (block as f64).sqrt();
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-4, "{found} is not {expected} at {i} of {block}");
            }
        }
    }
}

#[test]
fn a_hadamard_transform_multiplies_first_and_then_joins_near_values_before_far_ones() {
    // Each rounding of f32 shows the order: other orders give other bits.
    let x = [1e8, 1.0, -1e8, 3.0];
    let mut found = x;
    scalar().hadamard(&mut found, 4);
    let [a, b, c, d] = x.map(|x: f32| x * 0.5);
    let near = [a + b, a - b, c + d, c - d];
    let [a, b, c, d] = near;
    assert_eq!(found, [a + c, b + d, a - c, b - d]);
}

#[test]
fn delta_steps_compute_the_gated_delta_rule() {
    let (rows, columns, tokens) = (16, 32, 12);
    let value = |token: usize, i: usize, salt: usize| {
        let hash = (token * 7919 + i * 104_729 + salt * 1_299_709) % 1009;
        hash as f32 / 504.5 - 1.0
    };
    let decay = |token: usize| 0.5 + 0.04 * token as f32;
    let strength = |token: usize| 0.9 - 0.05 * token as f32;
    // The state as the kernels keep it, and as the paper defines it.
    let mut state = vec![0.0_f32; rows * columns];
    let mut expected = vec![vec![0.0_f64; columns]; rows];
    let (mut last_key, mut last_delta, mut last_decay) = (vec![0.0; rows], vec![0.0; columns], 1.0);
    for token in 0..tokens {
        let key: Vec<f32> = (0..rows).map(|i| value(token, i, 1) / 4.0).collect();
        let query: Vec<f32> = (0..rows).map(|i| value(token, i, 2)).collect();
        let values: Vec<f32> = (0..columns).map(|i| value(token, i, 3)).collect();
        let [mut by_key, mut by_query, mut delta, mut out] = [(); 4].map(|()| vec![0.0; columns]);
        let update = DeltaUpdate {
            decay: last_decay,
            key: &last_key,
            delta: &last_delta,
        };
        let sums = [&mut by_key[..], &mut by_query];
        scalar().delta_step(&mut state, update, [&key, &query], sums);
        let key_query = key.iter().zip(&query).map(|(k, q)| k * q).sum();
        let factors = [decay(token), strength(token), key_query];
        scalar().delta_finish([&by_key, &by_query], &values, factors, &mut delta, &mut out);

        for row in &mut expected {
            row.iter_mut().for_each(|s| *s *= f64::from(decay(token)));
        }
        for column in 0..columns {
            let terms = expected.iter().zip(&key);
            let read: f64 = terms.map(|(row, k)| row[column] * f64::from(*k)).sum();
            let d = (f64::from(values[column]) - read) * f64::from(strength(token));
            for (row, k) in expected.iter_mut().zip(&key) {
                row[column] += f64::from(*k) * d;
            }
            let terms = expected.iter().zip(&query);
            let wanted: f64 = terms.map(|(row, q)| row[column] * f64::from(*q)).sum();
            let error = (f64::from(out[column]) - wanted).abs();
            assert!(error < 1e-5, "{} is not {wanted} at {token}", out[column]);
        }
        (last_key, last_delta, last_decay) = (key, delta, decay(token));
    }
}

#[test]
fn a_convolution_weighs_the_last_inputs_and_activates() {
    let inputs: [&[f32]; 3] = [&[1.0, 0.0], &[2.0, -1.0], &[3.0, 4.0]];
    let mut out = [0.0; 2];
    scalar().convolve(&inputs, &[0.5, 1.0, 0.25, 1.0, 1.0, -0.5], &mut out);
    let silu = |x: f32| x / (1.0 + (-x).exp());
    for (found, sum) in out.into_iter().zip([4.0, -3.0]) {
        assert!((found - silu(sum)).abs() < 1e-6, "{found}");
    }
    let mut gated = [0.0; 2];
    scalar().sigmoid_gate(&[0.0, 1.0], &[3.0, -2.0], &mut gated);
    assert_eq!(gated[0], 1.5);
    assert!((gated[1] + 2.0 / (1.0 + (-1.0_f32).exp())).abs() < 1e-6);
}
