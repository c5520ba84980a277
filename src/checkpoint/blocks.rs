//! Layouts that store weights in blocks of bytes, as GGUF files have them.
//!
//! A layout is decided by the size of a tensor, never by the number of its type alone: several
//! layouts share a number. `gguf/layouts.rs` decides; this file decodes.

use half::f16;

/// The weights of a block of the K types and the TQ types.
const SUPER_BLOCK: usize = 256;

/// A layout of blocks. A code is a ternary weight + 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockLayout {
    /// Four codes in a byte, in one of three orders. One f32 scale of the tensor follows the codes,
    /// then 28 bytes of padding.
    I2s(I2sOrder),
    /// 256 weights in 54 bytes: five trits a byte, then four trits a byte, then an f16 scale.
    Tq1,
    /// 256 weights in 66 bytes: bits 2l of byte m of group g are the code of weight
    /// g · 128 + l · 32 + m. An f16 scale follows.
    Tq2,
    /// 128 weights in 18 bytes: an f16 scale, then a bit for each weight: set is +1, clear is −1.
    Q1,
    /// 64 weights in 18 bytes: an f16 scale, then the codes, four a byte from the lowest bits up.
    Q2Group64,
    /// 128 weights in 34 bytes, otherwise as [`BlockLayout::Q2Group64`].
    Q2Group128,
    /// 128 weights in 28 bytes: five trits a byte, then four trits a byte, then an f16 scale.
    Ptq1,
    /// A row: an f32 scale, then 64 weights in 16 bytes; bits 2q of byte j are the code of weight
    /// q · 16 + j.
    Iq2Bn,
    /// 32 weights in 18 bytes: an f16 scale, then four bits a weight.
    Q4,
    /// 32 weights in 34 bytes: an f16 scale, then an i8 a weight.
    Q8,
    /// 256 weights in 144 bytes: four bits a weight, scales and minima of 32 weights.
    Q4K,
    /// 256 weights in 210 bytes: six bits a weight, scales of 16 weights.
    Q6K,
}

/// The orders of weights that I2_S tensors have. Nothing in a file tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum I2sOrder {
    /// 128 weights in 32 bytes: bits 7:6 of byte j are the code of weight j, bits 5:4 the code of
    /// weight j + 32, and so on.
    X86,
    /// 64 weights in 16 bytes: bits 7:6 of byte j are the code of weight j, bits 5:4 the code of
    /// weight j + 16, and so on.
    Arm,
    /// Byte c of a group of four rows has the codes of column c, with the first row in bits 7:6.
    FourRows,
}

impl I2sOrder {
    /// All orders, the usual one first.
    pub const ALL: [I2sOrder; 3] = [I2sOrder::X86, I2sOrder::Arm, I2sOrder::FourRows];

    /// Returns the order of this name.
    pub fn named(name: &str) -> Option<I2sOrder> {
        I2sOrder::ALL.into_iter().find(|order| order.name() == name)
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            I2sOrder::X86 => "x86",
            I2sOrder::Arm => "arm",
            I2sOrder::FourRows => "four-rows",
        }
    }
}

/// What one scale of a ternary layout covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleSpan {
    Tensor,
    Row,
    /// This many weights of a row.
    Group(usize),
}

impl BlockLayout {
    /// Returns the name that errors and reports use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BlockLayout::I2s(I2sOrder::X86) => "I2_S (x86)",
            BlockLayout::I2s(I2sOrder::Arm) => "I2_S (arm)",
            BlockLayout::I2s(I2sOrder::FourRows) => "I2_S (four-rows)",
            BlockLayout::Tq1 => "TQ1_0",
            BlockLayout::Tq2 => "TQ2_0",
            BlockLayout::Q1 => "Q1_0",
            BlockLayout::Q2Group64 => "Q2_0 (groups of 64)",
            BlockLayout::Q2Group128 => "Q2_0 (groups of 128)",
            BlockLayout::Ptq1 => "PTQ1_0",
            BlockLayout::Iq2Bn => "IQ2_BN",
            BlockLayout::Q4 => "Q4_0",
            BlockLayout::Q8 => "Q8_0",
            BlockLayout::Q4K => "Q4_K",
            BlockLayout::Q6K => "Q6_K",
        }
    }

    /// Returns what one scale covers, if the layout is ternary.
    pub(crate) fn scale_span(self) -> Option<ScaleSpan> {
        match self {
            BlockLayout::I2s(_) => Some(ScaleSpan::Tensor),
            BlockLayout::Iq2Bn => Some(ScaleSpan::Row),
            BlockLayout::Q4 | BlockLayout::Q8 | BlockLayout::Q4K | BlockLayout::Q6K => None,
            _ => Some(ScaleSpan::Group(self.block().0)),
        }
    }

    /// Returns whether no weight can be 0.
    pub(crate) fn has_no_zeros(self) -> bool {
        self == BlockLayout::Q1
    }

    /// Returns the weights and the bytes of a block.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            BlockLayout::I2s(I2sOrder::X86) => (128, 32),
            BlockLayout::I2s(I2sOrder::Arm) => (64, 16),
            BlockLayout::I2s(I2sOrder::FourRows) => (4, 1),
            BlockLayout::Tq1 => (SUPER_BLOCK, 54),
            BlockLayout::Tq2 => (SUPER_BLOCK, 66),
            BlockLayout::Q1 => (128, 18),
            BlockLayout::Q2Group64 => (64, 18),
            BlockLayout::Q2Group128 => (128, 34),
            BlockLayout::Ptq1 => (128, 28),
            BlockLayout::Iq2Bn => (64, 16),
            BlockLayout::Q4 => (32, 18),
            BlockLayout::Q8 => (32, 34),
            BlockLayout::Q4K => (SUPER_BLOCK, 144),
            BlockLayout::Q6K => (SUPER_BLOCK, 210),
        }
    }

    /// Returns the bytes of a tensor of `rows` rows of `columns` weights, or `None` if the layout
    /// cannot store that shape or the number overflows.
    pub(crate) fn tensor_bytes(self, rows: usize, columns: usize) -> Option<usize> {
        let (weights, bytes) = self.block();
        let is_possible = match self {
            BlockLayout::I2s(I2sOrder::FourRows) => rows.is_multiple_of(4),
            _ => columns.is_multiple_of(weights),
        };
        let blocks = rows.checked_mul(columns)? / weights;
        let extra = match self.scale_span() {
            Some(ScaleSpan::Tensor) => 32,
            Some(ScaleSpan::Row) => rows.checked_mul(4)?,
            _ => 0,
        };
        let total = blocks.checked_mul(bytes)?.checked_add(extra)?;
        is_possible.then_some(total)
    }

    /// Writes the codes of a row of a ternary tensor, and appends the scales of the row to
    /// `scales`. `bytes` are the whole tensor. A code of 3 stays for the caller to refuse.
    pub(crate) fn read_ternary_row(
        self,
        bytes: &[u8],
        row: usize,
        codes: &mut [u8],
        scales: &mut Vec<f32>,
    ) {
        let (weights, block_bytes) = self.block();
        let row_bytes = codes.len() / weights * block_bytes;
        match self {
            BlockLayout::I2s(I2sOrder::X86) => {
                four_runs(&bytes[row * row_bytes..], 32, codes, Run::HighFirst)
            }
            BlockLayout::I2s(I2sOrder::Arm) => {
                four_runs(&bytes[row * row_bytes..], 16, codes, Run::HighFirst)
            }
            BlockLayout::I2s(I2sOrder::FourRows) => {
                let bytes = &bytes[row / 4 * codes.len()..];
                let shift = 6 - 2 * (row % 4);
                for (code, byte) in codes.iter_mut().zip(bytes) {
                    *code = byte >> shift & 3;
                }
            }
            BlockLayout::Iq2Bn => {
                let bytes = &bytes[row * (row_bytes + 4)..][..row_bytes + 4];
                let (scale, bytes) = bytes
                    .split_first_chunk()
                    .expect("a row begins with a scale");
                scales.push(f32::from_le_bytes(*scale));
                four_runs(bytes, 16, codes, Run::LowFirst);
            }
            _ => {
                let blocks = bytes[row * row_bytes..].chunks_exact(block_bytes);
                for (codes, block) in codes.chunks_exact_mut(weights).zip(blocks) {
                    scales.push(self.read_ternary_block(block, codes));
                }
            }
        }
        if self.scale_span() == Some(ScaleSpan::Tensor) {
            let scale = bytes[bytes.len() - 32..]
                .first_chunk()
                .expect("32 bytes are left");
            scales.push(f32::from_le_bytes(*scale));
        }
    }

    /// Writes the codes of a block that has a scale of its own, and returns the scale.
    fn read_ternary_block(self, block: &[u8], codes: &mut [u8]) -> f32 {
        match self {
            BlockLayout::Tq1 => {
                let (low, high) = codes.split_at_mut(240);
                let (first, second) = low.split_at_mut(160);
                trits(&block[..32], first);
                trits(&block[32..48], second);
                trits(&block[48..52], high);
                half_at(block, 52)
            }
            BlockLayout::Tq2 => {
                four_runs(&block[..64], 32, codes, Run::LowFirst);
                half_at(block, 64)
            }
            BlockLayout::Q1 => {
                for (codes, byte) in codes.chunks_exact_mut(8).zip(&block[2..]) {
                    for (bit, code) in codes.iter_mut().enumerate() {
                        *code = (byte >> bit & 1) * 2;
                    }
                }
                half_at(block, 0)
            }
            BlockLayout::Q2Group64 | BlockLayout::Q2Group128 => {
                for (codes, byte) in codes.chunks_exact_mut(4).zip(&block[2..]) {
                    for (place, code) in codes.iter_mut().enumerate() {
                        *code = byte >> (2 * place) & 3;
                    }
                }
                half_at(block, 0)
            }
            BlockLayout::Ptq1 => {
                let (low, high) = codes.split_at_mut(120);
                let (first, second) = low.split_at_mut(80);
                trits(&block[..16], first);
                trits(&block[16..24], second);
                trits(&block[24..26], high);
                half_at(block, 26)
            }
            other => unreachable!("the blocks of {} have no scale", other.name()),
        }
    }

    /// Writes the values of whole blocks. The layout must not be ternary.
    pub(crate) fn read_floats(self, bytes: &[u8], out: &mut [f32]) {
        let (weights, block_bytes) = self.block();
        let blocks = bytes.chunks_exact(block_bytes);
        for (out, block) in out.chunks_exact_mut(weights).zip(blocks) {
            match self {
                BlockLayout::Q4 => {
                    let scale = half_at(block, 0);
                    for (place, byte) in block[2..].iter().enumerate() {
                        out[place] = scale * (f32::from(byte & 15) - 8.0);
                        out[place + 16] = scale * (f32::from(byte >> 4) - 8.0);
                    }
                }
                BlockLayout::Q8 => {
                    let scale = half_at(block, 0);
                    for (out, byte) in out.iter_mut().zip(&block[2..]) {
                        *out = scale * f32::from(*byte as i8);
                    }
                }
                BlockLayout::Q4K => read_q4_k(block, out),
                BlockLayout::Q6K => read_q6_k(block, out),
                other => unreachable!("{} is ternary", other.name()),
            }
        }
    }
}

/// Writes the codes of blocks of 128 weights in 32 bytes, in the order of [`I2sOrder::X86`].
pub(super) fn read_interleaved(bytes: &[u8], codes: &mut [u8]) {
    four_runs(bytes, 32, codes, Run::HighFirst);
}

/// In which order the four codes of a byte belong to the four runs of a block.
#[derive(Clone, Copy)]
enum Run {
    HighFirst,
    LowFirst,
}

/// Writes codes from blocks of `run` bytes: each byte has one code for each of four runs.
fn four_runs(bytes: &[u8], run: usize, codes: &mut [u8], order: Run) {
    for (codes, bytes) in codes.chunks_exact_mut(4 * run).zip(bytes.chunks_exact(run)) {
        for (index, codes) in codes.chunks_exact_mut(run).enumerate() {
            let shift = match order {
                Run::HighFirst => 6 - 2 * index,
                Run::LowFirst => 2 * index,
            };
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> shift & 3;
            }
        }
    }
}

/// Writes the trits of some bytes: digit n of byte m is the code n · bytes + m. A byte is a
/// fraction of 256 in base 3: multiplying by 3 moves the next digit out.
fn trits(bytes: &[u8], codes: &mut [u8]) {
    let mut power = 1_u8;
    for codes in codes.chunks_exact_mut(bytes.len()) {
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code = ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8;
        }
        power = power.wrapping_mul(3);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Reads a block of Q4_K: an f16 scale and minimum, 6-bit scales and minima of eight groups of 32
/// weights, then four bits a weight. The low halves of 32 bytes are one group, the high halves the
/// next one.
fn read_q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (packed, nibbles) = block[4..].split_at(12);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (factor, offset) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4,
                packed[group + 4] >> 4 | (packed[group] >> 6) << 4,
            ),
        };
        let (factor, offset) = (scale * f32::from(factor), minimum * f32::from(offset));
        let nibbles = &nibbles[group / 2 * 32..][..32];
        for (out, byte) in out.iter_mut().zip(nibbles) {
            *out = factor * f32::from(byte >> (4 * (group % 2)) & 15) - offset;
        }
    }
}

/// Reads a block of Q6_K: the low four bits of 256 weights, the high two bits, 8-bit scales of 16
/// weights each, and an f16 scale.
fn read_q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    let scale = half_at(block, 208);
    for (index, out) in out.iter_mut().enumerate() {
        let (half, run, place) = (index / 128, index % 128 / 32, index % 32);
        let low = low[half * 64 + run % 2 * 32 + place] >> (4 * (run / 2)) & 15;
        let high = high[half * 32 + place] >> (2 * run) & 3;
        let factor = scale * f32::from(scales[index / 16] as i8);
        *out = factor * (f32::from(low | high << 4) - 32.0);
    }
}
