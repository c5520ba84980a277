//! Reads from the server's metrics what its steps cost during a run.
//!
//! The result is the cost model that the server calibrated at its start, scaled by how much longer
//! its steps took during the run.

use crate::coefficients::Coefficients;

/// The step costs that a server reports at one moment.
pub(super) struct StepCosts {
    at_start: Coefficients,
    seconds: f64,    // The time of all steps so far.
    calibrated: f64, // The time of the same steps at the speed of the server's start.
}

impl StepCosts {
    /// Reads the costs from `metrics`, in Prometheus's text format.
    pub(super) fn read(metrics: &str) -> Result<StepCosts, String> {
        let part = |name: &str| {
            let label = format!("part=\"{name}\"");
            let seconds = value(metrics, "sterna_step_cost_seconds", &label)?;
            Ok::<u64, String>((seconds * 1e9).round() as u64)
        };
        let mut rows = [0; 10];
        for (knot, time) in rows.iter_mut().enumerate() {
            *time = part(&format!("rows_{}", 1 << knot))?;
        }
        Ok(StepCosts {
            at_start: Coefficients {
                rows,
                kilo_decode_keys: part("kilo_decode_keys")?,
                kilo_chunk_keys: part("kilo_chunk_keys")?,
                head: part("head")?,
                logit: part("logit")?,
            },
            seconds: value(metrics, "sterna_step_seconds_sum", "")?,
            calibrated: value(metrics, "sterna_step_calibrated_seconds_sum", "")?,
        })
    }

    /// Returns the cost of a step between `before` and now.
    pub(super) fn since(&self, before: &StepCosts) -> Result<Coefficients, String> {
        let calibrated = self.calibrated - before.calibrated;
        if calibrated <= 0.0 {
            return Err("the server computed no step during the run".into());
        }
        let slowdown = (self.seconds - before.seconds) / calibrated;
        let scaled = |nanoseconds: u64| (nanoseconds as f64 * slowdown).round() as u64;
        let at_start = &self.at_start;
        Ok(Coefficients {
            rows: at_start.rows.map(scaled),
            kilo_decode_keys: scaled(at_start.kilo_decode_keys),
            kilo_chunk_keys: scaled(at_start.kilo_chunk_keys),
            head: scaled(at_start.head),
            logit: scaled(at_start.logit),
        })
    }
}

/// Returns the value of the series `name` that has `label`.
fn value(metrics: &str, name: &str, label: &str) -> Result<f64, String> {
    let missing = || {
        format!(
            "the server's /metrics has no series {name} {label}; --costs works only with Sterna"
        )
    };
    let line = metrics.lines().find(|line| {
        let labels = line
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('{'));
        labels.is_some_and(|labels| labels.contains(label))
    });
    let (_, value) = line
        .and_then(|line| line.rsplit_once(' '))
        .ok_or_else(missing)?;
    value.parse().map_err(|_| missing())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(seconds: f64, calibrated: f64) -> String {
        let mut text = String::from("# TYPE sterna_step_cost_seconds gauge\n");
        let rows = (0..10).map(|knot| (format!("rows_{}", 1 << knot), f64::from(1 << knot) * 1e-3));
        let others = [
            ("kilo_decode_keys", 2e-5),
            ("kilo_chunk_keys", 3e-5),
            ("head", 4e-5),
            ("logit", 5e-7),
        ];
        let others = others.map(|(name, value)| (name.to_owned(), value));
        for (name, value) in rows.chain(others) {
            let labels = format!("model_name=\"m\",engine=\"0\",part=\"{name}\"");
            text += &format!("sterna_step_cost_seconds{{{labels}}} {value}\n");
        }
        text += "sterna_step_seconds_bucket{engine=\"0\",le=\"0.1\"} 7\n";
        text += &format!("sterna_step_seconds_sum{{engine=\"0\"}} {seconds}\n");
        text + &format!("sterna_step_calibrated_seconds_sum{{engine=\"0\"}} {calibrated}\n")
    }

    #[test]
    fn costs_are_those_at_start_times_the_slowdown() {
        let before = StepCosts::read(&metrics(10.0, 9.0)).unwrap();
        let after = StepCosts::read(&metrics(40.0, 29.0)).unwrap();
        let costs = after.since(&before).unwrap();
        let expected = Coefficients {
            rows: std::array::from_fn(|knot| 1_500_000 << knot),
            kilo_decode_keys: 30_000,
            kilo_chunk_keys: 45_000,
            head: 60_000,
            logit: 750,
        };
        assert_eq!(costs, expected);
    }

    #[test]
    fn missing_metrics_are_an_error_that_names_them() {
        let error = |text: &str| StepCosts::read(text).err().unwrap();
        assert!(error("up 1\n").contains("rows_1"));
        let cut = metrics(1.0, 1.0).replace("part=\"head\"", "part=\"tail\"");
        assert!(error(&cut).contains("head"));
        let same = StepCosts::read(&metrics(1.0, 1.0)).unwrap();
        assert!(same.since(&same).unwrap_err().contains("no step"));
    }
}
