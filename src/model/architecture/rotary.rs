//! Rotary position embedding: the angles by which queries and keys are rotated.

/// The rotary embedding of a model: value i of a head is rotated with value i + head_dim / 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies (`rope_theta`).
    pub theta: f64,
}

impl Rotary {
    /// Returns the angle per position of each pair of values in a head.
    pub(crate) fn frequencies(self, head_dim: usize) -> impl Iterator<Item = f32> {
        // Single precision, as in the reference. At far positions a more exact frequency would give
        // a different angle.
        (0..head_dim / 2).map(move |i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            1.0 / (self.theta.powf(f64::from(exponent)) as f32)
        })
    }
}
