//! Worlds in which the clients of one tenant always have requests waiting, and one of them many.

use std::collections::BTreeMap;

use sterna_random::Random;
use sterna_scheduler::{
    Band, Event, Limits, Micros, Order, Policy, Request, Scheduler, SequenceId, SubTenant, TokenId,
};

use crate::fair::{COST, run_step};

const STEPS: u64 = 400;
const PROMPT_TOKENS: usize = 40;
const OUTPUT_TOKENS: u32 = 3;
const SHARED_TOKENS: TokenId = 32;
/// The requests that the client with the flood has waiting.
const FLOOD: usize = 60;

/// A tenant with two to four clients, and one request of the batch band. The first client floods
/// the tenant. Its prompts and the batch request have a cached prefix, with which they would start
/// before all others if there were no turns.
pub(crate) struct ClientWorld {
    seed: u64,
    scheduler: Scheduler,
    clients: usize,
    waiting: BTreeMap<SequenceId, Option<usize>>, // The client; `None` for the batch request.
    starts: Vec<usize>,                           // By client.
    last_token: TokenId,                          // Every token of a prompt is a new one.
    now: Micros,
}

impl Drop for ClientWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl ClientWorld {
    pub(crate) fn new(seed: u64) -> ClientWorld {
        let mut random = Random::new(seed);
        let clients = random.between(2, 4) as usize;
        let limits = Limits {
            pages: 256,
            max_running: random.between(1, 6) as u32,
            max_queued: 100,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
            states: None,
            diffusion: None,
        };
        let slack = random.pick(&[0, 1_000, 20_000]);
        let policy = Policy {
            order: Order::FairShare { slack },
            ..Policy::default()
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(COST);
        ClientWorld {
            seed,
            scheduler,
            clients,
            waiting: BTreeMap::new(),
            starts: vec![0; clients],
            last_token: SHARED_TOKENS,
            now: 0,
        }
    }

    pub(crate) fn run(mut self) {
        self.submit(None);
        for _ in 0..STEPS {
            for client in 0..self.clients {
                let wanted = if client == 0 { FLOOD } else { 2 };
                let waiting = self.waiting.values();
                let waiting = waiting.filter(|&&other| other == Some(client)).count();
                (waiting..wanted).for_each(|_| self.submit(Some(client)));
            }
            run_step(&mut self.scheduler, &mut self.now, &mut self.last_token);
            self.scheduler.check();
            self.note_starts();
        }
        let all: usize = self.starts.iter().sum();
        let least = self.starts.iter().min().copied().unwrap_or_default();
        assert!(all > 40, "only {all} requests started");
        // Predicted times differ with the number of sequences that run.
        assert!(
            least + 3 >= all / self.clients * 7 / 10,
            "S17: a client got too few starts: {:?}",
            self.starts
        );
    }

    fn submit(&mut self, client: Option<usize>) {
        let first = self.last_token + 1;
        self.last_token += PROMPT_TOKENS as TokenId;
        let own = first..=self.last_token;
        let prompt = match client {
            None | Some(0) => (1..=SHARED_TOKENS).chain(own).collect(),
            Some(_) => own.collect(),
        };
        let request = Request {
            prompt,
            max_new_tokens: OUTPUT_TOKENS,
            sub_tenant: client.map(|client| SubTenant(client as u64)),
            band: client.is_none().then_some(Band::Batch),
            ..Request::default()
        };
        let id = self.scheduler.submit(self.now, request);
        self.waiting.insert(id.expect("the queue has room"), client);
    }

    fn note_starts(&mut self) {
        let events: Vec<Event> = self.scheduler.events().collect();
        for event in events {
            if let Event::Admitted { id, .. } = event {
                let client = self.waiting.remove(&id).expect("it waited");
                let client = client.expect("S17: a request of a lower band starts before others");
                self.starts[client] += 1;
            }
        }
    }
}
