//! The codes and scales of ternary tensors, whatever their layout.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use safetensors::Dtype;
use serde::Serialize;
use sterna_kernels::GroupSize;

use super::facts::ModelFacts;
use crate::checkpoint::tensors::experts_of;
use crate::checkpoint::values::{
    RowMemory, WeightStatistics, group_of_values, one_float, take_codes,
};
use crate::checkpoint::{LoadResult, ScaleSpan, Storage, Tensor};
use crate::cores;

/// How many ternary weights are −1, 0 and 1.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CodeCounts {
    /// The weights that are −1.
    pub minus: u64,
    /// The weights that are 0.
    pub zero: u64,
    /// The weights that are 1.
    pub plus: u64,
    /// Whether no trained model has these shares, so that the checkpoint was probably converted
    /// wrongly.
    pub unusual: bool,
}

/// The scales of ternary weights.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleSummary {
    /// What one scale covers: `tensor`, `row` or `group of N`, with commas if tensors differ.
    pub per: String,
    /// The number of scales.
    pub count: u64,
    /// The smallest.
    pub min: f32,
    /// The median; of an even number, the upper one of the middle two.
    pub median: f32,
    /// The largest.
    pub max: f32,
}

/// The codes and scales of some tensors.
#[derive(Default)]
pub(super) struct WeightCodes {
    statistics: WeightStatistics,
    /// The weights in layouts that cannot store 0, where a lack of zeros is usual.
    signs: WeightStatistics,
    /// How often each scale occurs, by its bits. Positive floats are in the order of their bits.
    scales: BTreeMap<u32, u64>,
    spans: Vec<String>,
}

impl WeightCodes {
    /// Adds the codes and scales of other tensors.
    pub(super) fn add(&mut self, other: WeightCodes) {
        self.statistics.add(other.statistics);
        self.signs.add(other.signs);
        for (bits, count) in other.scales {
            *self.scales.entry(bits).or_default() += count;
        }
        for span in other.spans {
            if !self.spans.contains(&span) {
                self.spans.push(span);
            }
        }
    }

    /// Returns what one scale covers.
    pub(super) fn scale_per(&self) -> String {
        self.spans.join(", ")
    }

    /// Returns the counts and the scales, if there are ternary weights.
    pub(super) fn summary(&self) -> (Option<CodeCounts>, Option<ScaleSummary>) {
        let unusual = self.statistics.unusual().is_some();
        let mut all = self.statistics;
        all.add(self.signs);
        let [minus, zero, plus] = all.counts();
        let codes = (minus + zero + plus > 0).then_some(CodeCounts {
            minus,
            zero,
            plus,
            unusual,
        });
        (codes, self.scale_summary())
    }

    fn scale_summary(&self) -> Option<ScaleSummary> {
        let count: u64 = self.scales.values().sum();
        let mut before = 0;
        let median = self.scales.iter().find(|(_, times)| {
            before += **times;
            before > count / 2
        });
        Some(ScaleSummary {
            per: self.scale_per(),
            count,
            min: f32::from_bits(*self.scales.first_key_value()?.0),
            median: f32::from_bits(*median?.0),
            max: f32::from_bits(*self.scales.last_key_value()?.0),
        })
    }

    fn add_scale(&mut self, scale: f32) {
        *self.scales.entry(scale.to_bits()).or_default() += 1;
    }
}

/// Returns whether a tensor of Hugging Face has four ternary weights in a byte.
pub(super) fn is_packed(tensor: &Tensor<'_>) -> bool {
    tensor.storage == Storage::Plain(Dtype::U8) && tensor.shape.len() == 2
}

/// Returns the codes of each tensor, or `None` for one that is not ternary.
pub(super) fn codes_of_all(
    tensors: &[(String, Tensor<'_>)],
    facts: &ModelFacts,
) -> Vec<LoadResult<Option<WeightCodes>>> {
    let scales: BTreeMap<&str, &Tensor<'_>> = tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_suffix("_scale")?, tensor)))
        .collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, tensor)) = tensors.get(index) else {
                return;
            };
            let codes = codes_of(name, tensor, scales.get(name.as_str()).copied(), facts);
            let mut found = found.lock().expect("no worker panics with the lock");
            found.insert(index, codes);
        }
    };
    thread::scope(|scope| {
        for _ in 0..cores::usable() {
            scope.spawn(work);
        }
    });
    let found = found.into_inner().expect("no worker panics with the lock");
    found.into_values().collect()
}

/// Returns the codes of a tensor, or `None` if it is not ternary. `scale` is its `weight_scale`.
fn codes_of(
    name: &str,
    tensor: &Tensor<'_>,
    scale: Option<&Tensor<'_>>,
    facts: &ModelFacts,
) -> LoadResult<Option<WeightCodes>> {
    let [rows, columns] = match tensor.shape[..] {
        [rows, columns] => [rows, columns],
        [experts, _, _] => return codes_of_experts(name, tensor, experts, facts),
        _ => return Ok(None),
    };
    let mut found = WeightCodes::default();
    if let Some(scale) = scale {
        found.add_scale(one_float(scale)?);
        found.spans = vec!["tensor".to_owned()];
    }
    match tensor.storage {
        Storage::Interleaved => {
            let mut codes = vec![1; columns_without_padding(name, columns, facts)];
            for row in 0..rows {
                tensor.read_interleaved_row(row, &mut codes)?;
                found.statistics.count(&codes);
            }
        }
        Storage::Plain(Dtype::U8) if scale.is_some() => {
            let mut codes = vec![1; columns];
            for (row, bytes) in tensor.bytes.chunks(columns).enumerate() {
                for quarter in 0..4 {
                    let problem = format_args!("a packed code of row {row} is 3");
                    tensor.require(take_codes(bytes, quarter, &mut codes), problem)?;
                    found.statistics.count(&codes);
                }
            }
        }
        Storage::Plain(Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
            let Ok(group) = group_of_values(tensor) else {
                return Ok(None); // Its values are not ternary.
            };
            read_rows(tensor, group, scale.is_none(), &mut found)?;
            let span = group.map_or("tensor".to_owned(), |group| {
                format!("group of {}", group.columns())
            });
            found.spans = vec![span];
        }
        Storage::Blocks(layout) if layout.scale_span().is_some() => {
            read_rows(tensor, None, true, &mut found)?;
            found.spans = vec![match layout.scale_span() {
                Some(ScaleSpan::Row) => "row".to_owned(),
                Some(ScaleSpan::Group(columns)) => format!("group of {columns}"),
                _ => "tensor".to_owned(),
            }];
            if layout.has_no_zeros() {
                std::mem::swap(&mut found.signs, &mut found.statistics);
            }
        }
        _ => return Ok(None),
    }
    Ok(Some(found))
}

/// Returns the codes of the matrices of all experts of a layer in one tensor.
fn codes_of_experts(
    name: &str,
    tensor: &Tensor<'_>,
    experts: usize,
    facts: &ModelFacts,
) -> LoadResult<Option<WeightCodes>> {
    let Ok(experts) = experts_of(tensor, experts, 1) else {
        return Ok(None); // Loading says why they cannot be cut.
    };
    let mut all = WeightCodes::default();
    for matrix in experts.into_iter().flatten() {
        match codes_of(name, &matrix, None, facts)? {
            Some(codes) => all.add(codes),
            None => return Ok(None),
        }
    }
    Ok(Some(all))
}

/// Reads all rows of a tensor in blocks, or of floats that are ternary already.
fn read_rows(
    tensor: &Tensor<'_>,
    group: Option<GroupSize>,
    has_scales: bool,
    found: &mut WeightCodes,
) -> LoadResult<()> {
    let mut memory = RowMemory::new(tensor);
    let is_of_tensor = match tensor.storage {
        Storage::Blocks(layout) => layout.scale_span() == Some(ScaleSpan::Tensor),
        _ => group.is_none(),
    };
    for row in 0..tensor.shape[0] {
        memory.read(tensor, row, group)?;
        found.statistics.count(&memory.codes);
        for scale in memory.scales.iter().filter(|_| has_scales) {
            let is_again = is_of_tensor && found.scales.contains_key(&scale.to_bits());
            // Floats that are all zero have no scale.
            if *scale != 0.0 && !is_again {
                found.add_scale(*scale);
            }
        }
    }
    Ok(())
}

/// Returns the columns of packed rows that have `columns` with their padding.
fn columns_without_padding(name: &str, columns: usize, facts: &ModelFacts) -> usize {
    let attention = || Some(facts.heads? * facts.head_dim?);
    let width = match name {
        _ if name.ends_with(".down_proj.weight") => facts.intermediate,
        _ if name.ends_with(".o_proj.weight") => attention(),
        _ => facts.hidden,
    };
    let width = width.and_then(|width| usize::try_from(width).ok());
    let fits = |width: &usize| width.checked_next_multiple_of(128) == Some(columns);
    width.filter(fits).unwrap_or(columns)
}
