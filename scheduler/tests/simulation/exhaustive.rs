//! Every small world: up to three requests on up to six pages, and every single disturbance of
//! every pair of requests.
//!
//! Most mistakes with pages need only two or three sequences. So this test runs all such cases
//! instead of waiting for a seed that finds one.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Batch, Budget, Event, FinishReason, Growth, Limits, Order, PAGE_TOKENS, Plan, Policy, Request,
    Row, Sampled, Scheduler, SequenceId, StateLimits, TokenId,
};

use crate::coverage::Coverage;
use crate::model::{Client, FakeModel};
use crate::states::FakeSlabs;

/// The number of different tokens that the fake model answers. It is small, so that drafts are
/// right.
const ALPHABET: u64 = 2;

/// An event that disturbs a turn. The number is the index of a request.
#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Cancel(usize),
    Drop,
    Fail(usize),
}

/// As few slabs as there may be, and room for a draft.
const STATES: StateLimits = StateLimits {
    slabs: 4,
    in_place_tokens: 2,
    trial_interval: 16,
};

/// One small world.
#[derive(Debug)]
struct SmallWorld<'a> {
    pages: u32,
    policy: Policy,
    gap: usize, // Turns between two submissions.
    requests: &'a [Request],
    disturbed: Option<(usize, Disturbance)>, // The turn, and the event.
    states: Option<StateLimits>,
}

/// Returns requests of these prompt lengths and output lengths, each with two different prompts.
fn requests(lengths: &[usize], outputs: &[u32]) -> Vec<Request> {
    let mut all = Vec::new();
    for &length in lengths {
        for &max_new_tokens in outputs {
            for first in [0, 1] {
                // The prompts differ only in the first token.
                let token = |position: usize| match position {
                    0 => first as TokenId,
                    _ => (position % 2) as TokenId,
                };
                all.push(Request {
                    prompt: (0..length).map(token).collect(),
                    max_new_tokens,
                    ..Request::default()
                });
            }
        }
    }
    all
}

fn policies() -> [Policy; 2] {
    let budget = Budget::Time {
        inter_token_target: 3000,
        min_step: 500,
        max_step: 4000,
        is_strict: false,
    };
    [
        Policy {
            order: Order::FairShare { slack: 1000 },
            budget,
            growth: Growth::Minimal,
            max_draft: 4,
            own_drafts: None,
        },
        Policy {
            order: Order::FirstCome,
            budget: Budget::Tokens(24),
            growth: Growth::Expected,
            max_draft: 0,
            own_drafts: None,
        },
    ]
}

#[test]
fn every_three_requests_on_up_to_six_pages_end_as_expected() {
    let all = requests(&[1, 16, 17, 33], &[1, 18]);
    let mut cases = 0;
    for pages in 2..=6 {
        for policy in policies() {
            for triple in 0..all.len().pow(3) {
                let has_states = triple % 5 < 2;
                let pick = |digit: u32| all[triple / all.len().pow(digit) % all.len()].clone();
                let requests = [pick(0), pick(1), pick(2)];
                let world = SmallWorld {
                    pages,
                    policy: policy.clone(),
                    gap: triple % 3,
                    requests: &requests,
                    disturbed: None,
                    states: has_states.then_some(STATES),
                };
                world.run();
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 5 * 2 * 16 * 16 * 16);
}

#[test]
fn every_two_requests_survive_every_disturbance() {
    let all = requests(&[16, 17, 31], &[2, 18]);
    for pages in [3, 4] {
        for policy in policies() {
            for (pair, states) in
                (0..all.len().pow(2)).flat_map(|pair| [(pair, None), (pair, Some(STATES))])
            {
                let requests = [all[pair % all.len()].clone(), all[pair / all.len()].clone()];
                let mut world = SmallWorld {
                    pages,
                    policy: policy.clone(),
                    gap: pair % 4,
                    requests: &requests,
                    disturbed: None,
                    states,
                };
                for turn in 0..world.run() {
                    for disturbance in [
                        Disturbance::Cancel(0),
                        Disturbance::Cancel(1),
                        Disturbance::Drop,
                        Disturbance::Fail(0),
                        Disturbance::Fail(1),
                    ] {
                        world.disturbed = Some((turn, disturbance));
                        world.run();
                    }
                }
            }
        }
    }
}

impl SmallWorld<'_> {
    /// Runs until all requests have ended. Returns the number of turns.
    fn run(&self) -> usize {
        let limits = Limits {
            pages: self.pages,
            max_running: 3,
            max_queued: 3,
            max_queued_time: u64::MAX,
            step_tokens: 32,
            prefill_chunk: 16,
            max_sequence_tokens: 100,
            states: self.states,
            diffusion: None,
        };
        let mut run = SmallRun {
            model: FakeModel {
                slabs: FakeSlabs::new(&limits),
                cells: vec![None; self.pages as usize * PAGE_TOKENS],
                alphabet: ALPHABET,
            },
            scheduler: Scheduler::new(limits, self.policy.clone()),
            clients: BTreeMap::new(),
            ids: Vec::new(),
        };
        let tokens: usize = self
            .requests
            .iter()
            .map(|r| r.prompt.len() + r.max_new_tokens as usize)
            .sum();
        let mut turn = 0;
        loop {
            while let Some(request) = self.requests.get(run.ids.len())
                && run.ids.len() * self.gap <= turn
            {
                run.submit(request.clone());
            }
            let disturbance = self.disturbed.filter(|(when, _)| *when == turn);
            run.turn(disturbance.map(|(_, disturbance)| disturbance));
            turn += 1;
            if run.clients.is_empty() && run.ids.len() == self.requests.len() {
                break;
            }
            assert!(turn < 3 * tokens + 20, "{self:?} does not end");
        }
        run.scheduler.reset_prefix_cache();
        assert_eq!(
            run.scheduler.snapshot().free,
            self.pages as usize,
            "{self:?}"
        );
        turn
    }
}

/// The state of a small world while it runs.
struct SmallRun {
    scheduler: Scheduler,
    model: FakeModel,
    clients: BTreeMap<SequenceId, Client>,
    ids: Vec<Option<SequenceId>>, // By request; `None` for a refused request.
}

impl SmallRun {
    fn submit(&mut self, request: Request) {
        let number = self.ids.len() as u64;
        let id = self.scheduler.submit(0, request.clone()).ok();
        if let Some(id) = id {
            self.clients
                .insert(id, Client::new(number, request, None, ALPHABET));
        }
        self.ids.push(id);
    }

    fn turn(&mut self, disturbance: Option<Disturbance>) {
        if let Some(Disturbance::Cancel(index)) = disturbance
            && let Some(id) = self.ids.get(index).copied().flatten()
            && self.scheduler.cancel(id, FinishReason::Cancelled)
        {
            self.end(id, FinishReason::Cancelled);
        }
        self.scheduler.check();
        if let Plan::Step(step) = self.scheduler.plan(0) {
            let batch = step.batch().clone();
            let mut unused = Coverage::default();
            let next = self
                .model
                .forward(&batch, &self.clients, &mut unused, || false);
            match disturbance {
                Some(Disturbance::Drop) => drop(step),
                Some(Disturbance::Fail(index)) => {
                    let failed = self.ids.get(index).copied().flatten();
                    let failed = failed.filter(|id| self.clients.contains_key(id));
                    // A sequence that is not in the step cannot fail in it.
                    let is_in_step = |id: &SequenceId| {
                        let mut rows = batch.rows().iter();
                        rows.any(|row| row.sequence == *id)
                    };
                    let failed = failed.filter(is_in_step);
                    let sampled = receive(&mut self.clients, &batch, next, failed);
                    step.commit_rerun(0, &sampled, failed.as_slice());
                }
                _ => {
                    let sampled = receive(&mut self.clients, &batch, next, None);
                    step.commit(0, &sampled);
                }
            }
        }
        self.scheduler.check();
        for event in self.scheduler.events() {
            if let Event::Finished { id, reason, .. } = event {
                let client = self.clients.remove(&id).expect("a request ends once");
                assert_eq!((reason, &client.output), (client.reason, &client.answer));
            }
        }
    }

    /// Expects the request to end now, with the output that it has.
    fn end(&mut self, id: SequenceId, reason: FinishReason) {
        let client = self
            .clients
            .get_mut(&id)
            .expect("the request has not ended");
        client.end(reason);
    }
}

/// Gives every client the tokens of its row, except `failed`, whose row fails. Returns the samples.
fn receive(
    clients: &mut BTreeMap<SequenceId, Client>,
    batch: &Batch,
    next: Vec<(Row, Vec<TokenId>)>,
    failed: Option<SequenceId>,
) -> Vec<Sampled> {
    let mut sampled = Vec::new();
    for (row, tokens) in next {
        let client = clients.get_mut(&row.sequence);
        let client = client.expect("the request has not ended");
        if failed == Some(row.sequence) {
            client.fail();
            sampled.extend(tokens.iter().map(|_| Sampled::Void));
            continue;
        }
        let known = row.len() - (row.logits as usize).saturating_sub(1);
        let drafts = &batch.tokens(&row)[known..];
        sampled.extend(client.receive(&tokens, drafts, None, None));
    }
    sampled
}
