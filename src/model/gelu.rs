//! The GELU gate, by way of the SiLU gate of the kernels.
//!
//! With z = 2·√(2/π)·(x + 0.044715·x³), the approximation of GELU by a hyperbolic tangent is
//! x / (1 + e^−z), which is silu(z) · x / z (arXiv 1606.08415). As z / x is never 0, no case needs
//! care.

/// 2·√(2/π).
const LINEAR: f32 = 1.595_769;
/// The factor of x³.
const CUBIC: f32 = 0.044_715;

/// Changes gates and ups so that silu(gate) · up is what gelu(gate) · up was before.
pub(super) fn as_silu_gate(gates: &mut [f32], ups: &mut [f32]) {
    for (gate, up) in gates.iter_mut().zip(ups) {
        let factor = LINEAR * (1.0 + CUBIC * *gate * *gate);
        *gate *= factor;
        *up /= factor;
    }
}

#[cfg(test)]
mod tests {
    use sterna_kernels::Kernels;

    use super::as_silu_gate;

    #[test]
    fn the_gate_is_the_tanh_approximation_of_gelu() {
        let gates: Vec<f32> = (-4000..=4000).map(|i| i as f32 / 100.0).collect();
        let ups: Vec<f32> = gates.iter().map(|gate| 1.5 - gate / 80.0).collect();
        let (mut silu_gates, mut silu_ups) = (gates.clone(), ups.clone());
        as_silu_gate(&mut silu_gates, &mut silu_ups);
        let mut out = vec![0.0; gates.len()];
        Kernels::best().silu_gate(&silu_gates, &silu_ups, &mut out);
        for ((gate, up), out) in gates.into_iter().zip(ups).zip(out) {
            let x = f64::from(gate);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let expected = 0.5 * x * (1.0 + inner.tanh()) * f64::from(up);
            let difference = (f64::from(out) - expected).abs();
            assert!(
                difference <= 1e-6 * expected.abs().max(0.1),
                "{gate}: {out}, {expected}"
            );
        }
    }
}
