//! Every instruction set computes what the scalar kernels compute, and the scalar kernels compute
//! what the formulas say, in random and adversarial cases.
//!
//! Integers and floats must have equal bits. A failing run prints its seed; `STERNA_SEED=<seed>`
//! repeats it.

mod attention;
mod dense;
mod four_bit;
mod groups;
mod int8;
mod logits;
mod rows;
mod storing;
mod ternary;

use sterna_kernels::{Isa, Kernels, f16_from_f32};
use sterna_random::Random;

/// Memory of this byte is NaN in every number format that has one.
const NAN_BYTE: u8 = 0xff;

/// Returns a float in −1..1.
fn float(random: &mut Random) -> f32 {
    2.0 * random.fraction_f32() - 1.0
}

fn floats(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| float(random)).collect()
}

fn halves(random: &mut Random, count: usize) -> Vec<u16> {
    floats(random, count)
        .into_iter()
        .map(f16_from_f32)
        .collect()
}

/// Returns the kernels of every instruction set that this CPU has.
fn each_isa() -> impl Iterator<Item = Kernels> {
    Isa::available().map(|isa| Kernels::new(isa).expect("an available instruction set has kernels"))
}

fn scalar() -> Kernels {
    Kernels::new(Isa::Scalar).expect("every machine runs scalar")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// `REQUIRE_ISA` names instruction sets, separated by commas.
#[test]
fn the_required_isas_are_detected() {
    let required = std::env::var("REQUIRE_ISA").unwrap_or_default();
    for required in required.split_terminator(',') {
        let required = Isa::named(required).unwrap();
        assert!(
            required.is_available(),
            "this CPU lacks the required {required}; its best is {}",
            Isa::best()
        );
    }
    let (tested, lacking): (Vec<_>, Vec<_>) =
        Isa::ALL.into_iter().partition(|isa| isa.is_available());
    println!("tested: {tested:?}; this CPU lacks, so not tested: {lacking:?}");
}
