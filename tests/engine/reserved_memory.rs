//! The engine prepares faster steps and takes reserved memory while it is idle.

use std::io;
use std::sync::{Arc, Mutex};

use sterna::engine::{Forward, LogitRows, TokenId};
use sterna_scheduler::{Batch, Limits};

use super::model::{Gate, Recorder, VOCABULARY, gate};
use super::running::{Answer, Running, config, request, start_model};

/// What the engine asked of a [`Reserving`] model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Prepare,
    TakeMemory,
    Step,
}

/// A model whose memory has several parts. The engine waits at the gate of a part.
struct Reserving {
    model: Recorder,
    observed: Arc<Mutex<Observed>>,
    last: fn() -> io::Result<bool>,
    /// Returns from the number of calls whether there is more to prepare.
    prepare: Option<fn(usize) -> bool>,
}

#[derive(Default)]
struct Observed {
    calls: Vec<Call>,
    gates: Vec<Gate>, // Of the parts that are left, the next one last.
}

impl Forward for Reserving {
    type KvStore = <Recorder as Forward>::KvStore;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<Self::KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn prepare(&mut self) -> bool {
        let Some(prepare) = self.prepare else {
            return false;
        };
        let mut observed = self.observed.lock().expect("no holder panics");
        observed.calls.push(Call::Prepare);
        let count = observed.calls.len();
        drop(observed);
        prepare(count)
    }

    fn take_memory(&self, _: &mut Self::KvStore) -> io::Result<bool> {
        let mut observed = self.observed.lock().expect("no holder panics");
        observed.calls.push(Call::TakeMemory);
        let gate = observed.gates.pop().expect("no part is left");
        let is_last = observed.gates.is_empty();
        drop(observed);
        let _ = gate.entered.send(());
        let _ = gate.pass.recv();
        if is_last { (self.last)() } else { Ok(true) }
    }

    fn forward(&mut self, batch: &Batch, pages: &mut Self::KvStore) -> impl LogitRows {
        let mut observed = self.observed.lock().expect("no holder panics");
        observed.calls.push(Call::Step);
        drop(observed);
        self.model.forward(batch, pages)
    }
}

#[tokio::test]
async fn an_idle_engine_takes_its_memory_and_a_request_waits_for_one_part_of_that_at_most() {
    for last in [|| Ok(false), || Err(io::ErrorKind::OutOfMemory.into())] {
        let observed = Arc::new(Mutex::new(Observed::default()));
        let (gates, parts): (Vec<_>, Vec<_>) = (0..3).map(|_| gate()).unzip();
        observed.lock().unwrap().gates = gates;
        let running = start_model(
            Reserving {
                model: Recorder { gate: None },
                observed: observed.clone(),
                last,
                prepare: None,
            },
            config(),
        );
        let prompt: Vec<TokenId> = (1..40).collect();
        let mut parts = parts.into_iter().rev();
        let first = parts.next().unwrap();
        first.wait_inside();
        let stream = running.handle.submit(request(&prompt, 3)).unwrap();
        first.open();
        assert_eq!(Answer::of(stream).await.tokens.len(), 3);
        for part in parts {
            part.wait_inside();
            part.open();
        }
        assert_eq!(running.stop().await, Ok(()));
        let calls = observed.lock().unwrap().calls.clone();
        let took = |calls: &[Call]| {
            calls
                .iter()
                .filter(|&&call| call == Call::TakeMemory)
                .count()
        };
        assert_eq!((calls[0], took(&calls)), (Call::TakeMemory, 3));
        assert_eq!(calls[1], Call::Step, "{calls:?}");
        assert_eq!(took(&calls[calls.len() - 2..]), 2, "{calls:?}");
    }
}

#[tokio::test]
async fn an_engine_without_handles_ends_before_it_has_taken_all_memory() {
    let observed = Arc::new(Mutex::new(Observed::default()));
    let (gates, mut parts): (Vec<_>, Vec<_>) = (0..3).map(|_| gate()).unzip();
    observed.lock().unwrap().gates = gates;
    let running = start_model(
        Reserving {
            model: Recorder { gate: None },
            observed: observed.clone(),
            last: || Ok(false),
            prepare: None,
        },
        config(),
    );
    let first = parts.pop().unwrap();
    first.wait_inside();
    let Running { handle, engine, .. } = running;
    drop(handle);
    drop(parts); // No later part would wait.
    first.open();
    assert_eq!(engine.join(), Ok(()));
    assert_eq!(observed.lock().unwrap().calls, [Call::TakeMemory]);
}

#[tokio::test]
async fn an_idle_engine_prepares_before_it_takes_memory_and_survives_a_panic_of_that() {
    let has_more: fn(usize) -> bool = |count| count < 3;
    for (prepare, count) in [(has_more, 3), (|_| panic!("no memory"), 1)] {
        let observed = Arc::new(Mutex::new(Observed::default()));
        let (entrance, part) = gate();
        observed.lock().unwrap().gates = vec![entrance];
        let running = start_model(
            Reserving {
                model: Recorder { gate: None },
                observed: observed.clone(),
                last: || Ok(false),
                prepare: Some(prepare),
            },
            config(),
        );
        part.wait_inside();
        let mut expected = vec![Call::Prepare; count];
        expected.push(Call::TakeMemory);
        assert_eq!(observed.lock().unwrap().calls, expected);
        part.open();
        let stream = running.handle.submit(request(&[1, 2, 3], 3)).unwrap();
        assert_eq!(Answer::of(stream).await.tokens.len(), 3);
        assert_eq!(running.stop().await, Ok(()));
        let calls = observed.lock().unwrap().calls.clone();
        let prepared = calls.iter().filter(|call| **call == Call::Prepare).count();
        // After a panic, the engine does not prepare again.
        assert!(count > 1 || prepared == 1, "{calls:?}");
    }
}
