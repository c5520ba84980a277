//! Registers series: a metric's name, help text, labels and buckets.

use metrics::{Counter, Gauge, Histogram, Label};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

type Text = &'static str;

/// A metric that was registered.
pub(super) struct Definition {
    pub(super) name: Text,
    pub(super) buckets: Option<&'static [f64]>, // Only histograms have them.
}

/// Registers series with the current recorder, and lists their metrics.
#[derive(Default)]
pub(super) struct Registry {
    labels: Vec<Label>, // Each series has them.
    pub(super) definitions: Vec<Definition>,
}

impl Registry {
    /// Returns a registry that gives each series the label `tenant`.
    pub(super) fn of_tenant(tenant: &str) -> Registry {
        Registry {
            labels: vec![Label::new("tenant", tenant.to_owned())],
            definitions: Vec::new(),
        }
    }

    pub(super) fn gauge(&mut self, name: Text, help: Text) -> Gauge {
        self.define(name, None);
        describe_gauge!(name, help);
        gauge!(name, self.labels.clone())
    }

    /// Registers a gauge for each of the `values` of `label`.
    pub(super) fn gauges<const N: usize>(
        &mut self,
        name: Text,
        help: Text,
        label: Text,
        values: [Text; N],
    ) -> [Gauge; N] {
        self.define(name, None);
        describe_gauge!(name, help);
        values.map(|value| gauge!(name, self.labels_and(label, value)))
    }

    /// Registers a gauge that is always 1 and says something by its labels.
    pub(super) fn info<const N: usize>(
        &mut self,
        name: Text,
        help: Text,
        labels: [(Text, String); N],
    ) {
        self.define(name, None);
        describe_gauge!(name, help);
        gauge!(name, &labels).set(1);
    }

    pub(super) fn counter(&mut self, name: Text, help: Text) -> Counter {
        self.define(name, None);
        describe_counter!(name, help);
        counter!(name, self.labels.clone())
    }

    /// Defines a counter whose series are registered elsewhere.
    pub(super) fn define_counter(&mut self, name: Text, help: Text) {
        self.define(name, None);
        describe_counter!(name, help);
    }

    /// Registers a counter for each of the `values` of `label`.
    pub(super) fn counters<const N: usize>(
        &mut self,
        name: Text,
        help: Text,
        label: Text,
        values: [Text; N],
    ) -> [Counter; N] {
        self.define(name, None);
        describe_counter!(name, help);
        values.map(|value| counter!(name, self.labels_and(label, value)))
    }

    pub(super) fn histogram(
        &mut self,
        name: Text,
        help: Text,
        buckets: &'static [f64],
    ) -> Histogram {
        self.define(name, Some(buckets));
        describe_histogram!(name, help);
        histogram!(name, self.labels.clone())
    }

    fn define(&mut self, name: Text, buckets: Option<&'static [f64]>) {
        self.definitions.push(Definition { name, buckets });
    }

    fn labels_and(&self, label: Text, value: Text) -> Vec<Label> {
        let own = Label::from_static_parts(label, value);
        self.labels.iter().cloned().chain([own]).collect()
    }
}
