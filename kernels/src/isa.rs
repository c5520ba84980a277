//! The instruction sets, and which of them this CPU has.

use std::fmt;

/// An instruction set. A greater one is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the definition of every kernel, on any machine.
    Scalar,
    /// AVX2, FMA and F16C: x86-64 since about 2013.
    Avx2,
    /// The above and AVX-VNNI, which multiplies small integers four at a time: Intel's desktops and
    /// laptops since 2021 (Alder Lake), Zen 5.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI: servers since 2019.
    Avx512,
    /// The above and AVX-512 VBMI, which looks up bytes in registers: servers since 2021, Zen 4.
    Avx512Vbmi,
}

impl Isa {
    /// All instruction sets, in ascending order.
    pub const ALL: [Isa; 5] = [
        Isa::Scalar,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Vbmi,
    ];

    /// Returns the best instruction set of this CPU.
    pub fn best() -> Isa {
        Isa::available().max().unwrap_or(Isa::Scalar)
    }

    /// Returns all instruction sets of this CPU, in ascending order.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Returns whether this CPU and its operating system support the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vbmi"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Avx512Vbmi => false,
        }
    }

    /// Returns the instruction set of this name.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vbmi => "avx512vbmi",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
