//! The form of a situation: the actions, the rows of the next step, and the events.
//!
//! A row is written `name start..end`, with `*` if it has logits, and their number if it has
//! several. Rows and events are in order. The fake model answers every row with the token
//! [`ANSWER`].

use std::collections::BTreeMap;
use std::ops::Range;

use sterna_scheduler::{
    Budget, Event, FinishReason, Growth, Limits, Order, Plan, Policy, Request, Sampled, Scheduler,
    SequenceId, TenantId, TenantPolicy, TokenId,
};

pub(crate) const ANSWER: TokenId = 7;

/// Limits under which nothing is scarce.
pub(crate) const LIMITS: Limits = Limits {
    pages: 100,
    max_running: 8,
    max_queued: 8,
    max_queued_time: u64::MAX,
    step_tokens: 64,
    prefill_chunk: 32,
    max_sequence_tokens: 1000,
    states: None,
    diffusion: None,
};

/// Returns the simplest policy: first come, first served, with a token budget.
pub(crate) fn first_come(limits: &Limits) -> Policy {
    Policy {
        order: Order::FirstCome,
        budget: Budget::Tokens(limits.step_tokens),
        growth: Growth::Expected,
        max_draft: 0,
        own_drafts: None,
    }
}

/// An action before a step is planned.
pub(crate) enum Action {
    /// Submits a request with this name, prompt and `max_new_tokens`.
    Submit(&'static str, Vec<TokenId>, u32),
    /// Submits a request whose prompt is scored.
    Score(&'static str, Vec<TokenId>, u32),
    /// Submits a request of another tenant.
    SubmitOther(&'static str, Vec<TokenId>, u32),
    Cancel(&'static str),
    Reset,
    /// Runs requests with short outputs, so that the scheduler reserves little memory for outputs.
    LearnShortOutputs,
    /// Runs a number of steps without checking them.
    Run(u32),
    /// Drops the next step.
    DropNext,
    /// Fails the next step. The rerun of its rows fails for these requests.
    FailNext(&'static [&'static str]),
    /// Fails the row of this request in the next step.
    FailRow(&'static str),
    /// Defers the draw of this request in the next step.
    DeferRow(&'static str),
}
use Action::*;

/// The actions, the rows of the next step (empty if the plan is idle), and the events up to its
/// end.
pub(crate) type Turn = (Vec<Action>, &'static str, &'static str);

#[derive(Default)]
pub(crate) struct Names {
    pub(crate) ids: BTreeMap<&'static str, SequenceId>,
}

impl Names {
    pub(crate) fn of(&self, id: SequenceId) -> &'static str {
        let mut names = self.ids.iter();
        names
            .find(|(_, named)| **named == id)
            .expect("the sequence has a name")
            .0
    }

    pub(crate) fn event(&self, event: Event) -> String {
        match event {
            Event::Admitted { id, cached_tokens } => format!("+{} {cached_tokens}", self.of(id)),
            Event::Preempted { id } => format!("<{}", self.of(id)),
            Event::Displaced { id, .. } => format!("!{}", self.of(id)),
            Event::Finished {
                id,
                reason,
                output_tokens,
                ..
            } => format!("-{} {reason:?} {output_tokens}", self.of(id)),
        }
    }
}

pub(crate) fn check(limits: Limits, turns: &[Turn]) -> Scheduler {
    let mut scheduler = Scheduler::new(limits.clone(), first_come(&limits));
    let other = (TenantId(1), TenantPolicy::default());
    assert_eq!(scheduler.set_tenants(&[other]), Ok(()));
    let mut names = Names::default();
    for (number, (actions, rows, events)) in turns.iter().enumerate() {
        let mut next = None;
        for action in actions {
            match action {
                Submit(name, prompt, max_new_tokens) => {
                    let request = Request {
                        is_diffused: limits.diffusion.is_some(),
                        ..request(prompt, *max_new_tokens, 0)
                    };
                    let id = scheduler.submit(0, request);
                    names.ids.insert(name, id.expect("the request is accepted"));
                }
                Score(name, prompt, max_new_tokens) => {
                    let request = Request {
                        scores_prompt: true,
                        ..request(prompt, *max_new_tokens, 0)
                    };
                    let id = scheduler.submit(0, request);
                    names.ids.insert(name, id.expect("the request is accepted"));
                }
                SubmitOther(name, prompt, max_new_tokens) => {
                    let id = scheduler.submit(0, request(prompt, *max_new_tokens, 1));
                    names.ids.insert(name, id.expect("the request is accepted"));
                }
                Cancel(name) => {
                    assert!(scheduler.cancel(names.ids[name], FinishReason::Cancelled));
                }
                Reset => drop(scheduler.reset_prefix_cache()),
                LearnShortOutputs => learn_short_outputs(&mut scheduler),
                Run(steps) => {
                    for _ in 0..*steps {
                        step(&mut scheduler, &names, None);
                    }
                }
                DropNext | FailNext(_) | FailRow(_) | DeferRow(_) => next = Some(action),
            }
        }
        assert_eq!(step(&mut scheduler, &names, next), *rows, "turn {number}");
        scheduler.check();
        let seen: Vec<_> = scheduler.events().map(|e| names.event(e)).collect();
        assert_eq!(seen.join(", "), *events, "turn {number}");
    }
    scheduler
}

pub(crate) fn learn_short_outputs(scheduler: &mut Scheduler) {
    for _ in 0..60 {
        let id = scheduler.submit(0, request(&[1], 1, 0));
        assert!(id.is_ok() && scheduler.events().count() == 0);
        let Plan::Step(step) = scheduler.plan(0) else {
            panic!("the plan is idle although a request is waiting");
        };
        step.commit(0, &[Sampled::Token(ANSWER)]);
        assert_eq!(scheduler.events().count(), 2, "admitted and finished");
    }
    scheduler.reset_prefix_cache();
}

/// Plans a step, and commits, drops or fails it. Returns its rows.
pub(crate) fn step(scheduler: &mut Scheduler, names: &Names, next: Option<&Action>) -> String {
    let Plan::Step(step) = scheduler.plan(0) else {
        return String::new();
    };
    let batch = step.batch();
    let rows = batch.rows().iter().map(|row| {
        let mark = match row.logits {
            0 => String::new(),
            1 => "*".to_owned(),
            several => format!("*{several}"),
        };
        format!(
            "{} {}..{}{mark}",
            names.of(row.sequence),
            row.start,
            row.end()
        )
    });
    let rows: Vec<_> = rows.collect();
    let with_logits = batch.rows().iter().filter(|row| row.logits > 0);
    let sampled: Vec<_> = with_logits
        .flat_map(|row| {
            let mut sampled = vec![Sampled::Void; row.logits as usize];
            if row.end() == step.history(row.sequence).len() {
                sampled[row.logits as usize - 1] = Sampled::Token(ANSWER);
            }
            match next {
                Some(FailRow(name)) if names.ids[name] == row.sequence => {
                    sampled.fill(Sampled::Void);
                    sampled[0] = Sampled::Failed;
                }
                Some(DeferRow(name)) if names.ids[name] == row.sequence => {
                    sampled[row.logits as usize - 1] = Sampled::Deferred;
                }
                _ => {}
            }
            sampled
        })
        .collect();
    match next {
        Some(DropNext) => drop(step),
        Some(FailNext(failed)) => {
            let ids: Vec<_> = failed.iter().map(|name| names.ids[name]).collect();
            step.commit_rerun(0, &sampled, &ids);
        }
        _ => step.commit(0, &sampled),
    }
    rows.join(", ")
}

pub(crate) fn request(prompt: &[TokenId], max_new_tokens: u32, tenant: u32) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_new_tokens,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(tenant),
        ..Request::default()
    }
}

/// Returns a prompt of these tokens.
pub(crate) fn text(tokens: Range<TokenId>) -> Vec<TokenId> {
    tokens.collect()
}
