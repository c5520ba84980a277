//! What reading a tenant's requests costs: parsing, rendering, encoding and decoding.
//!
//! The processor time counts as service of the tenant, as its part of the steps does. But steps do
//! not wait for each other's turn with the reading of texts: both use the cores at once. So reading
//! that no answer follows has an allowance. Beyond it, requests are read one by one by a thread of
//! the lowest priority, and while the engine is busy, for a small part of the time.
//!
//! A tenant has one allowance for requests about text only, and one for requests to the engine that
//! fail. On a server without keys all clients are one tenant, and a client that tokenizes much
//! delays nobody's answers.
//!
//! Invariant: a tenant whose requests to the engine are all answered has them read at the usual
//! priority, however much text it has tokenized.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::engine::TenantId;

/// A tenant may read without an answer for a twentieth of the time, for each kind of requests.
const ALLOWED_PART: u32 = 20;
/// This much may come at once. Beyond it the tenant is read slowly, until all of it is earned.
const AT_ONCE: Duration = Duration::from_millis(50);
/// More than this is not remembered.
const MOST: Duration = Duration::from_secs(1);
const LOWEST_PRIORITY: i32 = 19;
/// While the engine is busy, slow reading gets 1/32 of a core. A step waits for its slowest thread,
/// so the steps lose about as much of their time.
const SLOW_PART: u32 = 32;
/// What receiving a byte takes, about. It counts as slow reading.
const PER_BYTE: Duration = Duration::from_nanos(1);
/// How often a tenant that waits looks whether the engine is busy.
const LOOK: Duration = Duration::from_millis(10);

/// What follows the reading of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Following {
    /// The engine gets the request.
    Answer,
    /// Nothing: the request is about text only.
    Nothing,
}

/// A tenant, and one of its two kinds of requests.
pub(super) type Reader = (TenantId, Following);

/// The time that reading a request took.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadingTime {
    pub(super) processor: Duration,
    elapsed: Duration,
}

impl ReadingTime {
    /// Runs `read`, and measures it.
    pub(super) fn of<T>(read: impl FnOnce() -> T) -> (T, ReadingTime) {
        let (began, before) = (Instant::now(), processor_time());
        let result = read();
        let time = ReadingTime {
            processor: processor_time().saturating_sub(before),
            elapsed: began.elapsed(),
        };
        (result, time)
    }
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// The reading of one request. A reading that is dropped notes that no answer follows.
pub(in crate::api) struct Reading {
    allowances: Arc<ReadingAllowances>,
    reader: Reader,
    time: ReadingTime,
    is_answered: bool,
}

impl Reading {
    pub(super) fn new(
        allowances: Arc<ReadingAllowances>,
        reader: Reader,
        time: ReadingTime,
    ) -> Reading {
        Reading {
            allowances,
            reader,
            time,
            is_answered: false,
        }
    }

    /// Notes that an answer follows.
    pub(in crate::api) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.is_answered {
            self.allowances.add(self.reader, self.time, Instant::now());
        }
    }
}

/// The reading that no answer has followed.
#[derive(Default)]
pub(super) struct ReadingAllowances {
    readers: Mutex<HashMap<Reader, UnansweredTime>>,
}

#[derive(Clone, Copy)]
struct UnansweredTime {
    owed: Duration,
    at: Instant,
    is_beyond: bool,
}

impl UnansweredTime {
    fn advance(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at);
        self.owed = self.owed.saturating_sub(elapsed / ALLOWED_PART);
        self.at = now;
        self.is_beyond &= !self.owed.is_zero();
    }
}

impl ReadingAllowances {
    /// Returns whether requests of `reader` are read slowly now.
    pub(super) fn is_beyond(&self, reader: Reader, now: Instant) -> bool {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.get_mut(&reader).is_some_and(|time| {
            time.advance(now);
            time.is_beyond
        })
    }

    /// Notes that a request was read, and that no answer follows.
    fn add(&self, reader: Reader, read: ReadingTime, now: Instant) {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let new = UnansweredTime {
            owed: Duration::ZERO,
            at: now,
            is_beyond: false,
        };
        let time = readers.entry(reader).or_insert(new);
        time.advance(now);
        time.owed = (time.owed + read.elapsed).min(MOST);
        time.is_beyond |= time.owed > AT_ONCE;
    }
}

/// Runs `read`, which reads a body of `bytes`, on a thread of the lowest priority. Then others have
/// the second permit, the server's. The first is the tenant's: its next body has its turn once this
/// one has taken no more than its part of the time, or once the engine is not busy. Returns `None`
/// if `read` panics, or if the system has no thread for it.
pub(super) async fn run_slowly<T: Send + 'static>(
    read: impl FnOnce() -> T + Send + 'static,
    bytes: usize,
    permits: [OwnedSemaphorePermit; 2],
    is_busy: impl Fn() -> bool + Send + 'static,
) -> Option<T> {
    let began = Instant::now();
    let (done, result) = oneshot::channel();
    let (ended, end) = oneshot::channel();
    let thread = thread::Builder::new().name("sterna-slow".into());
    // A thread cannot raise its priority again, so each request has a thread of its own.
    let spawned = thread.spawn(move || {
        if let Err(error) = setpriority_process(None, LOWEST_PRIORITY) {
            tracing::debug!(%error, "a thread keeps its priority");
        }
        // The client may have left.
        drop(done.send(read()));
        let _ = ended.send(processor_time());
    });
    spawned.ok()?;
    // The client may leave, but the tenant has to wait.
    tokio::spawn(async move {
        let Ok(time) = end.await else { return };
        let [_of_tenant, of_server] = permits;
        drop(of_server);
        let next = began + SLOW_PART * (time + PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX));
        while Instant::now() < next && is_busy() {
            tokio::time::sleep(LOOK).await;
        }
    });
    result.await.ok()
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    const A: Reader = (TenantId(1), Following::Nothing);
    const B: Reader = (TenantId(2), Following::Nothing);

    #[test]
    fn reading_beyond_the_allowance_is_slow_until_it_is_earned() {
        let allowances = ReadingAllowances::default();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let read = |millis| ReadingTime {
            processor: Duration::ZERO,
            elapsed: Duration::from_millis(millis),
        };
        for tenth in 0..10 {
            assert!(!allowances.is_beyond(A, at(0)), "after {tenth} of 10");
            allowances.add(A, read(5), at(0));
        }
        allowances.add(A, read(1), at(0));
        assert!(allowances.is_beyond(A, at(0)));
        assert!(!allowances.is_beyond(B, at(0)), "another tenant is not");
        assert!(allowances.is_beyond(A, at(51 * 20 - 1)));
        assert!(!allowances.is_beyond(A, at(51 * 20)));
        // A twentieth of the time is always allowed.
        for step in 0..100 {
            let now = at(3000 + step * 200);
            assert!(!allowances.is_beyond(A, now));
            allowances.add(A, read(10), now);
        }
        // However long a tenant was beyond it, it is not so for ever.
        for _ in 0..100 {
            allowances.add(A, read(1000), at(30_000));
        }
        assert!(allowances.is_beyond(A, at(49_999)));
        assert!(!allowances.is_beyond(A, at(50_000)));
    }

    #[test]
    fn reading_that_an_answer_follows_needs_no_allowance() {
        let allowances = Arc::new(ReadingAllowances::default());
        let [answers, texts] =
            [Following::Answer, Following::Nothing].map(|following| (TenantId(1), following));
        let reading = |reader| {
            let time = ReadingTime {
                processor: Duration::ZERO,
                elapsed: Duration::from_secs(1),
            };
            Reading::new(Arc::clone(&allowances), reader, time)
        };
        let is_beyond = || {
            let now = Instant::now();
            [answers, texts].map(|reader| allowances.is_beyond(reader, now))
        };
        reading(answers).answered();
        assert_eq!(is_beyond(), [false, false]);
        drop(reading(texts));
        assert_eq!(is_beyond(), [false, true], "answers are not delayed");
        drop(reading(answers));
        assert_eq!(is_beyond(), [true, true]);
    }

    #[tokio::test]
    async fn a_slow_thread_has_the_lowest_priority_and_others_keep_theirs() {
        let priority = || rustix::process::getpriority_process(None);
        let usual = priority();
        let found = run_slowly(priority, 0, permits().await, || false).await;
        assert_eq!(found, Some(Ok(LOWEST_PRIORITY)));
        assert_eq!(priority(), usual);
        let failed = run_slowly(|| panic!("it panics") as (), 0, permits().await, || true);
        assert_eq!(failed.await, None);
    }

    async fn permits() -> [OwnedSemaphorePermit; 2] {
        let permits = Arc::new(Semaphore::new(2));
        [
            Arc::clone(&permits).acquire_owned().await.unwrap(),
            permits.acquire_owned().await.unwrap(),
        ]
    }

    #[test]
    fn the_processor_time_of_a_read_is_measured() {
        let count = |until: u64| (0..until).fold(0_u64, |sum, number| sum ^ number.pow(2));
        let ((), idle) = ReadingTime::of(|| ());
        let (_, busy) = ReadingTime::of(|| std::hint::black_box(count(3_000_000)));
        assert!(busy.processor > idle.processor, "{busy:?} {idle:?}");
    }

    /// Reads two bodies of a tenant slowly, one after the other, and returns how long both take.
    async fn two_slow_bodies(bytes: usize, is_busy: bool) -> Duration {
        let semaphores = [1, 1].map(|permits| Arc::new(Semaphore::new(permits)));
        let began = Instant::now();
        for _ in 0..2 {
            let [of_tenant, of_server] = semaphores.each_ref().map(Arc::clone);
            let permits = [
                of_tenant.acquire_owned().await.unwrap(),
                of_server.acquire_owned().await.unwrap(),
            ];
            assert_eq!(
                run_slowly(|| 7, bytes, permits, move || is_busy).await,
                Some(7)
            );
        }
        began.elapsed()
    }

    #[tokio::test]
    async fn slow_reading_has_a_small_part_of_the_time_while_the_engine_is_busy() {
        let part = SLOW_PART * PER_BYTE * 2_000_000;
        assert!(two_slow_bodies(2_000_000, true).await >= part);
        assert!(two_slow_bodies(1 << 40, false).await < Duration::from_secs(20));
    }
}
