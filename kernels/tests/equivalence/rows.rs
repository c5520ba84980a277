//! Kernels over single rows of a layer.

use sterna_kernels::{DeltaUpdate, Kernels, QuantizedActivations};
use sterna_random::Random;

use crate::{bits, each_isa, floats, scalar};

#[test]
fn norm_and_gates_are_equal_on_every_isa() {
    let mut random = Random::from_env();
    for _ in 0..200 {
        let count = 1 + random.index(300);
        let scale = random.pick(&[1e-6, 0.1, 1.0, 30.0, 1e4]);
        let x: Vec<f32> = floats(&mut random, count)
            .iter()
            .map(|x| x * scale)
            .collect();
        let y = floats(&mut random, count);
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
fn a_norm_of_a_row_that_is_not_finite_is_infinite_and_quantized_to_a_scale_of_zero() {
    let mut random = Random::from_env();
    for _ in 0..100 {
        let count = 1 + random.index(300);
        let weights = floats(&mut random, count);
        let mut x = floats(&mut random, count);
        x[random.index(count)] = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30]);
        for kernels in each_isa().chain([scalar()]) {
            let mut normed = vec![0.0; count];
            kernels.rms_norm(&x, &weights, 1e-5, &mut normed);
            assert_eq!(normed, vec![f32::INFINITY; count], "{}", kernels.isa());
            let mut out = QuantizedActivations::new(1, 300);
            out.reset(1, count);
            for mut token in out.tokens_mut() {
                kernels.quantize(&normed, &mut token);
            }
            assert_eq!(out.scales(), [0.0], "{}", kernels.isa());
        }
    }
}

#[test]
fn quantization_is_equal_on_every_isa() {
    let mut random = Random::from_env();
    for round in 0..200 {
        let count = 1 + random.index(300);
        let scale = random.pick(&[0.0, 1e-7, 1.0, 1e5]);
        // Every other row consists of multiples of one half, which are ties of rounding.
        let halves = |x: f32| (x * 254.0).round() / 2.0;
        let mut x: Vec<f32> = floats(&mut random, count)
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
fn rotations_are_equal_on_every_isa() {
    let mut random = Random::from_env();
    for head_dim in [2, 16, 64, 80, 128] {
        let x = floats(&mut random, 3 * head_dim);
        let angles = floats(&mut random, head_dim / 2);
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

#[test]
fn hadamard_transforms_are_equal_on_every_isa() {
    let mut random = Random::from_env();
    for power in 0..13 {
        let block = 1 << power;
        let x = floats(&mut random, 3 * block);
        let run = |kernels: Kernels| {
            let mut x = x.clone();
            kernels.hadamard(&mut x, block);
            bits(&x)
        };
        let expected = run(scalar());
        for kernels in each_isa() {
            let isa = kernels.isa();
            assert_eq!(run(kernels), expected, "{isa} with blocks of {block}");
        }
    }
}

#[test]
fn recurrent_kernels_are_equal_on_every_isa() {
    let mut random = Random::from_env();
    for (rows, columns) in [(16, 32), (64, 64), (128, 128), (48, 96)] {
        let state = floats(&mut random, rows * columns);
        let by_row: Vec<Vec<f32>> = (0..3).map(|_| floats(&mut random, rows)).collect();
        let by_column: Vec<Vec<f32>> = (0..2).map(|_| floats(&mut random, columns)).collect();
        let inputs: Vec<Vec<f32>> = (0..4).map(|_| floats(&mut random, rows + 3)).collect();
        let weights = floats(&mut random, 4 * (rows + 3));
        let run = |kernels: Kernels| {
            let mut state = state.clone();
            let mut outs = vec![vec![f32::NAN; columns]; 4];
            let [by_key, by_query, delta, out] = &mut outs[..] else {
                unreachable!()
            };
            let update = DeltaUpdate {
                decay: 0.7,
                key: &by_row[0],
                delta: &by_column[0],
            };
            let (key, query) = (&by_row[1], &by_row[2]);
            kernels.delta_step(&mut state, update, [key, query], [by_key, by_query]);
            let factors = [0.9, 0.4, -0.3];
            kernels.delta_finish([by_key, by_query], &by_column[1], factors, delta, out);
            let mut convolved = vec![f32::NAN; rows + 3];
            let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            kernels.convolve(&inputs, &weights, &mut convolved);
            let mut gated = vec![f32::NAN; rows + 3];
            kernels.sigmoid_gate(&convolved, inputs[0], &mut gated);
            bits(&[state, outs.concat(), convolved, gated].concat())
        };
        let expected = run(scalar());
        for kernels in each_isa() {
            let isa = kernels.isa();
            assert_eq!(run(kernels), expected, "{isa}, {rows} x {columns}");
        }
    }
}
