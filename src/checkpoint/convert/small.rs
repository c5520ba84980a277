//! Small float tensors that Hugging Face and GGUF files store in different forms.
//!
//! | | Hugging Face | GGUF |
//! |---|---|---|
//! | norm of a family with an offset | weight − offset | weight |
//! | rate of decay | `A_log` | −e^A_log |
//! | convolution | `[channel, 1, tap]` | `[channel, tap]` |
//!
//! Invariant: both forms are the same bits to the loader, or the tensor is refused by its name.

use crate::checkpoint::values::{read_matrix, refuse_non_finite};
use crate::checkpoint::{LoadResult, Tensor};

/// A small float tensor.
pub(super) struct SmallTensor<'a> {
    pub(super) tensor: Tensor<'a>,
    pub(super) form: SmallForm,
    /// Whether the tensor comes from a GGUF file.
    pub(super) is_gguf: bool,
}

/// What the forms of a small tensor have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SmallForm {
    /// The weights of a norm, from which Hugging Face files subtract this.
    Norm { offset: f32 },
    /// The rates of decay of value heads.
    Rates,
    /// What is added to the steps of value heads. Both forms are the same.
    StepBias,
    /// The weights of a convolution. Only the shape differs.
    Convolution { channels: usize, taps: usize },
}

impl SmallTensor<'_> {
    /// Returns the values that the model computes with, in the order of Hugging Face.
    pub(super) fn values(&self) -> LoadResult<Vec<f32>> {
        let mut values = read_matrix(&self.tensor)?;
        refuse_non_finite(&self.tensor, &values, f32::MAX)?;
        if !self.is_gguf {
            values
                .iter_mut()
                .for_each(|value| *value = self.form.value_of(*value));
        }
        Ok(values)
    }

    /// Returns what a directory of Hugging Face stores so that the model computes with the same
    /// values.
    ///
    /// # Errors
    /// If no number in single precision means one of the values.
    pub(super) fn for_hugging_face(&self) -> LoadResult<Vec<f32>> {
        let values = self.values()?;
        let stored = values.into_iter().map(|value| {
            let problem = || {
                let what = self.form.of_hugging_face();
                self.tensor.error(format!(
                    "its value {value} has no exact {what}, which a directory of Hugging Face \
                     stores"
                ))
            };
            self.form.stored_for(value).ok_or_else(problem)
        });
        stored.collect()
    }

    /// Returns the shape in a directory of Hugging Face.
    pub(super) fn shape_for_hugging_face(&self) -> Vec<usize> {
        match self.form {
            SmallForm::Convolution { channels, taps } => vec![channels, 1, taps],
            _ => self.tensor.shape.clone(),
        }
    }

    /// Returns the shape in a GGUF file.
    pub(super) fn shape_for_gguf(&self) -> Vec<usize> {
        match self.form {
            SmallForm::Convolution { channels, taps } => vec![channels, taps],
            _ => self.tensor.shape.clone(),
        }
    }
}

impl SmallForm {
    /// Returns what the loader makes of a value of a Hugging Face file.
    fn value_of(self, stored: f32) -> f32 {
        match self {
            SmallForm::Norm { offset } => stored + offset,
            SmallForm::Rates => -f64::from(stored).exp() as f32,
            SmallForm::StepBias | SmallForm::Convolution { .. } => stored,
        }
    }

    /// Returns a value of a Hugging Face file of which the loader makes `value`.
    fn stored_for(self, value: f32) -> Option<f32> {
        let nearest = match self {
            SmallForm::Norm { offset } => value - offset,
            SmallForm::Rates => (-f64::from(value)).ln() as f32,
            SmallForm::StepBias | SmallForm::Convolution { .. } => value,
        };
        // If any number means the value, then the nearest one or a neighbour of it does.
        let candidates = [nearest, nearest.next_down(), nearest.next_up()];
        candidates.into_iter().find(|stored| {
            let is_same = self.value_of(*stored).to_bits() == value.to_bits();
            is_same && stored.abs() < f32::MAX
        })
    }

    /// Returns what Hugging Face files store, for errors.
    fn of_hugging_face(self) -> &'static str {
        match self {
            SmallForm::Norm { .. } => "difference to 1",
            SmallForm::Rates => "A_log",
            SmallForm::StepBias | SmallForm::Convolution { .. } => "number",
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::SmallForm;

    /// Every number that Hugging Face files have comes back as one of the same meaning.
    #[test]
    fn what_comes_from_hugging_face_goes_back() {
        for form in [SmallForm::Norm { offset: 1.0 }, SmallForm::Rates] {
            for bits in 0..=u16::MAX {
                let stored = bf16::from_bits(bits).to_f32();
                let value = form.value_of(stored);
                // Rates of zero or infinity are none.
                if !value.is_normal() || value.abs() > 1e30 {
                    continue;
                }
                let back = form.stored_for(value);
                let back = back.unwrap_or_else(|| panic!("{form:?} of {stored}"));
                assert_eq!(form.value_of(back).to_bits(), value.to_bits());
            }
        }
    }

    #[test]
    fn what_no_number_means_is_not_rounded() {
        let norm = SmallForm::Norm { offset: 1.0 };
        for value in [1.0, 0.5, 2.75, 1e6, -3.0] {
            assert_eq!(norm.stored_for(value), Some(value - 1.0));
        }
        for value in [1e-9, -0.0, 0.3e-3, f32::NAN] {
            assert_eq!(norm.stored_for(value), None, "{value}");
        }
        // Neighbouring numbers near 8 have exponentials that are further apart than numbers are.
        let rate = -(8.0_f64.exp() as f32);
        assert_eq!(SmallForm::Rates.stored_for(rate), Some(8.0));
        assert_eq!(SmallForm::Rates.stored_for(rate.next_up()), None);
        for value in [0.0, -0.0, 1.0, f32::NAN] {
            assert_eq!(SmallForm::Rates.stored_for(value), None, "{value}");
        }
    }
}
