//! Tokens that a grammar forces: they are drafts, and the only ones.

use sterna_scheduler::{CostModel, Plan, Policy, Sampled, Scheduler, SequenceId, TokenId};

use super::table::{LIMITS, request};

/// Plans a step and returns the tokens of its only row. Commits these samples.
fn step(scheduler: &mut Scheduler, now: u64, sampled: &[TokenId]) -> Vec<TokenId> {
    let Plan::Step(step) = scheduler.plan(now) else {
        panic!("a request runs");
    };
    let row = step.batch().rows()[0];
    let tokens = step.batch().tokens(&row).to_vec();
    let mut sampled: Vec<Sampled> = sampled.iter().map(|token| Sampled::Token(*token)).collect();
    sampled.resize(row.logits as usize, Sampled::Void);
    step.commit(now, &sampled);
    scheduler.check();
    scheduler.events().for_each(drop);
    tokens
}

fn start(prompt: &[TokenId]) -> (Scheduler, SequenceId) {
    let policy = Policy {
        max_draft: 4,
        ..Policy::default()
    };
    let mut scheduler = Scheduler::new(LIMITS, policy);
    scheduler.calibrate(CostModel::UNMEASURED);
    let id = scheduler.submit(0, request(prompt, 20, 0));
    let id = id.expect("the request is accepted");
    (scheduler, id)
}

#[test]
fn forced_tokens_are_computed_in_one_step() {
    let (mut scheduler, id) = start(&[1, 2, 3]);
    assert_eq!(step(&mut scheduler, 1, &[50]), [1, 2, 3]);
    scheduler.force(id, [60, 61].into_iter());
    assert_eq!(step(&mut scheduler, 2, &[60, 61, 62]), [50, 60, 61]);
    assert_eq!(
        step(&mut scheduler, 3, &[63]),
        [62],
        "they count for one step"
    );
    scheduler.force(id, [70, 71, 72, 73, 74, 75].into_iter());
    let row = step(&mut scheduler, 4, &[70, 71, 72, 73, 74]);
    assert_eq!(row, [63, 70, 71, 72, 73], "at most as many as other drafts");
}

#[test]
fn a_sequence_with_a_grammar_has_no_other_drafts() {
    let repeated = [1, 2, 3, 1, 2, 3, 1];
    let (mut scheduler, _) = start(&repeated);
    step(&mut scheduler, 1, &[2]);
    assert_eq!(
        step(&mut scheduler, 2, &[9]),
        [2, 3, 1, 2, 3],
        "its past proposes"
    );
    let (mut scheduler, id) = start(&repeated);
    scheduler.force(id, [].into_iter());
    step(&mut scheduler, 1, &[2]);
    assert_eq!(step(&mut scheduler, 2, &[9]), [2]);
    scheduler.force(SequenceId::new(900, 0), [1].into_iter()); // It has ended.
}
