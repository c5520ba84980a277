//! The queue of the spans that wait for the thread that sends them.
//!
//! Invariant: the queue holds at most its capacity. What finds no room is lost, and so is a batch
//! that the collector does not take. The log says how many are lost, at most once a minute.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};

/// The spans that wait, of at most 1 KB each. A request has up to five.
const CAPACITY: usize = 8192;
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The spans that wait and the spans that are lost.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    waiting: AtomicUsize,
    losses: Mutex<SpanLosses>,
}

#[derive(Debug, Default)]
struct SpanLosses {
    unreported: usize,
    reported: Option<Instant>,
}

impl SpanCounts {
    /// Counts a span that enters the queue, if there is room.
    fn enter(&self) -> bool {
        let more = |waiting| (waiting < CAPACITY).then_some(waiting + 1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        self.waiting.fetch_update(set, fetch, more).is_ok()
    }

    fn leave(&self, spans: usize) {
        let less = |waiting: usize| Some(waiting.saturating_sub(spans)); // 0 after `close`.
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.waiting.fetch_update(set, fetch, less); // `less` always answers.
    }

    /// Counts spans that are lost. Reports all that are not reported yet, if that is due.
    fn lose(&self, spans: usize, why: &str) {
        let mut losses = self.lock();
        losses.unreported += spans;
        let is_due = losses
            .reported
            .is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        if is_due && losses.unreported > 0 {
            losses.report(why);
        }
    }

    /// Loses all that wait, and reports what is not reported yet.
    pub(super) fn close(&self, why: &str) {
        let mut losses = self.lock();
        losses.unreported += self.waiting.swap(0, Ordering::Relaxed);
        if losses.unreported > 0 {
            losses.report(why);
        }
    }

    /// Locks the losses. A thread that panicked with the lock left them valid.
    fn lock(&self) -> MutexGuard<'_, SpanLosses> {
        self.losses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SpanLosses {
    fn report(&mut self, why: &str) {
        let spans = std::mem::take(&mut self.unreported);
        self.reported = Some(Instant::now());
        tracing::warn!(spans, why, "spans of traces are lost");
    }
}

/// The queue, and the thread that sends what is in it.
#[derive(Debug)]
pub(super) struct SpanQueue {
    batches: BatchSpanProcessor,
    counts: Arc<SpanCounts>,
}

impl SpanQueue {
    /// Starts the thread, which sends with `exporter`.
    pub(super) fn start(
        exporter: opentelemetry_otlp::SpanExporter,
        counts: Arc<SpanCounts>,
    ) -> SpanQueue {
        let config = BatchConfigBuilder::default().with_max_queue_size(CAPACITY);
        let exporter = CountingExporter {
            exporter,
            counts: Arc::clone(&counts),
        };
        SpanQueue {
            batches: BatchSpanProcessor::new(exporter, config.build()),
            counts,
        }
    }
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.counts.enter() {
            self.batches.on_end(span);
        } else {
            self.counts.lose(1, "the queue to the collector is full");
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// Counts what leaves the queue, and what the collector does not take.
#[derive(Debug)]
struct CountingExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    counts: Arc<SpanCounts>,
}

impl SpanExporter for CountingExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.exporter.export(batch).await;
        self.counts.leave(spans);
        match &sent {
            Ok(()) => self.counts.lose(0, "the queue to the collector was full"),
            Err(error) => self.counts.lose(spans, &error.to_string()),
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_takes_no_span_until_one_leaves() {
        let counts = SpanCounts::default();
        assert!((0..CAPACITY).all(|_| counts.enter()));
        assert!(!counts.enter());
        counts.leave(1);
        assert!(counts.enter() && !counts.enter());
    }

    #[test]
    fn losses_are_reported_at_once_and_then_seldom() {
        let counts = SpanCounts::default();
        counts.lose(0, "nothing");
        assert!(counts.lock().reported.is_none());
        counts.lose(3, "test");
        assert_eq!(counts.lock().unreported, 0);
        counts.lose(2, "test");
        counts.lose(2, "test");
        assert_eq!(counts.lock().unreported, 4);
        assert!(counts.enter());
        counts.close("test");
        assert_eq!(counts.lock().unreported, 0);
    }
}
