//! The values of tensors, however a file stores them: floats, or ternary codes with their scales.
//!
//! The loader, the converter and the survey read tensors through this module, so all three see the
//! same values.

mod floats;
mod groups;
mod heads;
mod statistics;
mod ternary;

pub(crate) use floats::{
    mean_of, one_float, read_floats, read_matrix, refuse_non_finite, row_bytes, row_magnitude,
};
pub(crate) use groups::{OneScale, RowMemory, group_of_values, half_bits, is_ternary, of_model};
pub(crate) use heads::{OutputOrder, order_value_heads, tiled_rows};
pub(crate) use statistics::WeightStatistics;
pub(crate) use ternary::{
    TernaryForm, TernaryScales, TernaryTensor, master_factor, refuse_other_than_signs,
    rounded_code, take_codes,
};
