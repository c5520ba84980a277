//! Registers series: a metric's name, help text, labels and buckets.

use metrics::{Counter, Gauge, Histogram, Label};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

/// A metric that was registered.
pub(super) struct Definition {
    pub(super) name: &'static str,
    pub(super) buckets: Option<&'static [f64]>, // Only histograms have them.
}

/// Registers series with the current recorder, and lists their metrics.
#[derive(Default)]
pub(super) struct Registry {
    tenant: Option<String>,
    pub(super) definitions: Vec<Definition>,
}

impl Registry {
    /// Returns a registry that gives each series the label `tenant`.
    pub(super) fn of_tenant(tenant: &str) -> Registry {
        Registry {
            tenant: Some(tenant.to_owned()),
            definitions: Vec::new(),
        }
    }

    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str) -> Gauge {
        self.define(name, None);
        describe_gauge!(name, help);
        gauge!(name, self.labels())
    }

    /// Registers a gauge for each value of a label.
    pub(super) fn gauges<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: [&'static str; N],
    ) -> [Gauge; N] {
        self.define(name, None);
        describe_gauge!(name, help);
        values.map(|value| gauge!(name, self.labels_and(label, value)))
    }

    /// Registers a gauge that is always 1 and says something by its labels.
    pub(super) fn info(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: [(&'static str, String); 2],
    ) {
        self.define(name, None);
        describe_gauge!(name, help);
        let labels = labels.map(|(label, value)| Label::new(label, value));
        gauge!(name, labels.to_vec()).set(1);
    }

    pub(super) fn counter(&mut self, name: &'static str, help: &'static str) -> Counter {
        self.define(name, None);
        describe_counter!(name, help);
        counter!(name, self.labels())
    }

    /// Registers a counter for each value of a label.
    pub(super) fn counters<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: [&'static str; N],
    ) -> [Counter; N] {
        self.define(name, None);
        describe_counter!(name, help);
        values.map(|value| counter!(name, self.labels_and(label, value)))
    }

    pub(super) fn histogram(
        &mut self,
        name: &'static str,
        help: &'static str,
        buckets: &'static [f64],
    ) -> Histogram {
        self.define(name, Some(buckets));
        describe_histogram!(name, help);
        histogram!(name, self.labels())
    }

    fn define(&mut self, name: &'static str, buckets: Option<&'static [f64]>) {
        self.definitions.push(Definition { name, buckets });
    }

    fn labels(&self) -> Vec<Label> {
        let tenant = self.tenant.iter();
        tenant
            .map(|tenant| Label::new("tenant", tenant.clone()))
            .collect()
    }

    fn labels_and(&self, label: &'static str, value: &'static str) -> Vec<Label> {
        let mut labels = self.labels();
        labels.push(Label::from_static_parts(label, value));
        labels
    }
}
