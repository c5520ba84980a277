//! Storing keys and values in every number format.

use sterna_kernels::{
    KvDtype, PAGE_TOKENS, bf16_from_f32, e4m3_from_f32, e5m2_from_f32, f16_from_f32, f32_from_bf16,
    f32_from_f16,
};
use sterna_random::Random;

use crate::{NAN_BYTE, each_isa, floats, scalar};

/// Returns what a stored token reads as: its key and its value.
fn load(dtype: KvDtype, page: &[u8], slot: usize, head_dim: usize) -> [Vec<f32>; 2] {
    let [mut key, mut value] = [(); 2].map(|()| vec![0.0; head_dim]);
    dtype.load(page, slot, &mut key, &mut value);
    [key, value]
}

/// Returns the scales of a token's key and value, which are the last bytes of a page.
fn scales(page: &[u8], slot: usize) -> [f32; 2] {
    let scales = page.len() - 4 * PAGE_TOKENS;
    [slot, PAGE_TOKENS + slot].map(|at| {
        let bytes = [page[scales + 2 * at], page[scales + 2 * at + 1]];
        f32_from_bf16(u16::from_le_bytes(bytes))
    })
}

/// Checks that each number is stored as the nearest one of its format.
fn check_nearest(dtype: KvDtype, x: &[f32], stored: &[f32], scale: f32) {
    let largest = x.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
    let limit = match dtype {
        KvDtype::F16 | KvDtype::Bf16 => None,
        KvDtype::Int8 => Some(127.0),
        KvDtype::Fp8E4m3 => Some(448.0),
        KvDtype::Fp8E5m2 => Some(57344.0),
    };
    if let Some(limit) = limit {
        let exact = largest / limit;
        assert!(
            scale >= exact * (1.0 - 1e-6) && scale <= exact * 1.01,
            "{dtype}: {scale}"
        );
    }
    for (&x, &stored) in x.iter().zip(stored) {
        let expected = match dtype {
            KvDtype::F16 => f32_from_f16(f16_from_f32(x)),
            KvDtype::Bf16 => f32_from_bf16(bf16_from_f32(x)),
            KvDtype::Int8 => (x * (1.0 / scale)).round_ties_even() * scale,
            KvDtype::Fp8E4m3 => small(e4m3_from_f32(x * (1.0 / scale)), 3, 7) * scale,
            KvDtype::Fp8E5m2 => small(e5m2_from_f32(x * (1.0 / scale)), 2, 15) * scale,
        };
        assert_eq!(stored, expected, "{dtype}: {x}");
    }
}

/// Returns the value of a float of 8 bits by its formula.
fn small(bits: u8, mantissa_bits: u32, bias: i32) -> f32 {
    let mantissa = f32::from(bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits) as f32;
    let exponent = i32::from((bits & 0x7f) >> mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2.0_f32.powi(1 - bias),
        _ => (1.0 + mantissa) * 2.0_f32.powi(exponent - bias),
    };
    if bits & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[test]
fn storing_a_token_writes_its_key_and_value_and_nothing_else() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        for head_dim in [16, 48, 64, 128, 256] {
            let scale = random.pick(&[1e-6, 1.0, 1e5]);
            let [key, value] = [1.0, 3.0].map(|by: f32| -> Vec<f32> {
                floats(&mut random, head_dim)
                    .iter()
                    .map(|x| x * scale * by)
                    .collect()
            });
            let slot = random.index(PAGE_TOKENS);
            let others: Vec<usize> = (0..PAGE_TOKENS).filter(|&other| other != slot).collect();
            let mut before = vec![NAN_BYTE; dtype.page_bytes(head_dim)];
            for &other in &others {
                let [key, value] = [(); 2].map(|()| floats(&mut random, head_dim));
                scalar().store_kv(dtype, &key, &value, other, &mut before);
            }
            let mut expected = before.clone();
            scalar().store_kv(dtype, &key, &value, slot, &mut expected);
            for kernels in each_isa() {
                let mut page = before.clone();
                kernels.store_kv(dtype, &key, &value, slot, &mut page);
                assert_eq!(page, expected, "{}: {dtype}", kernels.isa());
            }
            for &other in &others {
                let [is, was] = [&expected, &before].map(|page| load(dtype, page, other, head_dim));
                assert_eq!(is, was, "{dtype}, token {other} of a head of {head_dim}");
            }
            let [stored_key, stored_value] = load(dtype, &expected, slot, head_dim);
            let [key_scale, value_scale] = scales(&expected, slot);
            check_nearest(dtype, &key, &stored_key, key_scale);
            check_nearest(dtype, &value, &stored_value, value_scale);
        }
    }
}

#[test]
fn extreme_tokens_are_stored_alike_on_every_isa() {
    let mut extremes = vec![
        vec![0.0; 32],
        vec![-0.0; 32],
        vec![1e38; 32],
        vec![1e-45; 32],
    ];
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0; 32];
        x[17] = poison;
        extremes.push(x);
    }
    for dtype in KvDtype::ALL {
        for key in &extremes {
            for value in &extremes {
                let stored: Vec<_> = each_isa()
                    .map(|kernels| {
                        let mut page = vec![0; dtype.page_bytes(32)];
                        kernels.store_kv(dtype, key, value, 9, &mut page);
                        page
                    })
                    .collect();
                assert!(
                    stored.iter().all(|page| *page == stored[0]),
                    "{dtype}: {key:?}"
                );
                for (x, read) in [key, value].into_iter().zip(load(dtype, &stored[0], 9, 32)) {
                    let is_finite = x.iter().all(|x| x.is_finite());
                    let is_stored = read.iter().all(|x| x.is_finite());
                    let overflows = dtype == KvDtype::F16 && x[0] > 65504.0;
                    assert_eq!(is_stored, is_finite && !overflows, "{dtype}: {x:?}");
                }
            }
        }
    }
}

#[test]
fn a_token_of_zeros_reads_as_zeros() {
    for dtype in KvDtype::ALL {
        let mut page = vec![NAN_BYTE; dtype.page_bytes(16)];
        scalar().store_kv(dtype, &[0.0; 16], &[0.0; 16], 0, &mut page);
        assert_eq!(load(dtype, &page, 0, 16), [vec![0.0; 16], vec![0.0; 16]]);
    }
}
