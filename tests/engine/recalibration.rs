//! An idle engine measures the cost of a step again if other work disturbed the measurement at the
//! start.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::engine::{EngineConfig, Forward, LogitRows, TokenId};
use sterna_scheduler::{Batch, Limits};

use super::model::{Gate, Recorder, VOCABULARY, gate, mix};
use super::running::{Answer, config, request, start_model};

/// A model of whose steps two of three take longer, in no order, as beside other work. So the
/// engine measures their cost again when it is idle.
struct Disturbed {
    model: Recorder,
    observed: Arc<Mutex<Observed>>,
}

/// What a test sees and decides of a [`Disturbed`] model.
#[derive(Default)]
struct Observed {
    steps: u64,
    last_tokens: Vec<TokenId>, // Of the first row of the last step.
    gate: Option<Gate>,
}

impl Forward for Disturbed {
    type KvStore = <Recorder as Forward>::KvStore;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<Self::KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn forward(&mut self, batch: &Batch, pages: &mut Self::KvStore) -> impl LogitRows {
        let mut observed = self.observed.lock().expect("no holder panics");
        observed.steps += 1;
        observed.last_tokens = batch.tokens(&batch.rows()[0]).to_vec();
        let (gate, is_slow) = (observed.gate.take(), !mix(observed.steps).is_multiple_of(3));
        drop(observed);
        if let Some(gate) = gate {
            let _ = gate.entered.send(());
            let _ = gate.pass.recv();
        }
        if is_slow {
            // Much longer than the other steps, also beside real other work.
            std::thread::sleep(Duration::from_millis(10));
        }
        self.model.forward(batch, pages)
    }
}

#[tokio::test]
async fn an_idle_engine_measures_again_and_a_request_waits_for_one_step_of_that_at_most() {
    let observed = Arc::new(Mutex::new(Observed::default()));
    let model = Disturbed {
        model: Recorder { gate: None },
        observed: observed.clone(),
    };
    let measured = EngineConfig {
        cost: None,
        ..config()
    };
    let running = start_model(model, measured);
    let prompt: Vec<TokenId> = (1..40).collect();
    let asked = || running.handle.submit(request(&prompt, 8)).unwrap();
    let answer = Answer::of(asked()).await;
    for _ in 0..2 {
        let (blocked, measurement) = gate();
        observed.lock().unwrap().gate = Some(blocked);
        measurement.wait_inside();
        let steps = running.handle.status().steps;
        let stream = asked();
        let (blocked, first_step) = gate();
        observed.lock().unwrap().gate = Some(blocked);
        measurement.open();
        first_step.wait_inside();
        let tokens = observed.lock().unwrap().last_tokens.clone();
        assert!(
            prompt.ends_with(&tokens),
            "the next step is the request's: {tokens:?}"
        );
        first_step.open();
        let again = Answer::of(stream).await;
        assert_eq!(again.tokens, answer.tokens);
        assert!(again.cached_tokens() > 0, "the measurement keeps the cache");
        let own_steps = running.handle.status().steps - steps;
        assert!(own_steps <= 8, "{own_steps}: the measurement is no step");
    }
    assert_eq!(running.stop().await, Ok(()));
}
