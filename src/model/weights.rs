//! The weights of a checkpoint, checked and packed into the kernels' layouts.
//!
//! Always true: what is returned is anonymous memory. The files are mapped only while this runs, so a file that is cut off later cannot
//! hurt a running server; every tensor has the shape that the configuration asks for, and every value is finite.
#![expect(unsafe_code, reason = "mapping a file")]

use std::borrow::Cow;
use std::fs::File;
use std::io::IsTerminal;
use std::ops::AddAssign;
use std::sync::Arc;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use memmap2::{Advice, Mmap};
use safetensors::Dtype;
use sterna_kernels::{DenseMatrix, PanelMut, TernaryMatrix};

use super::attention::Attention;
use super::checkpoint::{LoadError, Source, Tensor, Tensors, regular_file};
use super::config::{Architecture, ModelConfig, ScaleDirection};
use super::layer::{FeedForward, Layer};
use super::linear::{Linear, Norm, Projections, TernaryLinear};
use super::pool::{Pool, ranges, split_rows};

/// Magnitudes from here on round to infinity in half precision.
const F16_OVERFLOW: f32 = 65_520.0;
/// Values that are converted at once.
const CHUNK: usize = 1024;

/// All weights of a model.
pub(super) struct Weights {
    pub(super) embedding: Arc<DenseMatrix>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Norm,
    /// One linear: the output head, which may be the embedding.
    pub(super) head: Projections,
    /// Bytes of all matrices; a shared head counts once.
    pub(super) bytes: usize,
}

impl Weights {
    /// Reads, checks and packs all tensors of `source`, on all workers of `pool`. `progress` asks for a bar on stderr.
    pub(super) fn load(
        source: &Source,
        config: &ModelConfig,
        pool: &mut Pool,
        progress: bool,
    ) -> Result<Weights, LoadError> {
        let files = source.tensor_files()?;
        let contents = files
            .names
            .iter()
            .map(|name| Contents::open(source, name))
            .collect::<Result<Vec<_>, _>>()?;
        let contents: Vec<&[u8]> = contents.iter().map(Contents::bytes).collect();
        let bytes = contents.iter().map(|bytes| bytes.len() as u64).sum();
        let tensors = Tensors::parse(&files, &contents)?;
        let mut loader = Loader {
            config,
            tensors,
            pool,
            census: Census::default(),
            progress: progress_bar(bytes, progress),
        };
        let weights = loader.weights()?;
        loader.progress.finish_and_clear();
        loader.census.warn_if_unusual();
        loader.tensors.finish()?;
        Ok(weights)
    }
}

/// The bytes of one file.
enum Contents<'a> {
    Mapped(Mmap),
    Memory(Cow<'a, [u8]>),
}

impl<'a> Contents<'a> {
    fn open(source: &'a Source, name: &str) -> Result<Contents<'a>, LoadError> {
        let Source::Directory(directory) = source else {
            return source
                .read(name)?
                .map(Contents::Memory)
                .ok_or_else(|| LoadError::missing_file(source, name));
        };
        let path = directory.join(name);
        if regular_file(&path)?.is_none() {
            return Err(LoadError::missing_file(source, name));
        }
        let file = File::open(&path).map_err(|error| LoadError::file(&path, error))?;
        // SAFETY: the file is only read, and the map does not outlive `Weights::load`. Whoever cuts the file off during these seconds
        // ends the process by a signal, before it has begun to serve; whoever overwrites it changes weights, which are plain numbers,
        // all of whose bit patterns are valid.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| LoadError::file(&path, error))?;
        // Only a hint: a system that does not take it reads a little slower.
        let _ = map.advise(Advice::WillNeed);
        Ok(Contents::Mapped(map))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Contents::Mapped(map) => map,
            Contents::Memory(bytes) => bytes,
        }
    }
}

fn progress_bar(bytes: u64, wanted: bool) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}");
    ProgressBar::new(bytes).with_style(style.expect("the template is well-formed"))
}

/// Takes one tensor after the other.
struct Loader<'a> {
    config: &'a ModelConfig,
    tensors: Tensors<'a>,
    pool: &'a mut Pool,
    census: Census,
    progress: ProgressBar,
}

impl Loader<'_> {
    fn weights(&mut self) -> Result<Weights, LoadError> {
        let config = self.config;
        let (embedding, head) = self.embedding_and_head()?;
        let layers = (0..config.layers)
            .map(|layer| self.layer(layer))
            .collect::<Result<Vec<_>, _>>()?;
        let norm = self.norm("model.norm", config.hidden)?;
        let tied = matches!(&head, Linear::Dense(head) if Arc::ptr_eq(head, &embedding));
        let projections = layers
            .iter()
            .flat_map(Layer::projections)
            .flat_map(Projections::linears);
        let bytes = embedding.bytes()
            + projections.map(Linear::bytes).sum::<usize>()
            + if tied { 0 } else { head.bytes() };
        Ok(Weights {
            embedding,
            layers,
            norm,
            head: Projections::new(vec![head]),
            bytes,
        })
    }

    fn embedding_and_head(&mut self) -> Result<(Arc<DenseMatrix>, Linear), LoadError> {
        const EMBEDDING: &str = "model.embed_tokens.weight";
        const HEAD: &str = "lm_head.weight";
        let (vocab, hidden) = (self.config.vocab, self.config.hidden);
        if !self.config.tied {
            let embedding = self.tensors.require(EMBEDDING)?;
            let embedding = Arc::new(self.dense(&embedding, vocab, hidden)?);
            return Ok((embedding, self.linear("lm_head", vocab, hidden)?));
        }
        // Either name may hold what both share. A checkpoint that holds both means both, when they differ.
        let (embedding, head) = match (self.tensors.take(EMBEDDING), self.tensors.take(HEAD)) {
            (Some(embedding), Some(head)) => {
                let same = (embedding.dtype, &embedding.shape, embedding.bytes)
                    == (head.dtype, &head.shape, head.bytes);
                (embedding, (!same).then_some(head))
            }
            (Some(shared), None) | (None, Some(shared)) => (shared, None),
            (None, None) => return Err(LoadError::tensor(EMBEDDING, "missing")),
        };
        let embedding = Arc::new(self.dense(&embedding, vocab, hidden)?);
        let head = match head {
            None => Arc::clone(&embedding),
            Some(head) => {
                tracing::warn!(
                    "tie_word_embeddings is set, but {HEAD} differs from {EMBEDDING}: using both"
                );
                Arc::new(self.dense(&head, vocab, hidden)?)
            }
        };
        Ok((embedding, Linear::Dense(head)))
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let config = self.config;
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let (q, kv) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let sub_norms = config.architecture == Architecture::BitNet;
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = Attention {
            norm: self.norm(&name("input_layernorm"), hidden)?,
            qkv: Projections::new(vec![
                self.linear(&name("self_attn.q_proj"), q, hidden)?,
                self.linear(&name("self_attn.k_proj"), kv, hidden)?,
                self.linear(&name("self_attn.v_proj"), kv, hidden)?,
            ]),
            sub_norm: sub_norms
                .then(|| self.norm(&name("self_attn.attn_sub_norm"), q))
                .transpose()?,
            output: Projections::new(vec![self.linear(&name("self_attn.o_proj"), hidden, q)?]),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let feed_forward = FeedForward {
            norm: self.norm(&name("post_attention_layernorm"), hidden)?,
            gate_up: Projections::new(vec![
                self.linear(&name("mlp.gate_proj"), intermediate, hidden)?,
                self.linear(&name("mlp.up_proj"), intermediate, hidden)?,
            ]),
            activation: config.activation,
            sub_norm: sub_norms
                .then(|| self.norm(&name("mlp.ffn_sub_norm"), intermediate))
                .transpose()?,
            down: Projections::new(vec![self.linear(
                &name("mlp.down_proj"),
                hidden,
                intermediate,
            )?]),
        };
        Ok(Layer {
            attention,
            feed_forward,
        })
    }

    fn norm(&mut self, module: &str, width: usize) -> Result<Norm, LoadError> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        tensor.expect_shape(&[width])?;
        let mut weight = vec![0.0; width];
        read_floats(&tensor, tensor.bytes, &mut weight)?;
        refuse_non_finite(&tensor, &weight, f32::MAX)?;
        Ok(Norm {
            weight,
            eps: self.config.norm_eps,
        })
    }

    /// One linear in whatever form the checkpoint has it.
    fn linear(&mut self, module: &str, rows: usize, columns: usize) -> Result<Linear, LoadError> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        if self.config.is_float(module) {
            return Ok(Linear::Dense(Arc::new(self.dense(&tensor, rows, columns)?)));
        }
        let scale = self
            .tensors
            .take(&format!("{module}.weight_scale"))
            .map(|scale| one_float(&scale))
            .transpose()?;
        let scale = scale.map(|scale| match self.config.quantization.scale {
            ScaleDirection::Multiply => scale,
            ScaleDirection::Divide => 1.0 / scale,
        });
        let online = self.config.quantization.online;
        let (weights, scale) = match (tensor.dtype, scale) {
            (Dtype::U8, Some(scale)) => (self.packed(&tensor, rows, columns)?, scale),
            // Floats with a scale: already ternary, only not packed.
            (_, Some(scale)) if !online => (
                self.masters(&tensor, rows, columns, Rounding::MustBeTernary)?,
                scale,
            ),
            (Dtype::U8, None) => {
                return Err(LoadError::tensor(
                    format!("{module}.weight_scale"),
                    "missing",
                ));
            }
            (_, None) if online => {
                tensor.expect_shape(&[rows, columns])?;
                let factor = 1.0 / self.mean_magnitude(&tensor, rows, columns)?.max(1e-5);
                (
                    self.masters(&tensor, rows, columns, Rounding::Scaled(factor))?,
                    1.0 / factor,
                )
            }
            (_, Some(_)) => {
                return Err(
                    tensor.error("floats with a weight_scale, though quantization_mode is online")
                );
            }
            (dtype, None) => {
                let problem = format!(
                    "{dtype:?} without a weight_scale: masters need \"quantization_mode\": \"online\""
                );
                return Err(tensor.error(problem));
            }
        };
        let input_norm = match self.config.quantization.input_norm_eps {
            Some(eps) => Some(Norm {
                eps,
                ..self.norm(&format!("{module}.rms_norm"), columns)?
            }),
            None => None,
        };
        Ok(Linear::Ternary(TernaryLinear {
            weights,
            scale,
            input_norm,
        }))
    }

    /// Packs U8 `[rows / 4, columns]`: bits 2i and 2i + 1 of byte (j, c) are the code of row i · rows / 4 + j.
    fn packed(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<TernaryMatrix, LoadError> {
        if !rows.is_multiple_of(4) {
            return Err(tensor.error(format!("{rows} rows cannot be packed by four")));
        }
        let quarter = rows / 4;
        tensor.expect_shape(&[quarter, columns])?;
        self.pack(tensor, rows, columns, |row, codes, _| {
            let bytes = &tensor.bytes[row % quarter * columns..][..columns];
            let shift = 2 * (row / quarter);
            let mut invalid = 0;
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> shift & 3;
                invalid |= *code & (*code >> 1);
            }
            if invalid == 0 {
                Ok(())
            } else {
                Err(tensor.error(format!("a packed code of row {row} is 3")))
            }
        })
    }

    /// Packs floats `[rows, columns]`.
    fn masters(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
        rounding: Rounding,
    ) -> Result<TernaryMatrix, LoadError> {
        tensor.expect_shape(&[rows, columns])?;
        let row_bytes = row_bytes(tensor, columns)?;
        self.pack(tensor, rows, columns, |row, codes, floats| {
            read_floats(
                tensor,
                &tensor.bytes[row * row_bytes..][..row_bytes],
                floats,
            )?;
            match rounding {
                // Rounding half to even and clamping: ±0.5 becomes 0, and everything beyond ±1.
                Rounding::Scaled(factor) => {
                    for (code, float) in codes.iter_mut().zip(floats) {
                        let scaled = *float * factor;
                        *code = 1 + u8::from(scaled > 0.5) - u8::from(scaled < -0.5);
                    }
                }
                Rounding::MustBeTernary => {
                    if floats.iter().any(|float| ![-1.0, 0.0, 1.0].contains(float)) {
                        return Err(
                            tensor.error(format!("row {row} has a weight that is not -1, 0 or 1"))
                        );
                    }
                    for (code, float) in codes.iter_mut().zip(floats) {
                        *code = 1 + u8::from(*float > 0.0) - u8::from(*float < 0.0);
                    }
                }
            }
            Ok(())
        })
    }

    /// Packs a matrix on all workers. `write_codes(row, codes, floats)` writes weight + 1 for a row; `floats` is memory for it.
    fn pack(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
        write_codes: impl Fn(usize, &mut [u8], &mut [f32]) -> Result<(), LoadError> + Sync,
    ) -> Result<TernaryMatrix, LoadError> {
        let mut matrix = TernaryMatrix::new(rows, columns);
        let mut panels: Vec<PanelMut<'_>> = matrix.panels_mut().collect();
        let shares: Vec<_> = ranges(panels.len(), self.pool.workers()).collect();
        let results = self
            .pool
            .run_parts(split_rows(&mut panels, 1, shares), |_, panels| {
                let (mut codes, mut floats, mut census) =
                    (vec![1; columns], vec![0.0; columns], Census::default());
                for panel in panels {
                    for row in panel.rows() {
                        write_codes(row, &mut codes, &mut floats)?;
                        census.count(&codes);
                        panel.set_row(row, &codes);
                    }
                }
                Ok(census)
            });
        for census in results {
            self.census += census?;
        }
        self.progress.inc(tensor.bytes.len() as u64);
        Ok(matrix)
    }

    /// mean|W|. Sums of rows are added in the order of the rows, so the number of workers does not matter.
    fn mean_magnitude(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<f32, LoadError> {
        let row_bytes = row_bytes(tensor, columns)?;
        let mut sums = vec![0.0; rows];
        let shares = ranges(rows, self.pool.workers());
        let parts = shares.clone().zip(split_rows(&mut sums, 1, shares));
        let results = self.pool.run_parts(parts, |_, (rows, sums)| {
            let mut floats = vec![0.0; columns];
            for (row, sum) in rows.zip(sums) {
                read_floats(
                    tensor,
                    &tensor.bytes[row * row_bytes..][..row_bytes],
                    &mut floats,
                )?;
                *sum = sum_magnitudes(&floats);
            }
            Ok(())
        });
        results.into_iter().collect::<Result<(), LoadError>>()?;
        let sum: f64 = sums.iter().sum();
        let mean = (sum / (rows * columns) as f64) as f32;
        if mean.is_finite() {
            Ok(mean)
        } else {
            Err(tensor.error("it has values that are not finite"))
        }
    }

    /// A float matrix: half precision from both half formats, single from single.
    fn dense(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<DenseMatrix, LoadError> {
        tensor.expect_shape(&[rows, columns])?;
        let bytes = row_bytes(tensor, columns)?;
        let shares = ranges(rows, self.pool.workers());
        let matrix = if tensor.dtype == Dtype::F32 {
            let mut values = vec![0.0; rows * columns];
            let parts = shares.clone().zip(split_rows(&mut values, columns, shares));
            let results = self.pool.run_parts(parts, |_, (rows, out)| {
                read_floats(
                    tensor,
                    &tensor.bytes[rows.start * bytes..rows.end * bytes],
                    out,
                )?;
                refuse_non_finite(tensor, out, f32::MAX)
            });
            results.into_iter().collect::<Result<(), LoadError>>()?;
            DenseMatrix::from_f32(rows, columns, values)
        } else {
            let mut values = vec![0_u16; rows * columns];
            let parts = shares.clone().zip(split_rows(&mut values, columns, shares));
            let results = self.pool.run_parts(parts, |_, (rows, out)| {
                read_halves(
                    tensor,
                    &tensor.bytes[rows.start * bytes..rows.end * bytes],
                    out,
                )
            });
            results.into_iter().collect::<Result<(), LoadError>>()?;
            DenseMatrix::from_f16(rows, columns, values)
        };
        self.progress.inc(tensor.bytes.len() as u64);
        Ok(matrix)
    }
}

/// How floats become −1, 0 or 1.
#[derive(Clone, Copy)]
enum Rounding {
    /// round(w · factor), clamped.
    Scaled(f32),
    /// They are already.
    MustBeTernary,
}

/// Bytes of a row of a float tensor.
fn row_bytes(tensor: &Tensor<'_>, columns: usize) -> Result<usize, LoadError> {
    match tensor.dtype {
        Dtype::F32 => Ok(columns * 4),
        Dtype::F16 | Dtype::BF16 => Ok(columns * 2),
        dtype => Err(tensor.error(format!(
            "{dtype:?} where floats (F32, F16 or BF16) are expected"
        ))),
    }
}

/// Converts values of a float tensor.
fn read_floats(tensor: &Tensor<'_>, bytes: &[u8], out: &mut [f32]) -> Result<(), LoadError> {
    assert_eq!(
        bytes.len(),
        row_bytes(tensor, out.len())?,
        "the bytes of as many values"
    );
    if tensor.dtype == Dtype::F32 {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        return Ok(());
    }
    let mut halves = [0; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = u16::from_le_bytes(*bytes);
        }
        if tensor.dtype == Dtype::BF16 {
            halves.reinterpret_cast::<bf16>().convert_to_f32_slice(out);
        } else {
            halves.reinterpret_cast::<f16>().convert_to_f32_slice(out);
        }
    }
    Ok(())
}

/// Converts values of a half-precision tensor of either format to IEEE half precision, as bits.
fn read_halves(tensor: &Tensor<'_>, bytes: &[u8], out: &mut [u16]) -> Result<(), LoadError> {
    let mut floats = [0.0; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let floats = &mut floats[..out.len()];
        read_floats(tensor, bytes, floats)?;
        refuse_non_finite(tensor, floats, F16_OVERFLOW)?;
        out.reinterpret_cast_mut::<f16>()
            .convert_from_f32_slice(floats);
    }
    Ok(())
}

/// # Errors
/// If a value is not finite, or its magnitude is `limit` or more.
fn refuse_non_finite(tensor: &Tensor<'_>, values: &[f32], limit: f32) -> Result<(), LoadError> {
    // Without leaving early, so that this takes several values at once.
    let fine = values
        .iter()
        .fold(true, |fine, value| fine & (value.abs() < limit));
    match values.iter().find(|value| !fine && !(value.abs() < limit)) {
        Some(value) => Err(tensor.error(format!(
            "the value {value} does not fit the range of the format it is kept in"
        ))),
        None => Ok(()),
    }
}

/// The only value of a scale.
fn one_float(tensor: &Tensor<'_>) -> Result<f32, LoadError> {
    if tensor.shape.iter().product::<usize>() != 1 {
        return Err(tensor.error(format!(
            "its shape is {:?}, a scale is one value",
            tensor.shape
        )));
    }
    let mut value = [0.0];
    row_bytes(tensor, 1)?;
    read_floats(tensor, tensor.bytes, &mut value)?;
    match value[0] {
        scale if scale.is_normal() && scale > 0.0 => Ok(scale),
        scale => Err(tensor.error(format!("{scale} cannot be a scale"))),
    }
}

/// Σ|x| over eight lanes, in double precision.
fn sum_magnitudes(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value.abs());
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(value.abs())).sum::<f64>()
}

/// How many weights are −1, 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Census([u64; 3]);

impl Census {
    fn count(&mut self, codes: &[u8]) {
        // Short runs, so that the counts of a run fit bytes.
        for run in codes.chunks(255) {
            let (zeros, plus) = run.iter().fold((0, 0), |(zeros, plus), code| {
                (zeros + (code & 1), plus + (code >> 1))
            });
            self.0[1] += u64::from(zeros);
            self.0[2] += u64::from(plus);
            self.0[0] += run.len() as u64 - u64::from(zeros) - u64::from(plus);
        }
    }

    /// Shares of −1, 0 and 1, unless they are those of a trained ternary model.
    fn unusual(self) -> Option<[f64; 3]> {
        let total = self.0.iter().sum::<u64>() as f64;
        let shares = self.0.map(|count| count as f64 / total);
        let [minus, zero, plus] = shares;
        let usual = (0.2..=0.5).contains(&zero)
            && [minus, plus]
                .iter()
                .all(|sign| (0.25..=0.45).contains(sign));
        (total > 0.0 && !usual).then_some(shares)
    }

    fn warn_if_unusual(self) {
        if let Some([minus, zero, plus]) = self.unusual() {
            tracing::warn!(
                "the ternary weights are {:.1} % minus, {:.1} % zero, {:.1} % plus; a trained model has 20-50 % zeros and 25-45 % of each \
                 sign, so this checkpoint was probably converted wrongly",
                100.0 * minus,
                100.0 * zero,
                100.0 * plus
            );
        }
    }
}

impl AddAssign for Census {
    fn add_assign(&mut self, other: Census) {
        for (count, other) in self.0.iter_mut().zip(other.0) {
            *count += other;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_census_counts_and_knows_wrong_conversions() {
        let mut census = Census::default();
        let codes: Vec<u8> = (0..1000).map(|i| (i % 3) as u8).collect();
        census.count(&codes);
        assert_eq!(census, Census([334, 333, 333]));
        assert_eq!(census.unusual(), None);
        assert!(Census([500, 0, 500]).unusual().is_some(), "signs only");
        assert!(Census([50, 900, 50]).unusual().is_some(), "mostly zeros");
        assert!(Census([250, 250, 500]).unusual().is_some(), "one-sided");
    }

    fn tensor(dtype: Dtype, bytes: &[u8]) -> Tensor<'_> {
        Tensor {
            name: "t".to_owned(),
            dtype,
            shape: vec![bytes.len() / 2],
            bytes,
        }
    }

    #[test]
    fn bf16_becomes_f16_or_is_refused_when_too_large() {
        let to_bytes = |values: &[f32]| {
            values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect::<Vec<_>>()
        };
        let bytes = to_bytes(&[1.0, -0.5, 3.25, 65_024.0]);
        let mut out = [0; 4];
        read_halves(&tensor(Dtype::BF16, &bytes), &bytes, &mut out).unwrap();
        assert_eq!(
            out.map(|bits| f16::from_bits(bits).to_f32()),
            [1.0, -0.5, 3.25, 65_024.0]
        );
        for large in [65_536.0, f32::INFINITY, f32::NAN] {
            let bytes = to_bytes(&[1.0, large]);
            let error = read_halves(&tensor(Dtype::BF16, &bytes), &bytes, &mut out[..2])
                .expect_err("too large");
            assert!(error.to_string().contains("tensor t"), "{error}");
        }
    }

    #[test]
    fn magnitudes_are_summed_whole() {
        let values: Vec<f32> = (0..1003)
            .map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) })
            .collect();
        assert_eq!(sum_magnitudes(&values), f64::from((0..1003).sum::<i32>()));
    }
}
