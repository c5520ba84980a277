//! Every small world: up to three requests on up to six pages, with every single disturbance of every pair.
//!
//! What can go wrong with pages mostly goes wrong between two or three sequences. So instead of waiting for the seeds to
//! find such a case, all of them are tried.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Budget, Event, FinishReason, Growth, Limits, Order, PAGE_TOKENS, Plan, Policy, Request,
    Sampled, Scheduler, SequenceId, TokenId,
};

use crate::Counts;
use crate::model::{Client, Model};

/// Tokens that the fake model may answer: few, so that drafts come true.
const ALPHABET: u64 = 2;

/// What happens besides the requests themselves, in a turn.
#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Cancel(usize),
    Drop,
    Fail(usize),
}

/// The numbers in it are those of the turn in which it happens and of the request that it meets.
#[derive(Debug)]
struct Case<'a> {
    pages: u32,
    policy: Policy,
    gap: usize, // Turns between two requests.
    requests: &'a [Request],
    disturbed: Option<(usize, Disturbance)>,
}

/// Prompts around the borders of pages, that begin alike or not; answers within a page and beyond.
fn requests(lengths: &[usize], outputs: &[u32]) -> Vec<Request> {
    let mut all = Vec::new();
    for &length in lengths {
        for &max_new_tokens in outputs {
            for first in [0, 1] {
                // Alike in the second page too, or other from the first token on.
                let token = |at: usize| (if at < 1 { first } else { at % 2 }) as TokenId;
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
    let time = Budget::Time {
        inter_token_target: 3000,
        least: 500,
        most: 4000,
    };
    [
        Policy {
            order: Order::FairShare { slack: 1000 },
            budget: time,
            growth: Growth::Least,
            max_draft: 4,
        },
        Policy {
            order: Order::FirstCome,
            budget: Budget::Tokens(24),
            growth: Growth::Expected,
            max_draft: 0,
        },
    ]
}

#[test]
fn three_requests_on_up_to_six_pages() {
    let choices = requests(&[1, 16, 17, 33], &[1, 18]);
    let mut cases = 0;
    for pages in 2..=6 {
        for policy in policies() {
            for triple in 0..choices.len().pow(3) {
                let pick =
                    |place: u32| choices[triple / choices.len().pow(place) % choices.len()].clone();
                let requests = [pick(0), pick(1), pick(2)];
                let case = Case {
                    pages,
                    policy: policy.clone(),
                    gap: triple % 3,
                    requests: &requests,
                    disturbed: None,
                };
                case.run();
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 5 * 2 * 16 * 16 * 16);
}

#[test]
fn two_requests_with_every_disturbance() {
    let choices = requests(&[16, 17, 31], &[2, 18]);
    for pages in [3, 4] {
        for policy in policies() {
            for pair in 0..choices.len().pow(2) {
                let requests = [
                    choices[pair % choices.len()].clone(),
                    choices[pair / choices.len()].clone(),
                ];
                let mut case = Case {
                    pages,
                    policy: policy.clone(),
                    gap: pair % 4,
                    requests: &requests,
                    disturbed: None,
                };
                for turn in 0..case.run() {
                    for what in [
                        Disturbance::Cancel(0),
                        Disturbance::Cancel(1),
                        Disturbance::Drop,
                        Disturbance::Fail(0),
                        Disturbance::Fail(1),
                    ] {
                        case.disturbed = Some((turn, what));
                        case.run();
                    }
                }
            }
        }
    }
}

impl Case<'_> {
    /// Runs to the end, and returns in how many turns.
    fn run(&self) -> usize {
        let limits = Limits {
            pages: self.pages,
            max_running: 3,
            max_queued: 3,
            max_queued_time: u64::MAX,
            step_tokens: 32,
            prefill_chunk: 16,
            max_sequence_tokens: 100,
        };
        let mut run = Run {
            scheduler: Scheduler::new(limits, self.policy.clone()),
            model: Model {
                cells: vec![None; self.pages as usize * PAGE_TOKENS],
                alphabet: ALPHABET,
            },
            clients: BTreeMap::new(),
            ids: Vec::new(),
        };
        let most: usize = self
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
            let disturbance = self.disturbed.filter(|(at, _)| *at == turn);
            run.turn(disturbance.map(|(_, what)| what));
            turn += 1;
            if run.clients.is_empty() && run.ids.len() == self.requests.len() {
                break;
            }
            assert!(turn < 3 * most + 20, "{self:?} does not end");
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

struct Run {
    scheduler: Scheduler,
    model: Model,
    clients: BTreeMap<SequenceId, Client>,
    ids: Vec<Option<SequenceId>>, // By request; those refused have none.
}

impl Run {
    fn submit(&mut self, request: Request) {
        let number = self.ids.len() as u64;
        let id = self.scheduler.submit(0, request.clone()).ok();
        if let Some(id) = id {
            self.clients
                .insert(id, Client::new(number, request, ALPHABET));
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
            let mut unused = Counts::default();
            let next = self
                .model
                .forward(&batch, &self.clients, &mut unused, || false);
            match disturbance {
                Some(Disturbance::Drop) => drop(step),
                Some(Disturbance::Fail(index)) => {
                    let failed = self.ids.get(index).copied().flatten();
                    let failed = failed.filter(|id| self.clients.contains_key(id));
                    step.fail(failed.as_slice());
                    if let Some(id) = failed {
                        self.end(id, FinishReason::Error);
                    }
                }
                _ => {
                    let mut sampled: Vec<Sampled> = Vec::new();
                    for (row, tokens) in next {
                        let client = self.clients.get_mut(&row.sequence).expect("it is alive");
                        let known = row.len() - (row.logits as usize).saturating_sub(1);
                        let drafts = &batch.tokens(&row)[known..];
                        sampled.extend(client.receive(&tokens, drafts, None));
                    }
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

    /// The request ends here, with what it has.
    fn end(&mut self, id: SequenceId, reason: FinishReason) {
        let client = self.clients.get_mut(&id).expect("it is alive");
        client.reason = reason;
        client.answer.truncate(client.output.len());
    }
}
