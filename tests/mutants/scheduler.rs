//! Mistakes in the scheduler, which its simulation must find.

use super::copies::{Copy, Mutant};

/// The number of simulated steps in which each mistake must be found.
const STEPS: &str = "120000";

/// The simulation's tests that must find the mistakes.
const TESTS: [&str; 6] = [
    "every_rule_holds_in_random_worlds",
    "every_owner_finds_its_share_in_random_ledgers",
    "the_clients_of_a_tenant_take_turns",
    "busy_tenants_are_served_by_weight",
    "newcomers_do_not_bypass_a_large_request_forever",
    "a_tenant_gets_its_guaranteed_pages_from_one_that_fills_the_memory",
];

const MANIFEST: &str = r#"
[package]
name = "sterna-scheduler"
version = "0.0.0"
edition = "2024"
# The simulation takes 13 s without optimization and 1 s with it.
[profile.dev]
opt-level = 1
debug = false
[dependencies]
slab = "0.4"
"#;

/// The name of a mutant that begins with a rule such as `S1` must break that rule.
const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "scored-prompt-from-the-cache",
        file: "sequence/mod.rs",
        original: "&self.tokens[..self.scored]",
        mistake: "&self.tokens[..last]",
    },
    Mutant {
        name: "scores-forgotten-by-a-preemption",
        file: "sequence/mod.rs",
        original: "self.scored = self.scored.max(scored);",
        mistake: "self.scored = scored;",
    },
    Mutant {
        name: "S17-clients-in-the-order-of-arrival",
        file: "queue/tenant_queue.rs",
        original: "(self.turn, self.arrival)",
        mistake: "(QueueTurn::default(), self.arrival)",
    },
    Mutant {
        name: "S17-cached-prefixes-before-turns",
        file: "queue/turns.rs",
        original: "self.start <= first.start.saturating_add(slack)",
        mistake: "self.start <= u64::MAX.max(slack)",
    },
    Mutant {
        name: "S17-lower-bands-in-turn",
        file: "queue/tenant_queue.rs",
        original: "self.turns.take(lowered, client, time)",
        mistake: "self.turns.take(lowered.filter(|_| false), client, time)",
    },
    Mutant {
        name: "published-before-computed",
        file: "sequence/kv.rs",
        original: "let computed = &self.tokens[..self.kv.computed];",
        mistake: "let computed = &self.tokens[..self.tokens.len() - 1];",
    },
    Mutant {
        name: "prefix-not-pinned",
        file: "sequence/kv.rs",
        original: "            pool.pin(page);",
        mistake: "",
    },
    Mutant {
        name: "copy-not-pinned",
        file: "sequence/kv.rs",
        original: "        pool.pin(from);",
        mistake: "",
    },
    Mutant {
        name: "snapshot-not-pinned",
        file: "sequence/states.rs",
        original: "            pool.slabs.pin(state.slab);\n            self.states.snapshot = \
                   Some(state.slab);",
        mistake: "            self.states.own = Some(state.slab);",
    },
    Mutant {
        name: "state-at-the-wrong-token",
        file: "sequence/states.rs",
        original: "let tokens = (position - 1) % PAGE_TOKENS + 1;",
        mistake: "let tokens = position % PAGE_TOKENS + 1;",
    },
    Mutant {
        name: "state-of-the-next-token",
        file: "pages/mod.rs",
        original: "(state.tokens <= shared)",
        mistake: "(state.tokens <= shared + 1)",
    },
    Mutant {
        name: "drafts-longer-than-the-journal",
        file: "limits.rs",
        original: "states.in_place_tokens as usize - 1)",
        mistake: "states.in_place_tokens as usize)",
    },
    Mutant {
        name: "parent-ignored-in-the-key",
        file: "pages/prefix.rs",
        original: "        let parent = self.parent.map_or(0, |page| page.index() as u64 + 1);",
        mistake: "        let parent = 0;",
    },
    Mutant {
        name: "rest-of-the-block-ignored-in-the-key",
        file: "pages/prefix.rs",
        original: "        let tokens = tokens.get(end..block_end)?;",
        mistake: "        let tokens = &tokens.get(end..block_end)?[..0];",
    },
    Mutant {
        name: "lost-block-cache-read",
        file: "sequence/block.rs",
        original: "        } else if self.is_cached {",
        mistake: "        } else if self.is_cached || !self.cached.is_empty() {",
    },
    Mutant {
        name: "whole-prompt-from-the-cache",
        file: "sequence/mod.rs",
        original: "&self.tokens[..last]",
        mistake: "&self.tokens[..last + 1]",
    },
    Mutant {
        name: "owner-ignored",
        file: "pages/prefix.rs",
        original: "            Owner::Tenant(tenant)
        };",
        mistake: "            Owner::Tenant(TenantId(0 * tenant.0))
        };",
    },
    Mutant {
        name: "failed-row-published",
        file: "step/commit.rs",
        original: "        sequence.draw(drafts, sampled);",
        mistake: "        sequence.commit_row(now, row.len(), &[], &[]);
        sequence.publish(&mut state.pool, &mut state.batch.tables);
        sequence.draw(&[], sampled);",
    },
    Mutant {
        name: "rejected-draft-kept",
        file: "sequence/mod.rs",
        original: "        self.kv.computed += row_tokens - drafts.len();",
        mistake: "        self.kv.computed += row_tokens;",
    },
    Mutant {
        name: "copied-tokens-forgotten",
        file: "sequence/kv.rs",
        original: "        self.kv.computed += copy.tokens;",
        mistake: "",
    },
    Mutant {
        name: "parents-evicted-first",
        file: "pages/mod.rs",
        original: "for &page in pages.iter().rev() {
            self.release(page);",
        mistake: "for &page in pages.iter() {
            self.release(page);",
    },
    Mutant {
        name: "charged-twice",
        file: "step/commit.rs",
        original: "        charged += cost;",
        mistake: "",
    },
    Mutant {
        name: "S1-calibration-instead-of-learned-time-in-chunks",
        file: "cost/predictor.rs",
        original: "self.model.predict(base.plus(chunk)) <= budget",
        mistake: "self.calibrated.predict(base.plus(chunk)) <= budget",
    },
    Mutant {
        name: "S1-floor-for-every-prompt",
        file: "step/prefills.rs",
        original: "chunk(sequence, plan, &state.conditions, is_first);",
        mistake: "chunk(sequence, plan, &state.conditions, true);",
    },
    Mutant {
        name: "S1-steps-teach-nothing",
        file: "cost/predictor.rs",
        original: "self.learner.observe(step, drafting, actual);",
        mistake: "",
    },
    Mutant {
        name: "S2-pause-without-end",
        file: "step/decodes.rs",
        original: "        && sequence.pacing.paused_steps < MAX_PAUSES
",
        mistake: "",
    },
    Mutant {
        name: "S5-slack-not-divided-by-weight",
        file: "queue/mod.rs",
        original: "tenant.planned_time() - least <= slack / tenant.weight()",
        mistake: "tenant.planned_time() - least <= slack",
    },
    Mutant {
        name: "S6-earlier-sequence-preempted",
        file: "step/preempt.rs",
        original: "Givers::OwnLater | Givers::Later => place + 1,",
        mistake: "Givers::OwnLater | Givers::Later => 0,",
    },
    Mutant {
        name: "S6-same-sequence-preempted-again",
        file: "step/preempt.rs",
        original: "            sequence.record.times_preempted >= MAX_PREEMPTIONS,",
        mistake: "            Reverse(sequence.record.times_preempted),",
    },
    Mutant {
        name: "S10-refusal-charged",
        file: "admission/submit.rs",
        original: "        check_possible(state, request)?;",
        mistake: "        let rates = state.queue.rates_mut(request.tenant);
        rates.reserve(state.conditions.now, true, None, [1, 1]);
        check_possible(state, request)?;",
    },
    Mutant {
        name: "S11-blocked-head-forgotten",
        file: "admission/admit.rs",
        original: "self.blocked_heads[band as usize].get_or_insert(id);",
        mistake: "let _ = id;",
    },
    Mutant {
        name: "S11-free-pages-taken-for-quota",
        file: "admission/admit.rs",
        original: "if prefix.needed > state.pool.remaining_cap(",
        mistake: "if prefix.needed > state.pool.available(",
    },
    Mutant {
        name: "S12-rates-ignored",
        file: "queue/rates.rs",
        original: "            Some(exhausted) => Err(exhausted),",
        mistake: "            Some(_) => Ok(()),",
    },
    Mutant {
        name: "S13-refused-before-fairness",
        file: "admission/room.rs",
        original: "            Ordering::Greater => true,",
        mistake: "            Ordering::Greater => false,",
    },
    Mutant {
        name: "S13-started-request-displaced",
        file: "queue/tenant_queue.rs",
        original: "        !self.has_run && self.arrival == self.first_choice",
        mistake: "        self.arrival == self.first_choice",
    },
    Mutant {
        name: "S14-output-not-reserved",
        file: "queue/rates.rs",
        original: "            meter.charge(now, reserved.prompt + reserved.output);",
        mistake: "            meter.charge(now, reserved.prompt);",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-the-victim",
        file: "step/preempt.rs",
        original: "            Givers::Later => is_own || pool.exceeds_guarantee(tenant),",
        mistake: "            Givers::Later => true,",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-admission",
        file: "admission/load.rs",
        original: "    needed + promised <= left
",
        mistake: "    needed + promised <= left && false
",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-the-taker",
        file: "step/preempt.rs",
        original: "        if pool.guaranteed_left(taker) > 0 {",
        mistake: "        if pool.guaranteed_left(taker) > usize::MAX - 1 {",
    },
    Mutant {
        name: "S16-sampling-not-charged",
        file: "step/commit.rs",
        original: "            cost += predictor.draw_time(sampling);",
        mistake: "            let _ = sampling;",
    },
    Mutant {
        name: "S16-sampling-not-planned",
        file: "sequence/mod.rs",
        original: "            sampling: self.draw_time,",
        mistake: "            sampling: 0,",
    },
    Mutant {
        name: "S12-cap-ignored",
        file: "pages/mod.rs",
        original: "        while self.held(tenant) >= self.cap(tenant) {",
        mistake: "        while false {",
    },
    Mutant {
        name: "M7-eviction-without-a-page",
        file: "pages/mod.rs",
        original: "        if self.available(tenant) == 0 {
            return None;",
        mistake: "        if self.available(tenant) == 0 {
            if let Some(page) = self.cold.coldest() {
                self.evict(Some(page));
            }
            return None;",
    },
    Mutant {
        name: "M9-pages-beyond-the-row",
        file: "step/plan.rs",
        original: "page_count: pages,",
        mistake: "page_count: table.len,",
    },
    Mutant {
        name: "L1-new-units-not-counted",
        file: "ledger.rs",
        original: "(self.used + count).saturating_sub(self.size)",
        mistake: "self.used.saturating_sub(self.size)",
    },
    Mutant {
        name: "L2-quota-exceeded",
        file: "ledger.rs",
        original: "if used > share.quota {",
        mistake: "if used - count > share.quota {",
    },
    Mutant {
        name: "L3-the-smallest-gives-way",
        file: "ledger.rs",
        original: "others.max_by(",
        mistake: "others.min_by(",
    },
    Mutant {
        name: "L3-weights-ignored",
        file: "ledger.rs",
        original: "a.last().compare(&b.last())",
        mistake: "a.used.cmp(&b.used)",
    },
    Mutant {
        name: "L4-units-do-not-come-back",
        file: "ledger.rs",
        original: "self.used - before.map_or(0, |account| account.used) + used;",
        mistake: "self.used.max(self.used - before.map_or(0, |account| account.used) + used);",
    },
    Mutant {
        name: "L5-owners-give-way-in-vain",
        file: "ledger.rs",
        original: "if above.sum::<usize>() < missing {",
        mistake: "if above.sum::<usize>() == 0 {",
    },
    Mutant {
        name: "L5-an-owner-keeps-one-too-many",
        file: "ledger.rs",
        original: "usize::try_from(most + 1)",
        mistake: "usize::try_from(most + 2)",
    },
];

const COPY: Copy = Copy {
    name: "scheduler",
    folders: &[
        ("scheduler/src", "src"),
        ("scheduler/tests/simulation", "tests/simulation"),
    ],
    root: None,
    manifest: MANIFEST,
    tests: &["--test", "simulation", "--"],
    filters: &TESTS,
    variables: &[("STERNA_SIM_STEPS", STEPS)],
};

#[test]
fn every_mutant_of_the_scheduler_has_its_place() {
    COPY.has_the_place_of_each(MUTANTS);
}

#[test]
fn the_simulation_catches_the_chosen_mutants() {
    let mutants = COPY.chosen(MUTANTS);
    if mutants.is_empty() {
        return;
    }
    COPY.passes_without_mistakes();
    for mutant in mutants {
        let report = COPY.report_of_failure(mutant);
        assert!(
            report.contains("to see this world again"),
            "{} fails outside a world: {report}",
            mutant.name
        );
        let rule = mutant.name.split('-').next();
        let is_named = rule
            .filter(|name| names_a_rule(name))
            .is_none_or(|name| report.contains(&format!("{name}: ")));
        assert!(is_named, "{} breaks another rule: {report}", mutant.name);
    }
}

/// Returns whether a name belongs to a rule, such as `M7`, `S1`, `L3` or `D2`.
fn names_a_rule(name: &str) -> bool {
    name.starts_with(|first: char| "MSLD".contains(first)) && name[1..].parse::<u32>().is_ok()
}
