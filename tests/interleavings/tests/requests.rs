//! The life of a request under random schedules of the threads: clients submit, cancel, finish and
//! read; the engine thread and the egress thread serve; an operator drains.
//!
//! Each stream ends with exactly one terminal event, no thread waits forever, and the engine ends.

use std::io;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use shuttle::future::block_on;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, Runner};
use sterna_interleavings::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, EventStream, FinishReason, Forward,
    GenerationRequest, Limits, LogitRows, Policy, Refusal, SamplingParams, StreamEvent,
    SubmitError, TenantId, TenantPolicy, TenantsRefused,
};
use sterna_interleavings::metrics::{Identity, Metrics};
use sterna_random::seed_from_env;
use sterna_scheduler::Batch;

const VOCABULARY: usize = 8;
/// The number of schedules of each test, unless `STERNA_SCHEDULES` sets it.
const SCHEDULES: usize = 1500;
/// One schedule in this many runs the thread with the highest priority. The others choose the next
/// thread at random.
const WITH_PRIORITIES: usize = 4;
/// How many times the priorities change in such a schedule.
const CHANGES: usize = 3;
/// Bytes for the stack of each thread.
const STACK: usize = 1 << 18;

static METRICS: LazyLock<Metrics> = LazyLock::new(|| {
    Metrics::new(&Identity {
        model_name: "none".into(),
        isa: "none".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: 8,
        page_tokens: 16,
    })
});

/// A model that says the same token for ever.
struct Monotone;

struct SameRow;

impl LogitRows for SameRow {
    fn copy_row(&self, _: usize, logits: &mut [f32]) {
        logits.fill(0.0);
        logits[1] = 1.0;
    }
}

impl Forward for Monotone {
    type KvStore = ();

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, _: &Limits) -> io::Result<()> {
        Ok(())
    }

    fn forward(&mut self, _: &Batch, (): &mut ()) -> impl LogitRows {
        SameRow
    }
}

/// Starts an engine that runs one sequence at a time, with room for two in each queue and with the
/// tenants 1 to 3.
fn start() -> (EngineHandle, Engine) {
    let config = EngineConfig {
        limits: Limits {
            pages: 8,
            max_running: 1,
            max_queued: 2,
            max_queued_time: u64::MAX,
            step_tokens: 16,
            prefill_chunk: 16,
            max_sequence_tokens: 32,
            states: None,
            diffusion: None,
        },
        policy: Policy {
            max_draft: 0,
            ..Policy::default()
        },
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 2,
        drain_limit: Duration::from_secs(3600),
        stall_limit: Duration::from_secs(3600),
        pin: false,
    };
    let (handle, engine) =
        Engine::start(Monotone, config, METRICS.clone()).expect("the threads start");
    let tenants = [1, 2, 3].map(|id| (TenantId(id), TenantPolicy::default()));
    let set = block_on(handle.set_tenants(tenants.to_vec()));
    assert_eq!(set, Ok(()));
    (handle, engine)
}

fn request(tenant: u32) -> GenerationRequest {
    GenerationRequest {
        prompt: vec![2, 3],
        sampling: SamplingParams::greedy(),
        max_new_tokens: 2,
        is_length_given: false,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(tenant),
        sub_tenant: None,
        band: None,
        arrived: Instant::now(),
        first_token_within: None,
        ends_within: None,
    }
}

/// Reads a stream to its end and checks that its events come in order. Returns the last one.
fn read(mut stream: EventStream) -> StreamEvent {
    let first = block_on(stream.recv()).expect("a stream has a terminal event");
    match first {
        StreamEvent::Accepted => read_on(stream),
        StreamEvent::Refused(_) => {
            assert_eq!(block_on(stream.recv()), None);
            first
        }
        other => panic!("the first event answers the submission, not {other:?}"),
    }
}

/// Reads an accepted stream to its end. Returns the terminal event.
fn read_on(mut stream: EventStream) -> StreamEvent {
    loop {
        match block_on(stream.recv()).expect("a stream has a terminal event") {
            StreamEvent::Accepted => panic!("accepted twice"),
            StreamEvent::Token(_) => {}
            last => {
                assert_eq!(block_on(stream.recv()), None, "an event after {last:?}");
                return last;
            }
        }
    }
}

/// A refusal that a full or a draining engine may give.
fn is_refusal(error: &SubmitError) -> bool {
    matches!(
        error,
        SubmitError::Refused(
            Refusal::Overloaded { .. } | Refusal::TenantQueueFull { .. } | Refusal::Draining
        )
    )
}

/// Checks the last event of a request that nobody ended.
fn check_whole(last: &StreamEvent) {
    match last {
        StreamEvent::Finished {
            reason: FinishReason::Length,
            completion_tokens: 2,
            ..
        } => {}
        StreamEvent::Refused(error) if is_refusal(error) => {}
        other => panic!("{other:?}"),
    }
}

/// Submits a request and reads its stream.
fn whole_client(handle: EngineHandle, tenant: u32) -> JoinHandle<()> {
    thread::spawn(move || match handle.submit(request(tenant)) {
        Ok(stream) => check_whole(&read(stream)),
        Err(error) => assert!(is_refusal(&error), "{error:?}"),
    })
}

/// Submits a request with two choices, reads one event of the first, and leaves.
fn leaving_client(handle: EngineHandle, tenant: u32) -> JoinHandle<()> {
    thread::spawn(
        move || match handle.submit_prompts(vec![request(tenant)], 2) {
            Ok(mut streams) => {
                drop(handle);
                assert!(block_on(streams[0].recv()).is_some());
            }
            Err(error) => assert!(is_refusal(&error), "{error:?}"),
        },
    )
}

/// Submits a request and finishes it after its first event, as a stop string does.
fn finishing_client(handle: EngineHandle, tenant: u32) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut stream = match handle.submit(request(tenant)) {
            Ok(stream) => stream,
            Err(error) => return assert!(is_refusal(&error), "{error:?}"),
        };
        if !matches!(block_on(stream.recv()), Some(StreamEvent::Accepted)) {
            return assert_eq!(block_on(stream.recv()), None);
        }
        stream.finish(FinishReason::Stop);
        match read_on(stream) {
            StreamEvent::Finished {
                reason: FinishReason::Stop,
                completion_tokens: 0,
                ..
            } => {}
            StreamEvent::Refused(error) if is_refusal(&error) => {}
            other => panic!("{other:?}"),
        }
    })
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("the thread does not panic");
    }
}

/// Runs `test` under many schedules. A failure prints the schedule.
fn check(test: fn()) {
    let schedules = std::env::var("STERNA_SCHEDULES").ok();
    let schedules = schedules.map_or(SCHEDULES, |count| {
        count.parse().expect("STERNA_SCHEDULES is a number")
    });
    let seed = seed_from_env().unwrap_or(1);
    eprintln!("STERNA_SEED={seed}, {schedules} schedules");
    let config = || {
        let mut config = Config::default();
        config.stack_size = STACK;
        config
    };
    let prioritized = schedules / WITH_PRIORITIES;
    let random = RandomScheduler::new_from_seed(seed, schedules - prioritized);
    Runner::new(random, config()).run(test);
    let prioritized = PctScheduler::new_from_seed(seed, CHANGES, prioritized);
    Runner::new(prioritized, config()).run(test);
}

#[test]
fn every_stream_ends_once_while_clients_leave_and_finish() {
    check(|| {
        let (handle, engine) = start();
        let clients = [
            whole_client(handle.clone(), 1),
            leaving_client(handle.clone(), 2),
            finishing_client(handle.clone(), 1),
        ];
        drop(handle);
        join(clients);
        engine.join().expect("the engine ends with its last handle");
    });
}

#[test]
fn a_drain_ends_every_stream_and_the_engine() {
    check(|| {
        let (handle, engine) = start();
        let clients = [
            whole_client(handle.clone(), 1),
            leaving_client(handle.clone(), 1),
            finishing_client(handle.clone(), 2),
        ];
        handle.drain();
        engine.join().expect("the engine ends");
        let late = handle.submit(request(3)).map(drop);
        assert_eq!(late, Err(SubmitError::Refused(Refusal::Draining)));
        join(clients);
    });
}

#[test]
fn a_full_queue_displaces_and_refuses_without_losing_a_stream() {
    check(|| {
        let (handle, engine) = start();
        let flood: Vec<_> = (0..4)
            .filter_map(|_| handle.submit(request(1)).ok())
            .collect();
        let newcomers = [
            whole_client(handle.clone(), 2),
            whole_client(handle.clone(), 3),
        ];
        drop(handle);
        flood
            .into_iter()
            .for_each(|stream| check_whole(&read(stream)));
        join(newcomers);
        engine.join().expect("the engine ends with its last handle");
    });
}

#[test]
fn callers_that_wait_for_the_engine_get_an_answer_when_it_ends() {
    check(|| {
        let (handle, engine) = start();
        let (charging, setting) = (handle.clone(), handle.clone());
        let callers = [
            thread::spawn(move || {
                if let Some((charged, _)) = block_on(charging.charge_request(TenantId(1))) {
                    assert_eq!(charged, Ok(()));
                }
            }),
            thread::spawn(move || {
                let tenants = vec![(TenantId(1), TenantPolicy::default())];
                let set = block_on(setting.set_tenants(tenants));
                assert!(matches!(set, Ok(()) | Err(TenantsRefused::Gone)), "{set:?}");
            }),
            leaving_client(handle.clone(), 1),
        ];
        let draining = handle.clone();
        let operator = thread::spawn(move || draining.drain());
        drop(handle);
        join(callers);
        operator.join().expect("a drain never waits");
        engine.join().expect("the engine ends");
    });
}
