//! The rules of a single step: its rows, its budget, and the decodes that are not in it.

use std::collections::{BTreeMap, BTreeSet};

use sterna_scheduler::{
    Batch, Budget, Limits, MAX_DRAFTED_TOKENS, Order, PAGE_TOKENS, PageCopy, Policy, Row,
    SequenceId, Step, TokenId,
};

use crate::model::Client;

/// A copy of the scheduler's constant.
pub(crate) const PREFILL_FLOOR: usize = 8;

/// A copy of the scheduler's constant.
const MAX_SCORED_TOKENS: usize = 64;

/// Returns the number of draft tokens in a row.
pub(crate) fn drafts_of(row: &Row, clients: &BTreeMap<SequenceId, Client>) -> usize {
    let client = &clients[&row.sequence];
    match client.rules {
        None => row.end().saturating_sub(client.known()),
        Some(_) => 0, // Tokens ahead are mask tokens, or were.
    }
}

/// A running decode.
pub(crate) struct Decode {
    pub(crate) id: SequenceId,
    /// Its tenant cannot exceed its guaranteed pages, and has no reason to pause.
    pub(crate) must_advance: bool,
}

/// S2: Every sequence that decoded before the plan is in the step, with these exceptions:
/// - It ended or was preempted.
/// - It needs a new page for its next token. S15: this is no exception for a tenant that cannot
///   exceed its guaranteed pages.
/// - It pauses. With fair-share order it pauses at most seven steps in a row. With another order it
///   pauses at most three steps in a row under a time budget, and never under a token budget.
///
/// With `Budget::PrefillFirst` prompts go first, so the rule does not apply. Returns the longest
/// pause of a decode, in steps.
pub(crate) fn check_decodes(
    before: &[Decode],
    batch: &Batch,
    policy: &Policy,
    clients: &mut BTreeMap<SequenceId, Client>,
) -> u32 {
    let limit = match (policy.order, policy.budget) {
        (_, Budget::PrefillFirst) => return 0,
        (Order::FairShare { .. }, _) => 7,
        (_, Budget::Time { .. }) => 3,
        (_, Budget::Tokens(_)) => 0,
    };
    let mut longest = 0;
    for Decode { id, must_advance } in before {
        let Some(client) = clients.get_mut(id) else {
            continue;
        };
        let is_planned = batch.rows().iter().any(|row| row.sequence == *id);
        match client.computed {
            Some(computed) if !is_planned => {
                assert!(!must_advance, "S15: {id:?} waits for a guaranteed page");
                client.paused_steps += u32::from(!computed.is_multiple_of(PAGE_TOKENS));
            }
            _ => client.paused_steps = 0,
        }
        let paused_steps = client.paused_steps;
        assert!(
            paused_steps <= limit,
            "S2: {id:?} paused for {paused_steps} steps; the limit is {limit}"
        );
        longest = longest.max(paused_steps);
    }
    longest
}

/// Asserts that a row holds the sequence's next known tokens and then its drafts, and M9. It has
/// logits from the last known token on. In a scored prompt, it has the logits of all tokens that
/// have given none, and reads no such token from the cache.
pub(crate) fn check_row(step: &Step<'_>, row: &Row, client: &Client) {
    let known: Vec<TokenId> = (0..client.known())
        .map(|position| client.token(position))
        .collect();
    assert_eq!(step.history(row.sequence), known);
    let prompt_len = client.request.prompt.len();
    assert_eq!(step.prompt_len(row.sequence), prompt_len);
    let tokens = step.batch().tokens(row);
    let start = row.start as usize;
    if client.rules.is_some() {
        return check_block_row(row, tokens, client);
    }
    let of_blocks = (row.block, row.behind_logits, row.tokens_behind);
    assert_eq!(of_blocks, (0, 0, 0), "{row:?} is causal");
    let end = row.end().min(known.len());
    let (len, drafts) = (end - start, row.end() - end);
    assert_eq!(tokens[..len], known[start..end]);
    let logits = if client.is_scoring() {
        assert!(
            start <= client.scored,
            "{row:?} skips tokens without logits"
        );
        end.saturating_sub(client.scored)
    } else {
        usize::from(end == known.len())
    };
    assert_eq!(row.logits as usize, logits + drafts, "{row:?}");
    assert_eq!(
        client.computed.unwrap_or(start),
        start,
        "{row:?} repeats or skips tokens"
    );
    let pages = step.batch().pages(row).len();
    assert_eq!(
        pages,
        row.end().div_ceil(PAGE_TOKENS),
        "M9: the pages of {row:?} end with it"
    );
    let left = client.request.max_new_tokens as usize - client.output.len();
    assert!(
        row.logits as usize - client.scores_of(row) <= left,
        "{row:?} drafts beyond max_new_tokens"
    );
}

/// Asserts that a row of a sequence that fills blocks is a pass over the whole block after those
/// that are computed, or known tokens of whole blocks. If keys and values are not causal, it is
/// whole blocks.
fn check_block_row(row: &Row, tokens: &[TokenId], client: &Client) {
    let (size, known, start) = (client.block(), client.known(), row.start as usize);
    let computed = match client.is_unmasking(start) {
        true => known / size * size,
        false => start,
    };
    assert_eq!(
        client.computed.unwrap_or(computed),
        computed,
        "{row:?} repeats or skips tokens"
    );
    let is_causal = client.rules.is_some_and(|rules| rules.is_causal);
    if client.is_unmasking(start) {
        let (begin, pass) = (computed, client.next_pass());
        assert_eq!(tokens, pass.tokens, "{row:?} is the block or a part");
        assert_eq!(
            start..row.end(),
            begin + pass.row.start..begin + pass.row.end
        );
        assert_eq!(row.logits as usize, pass.unknown.len(), "{row:?}");
        if row.logits > 0 {
            let wanted = begin + pass.unknown.start - 1..begin + pass.unknown.end - 1;
            assert_eq!(row.logits_range(), wanted, "{row:?} has other logits");
        }
        assert_eq!(row.block as usize, size);
        assert_eq!(row.end() + row.tokens_behind as usize, begin + size);
        return;
    }
    let expected: Vec<TokenId> = (start..row.end()).map(|at| client.token(at)).collect();
    assert_eq!(tokens, expected);
    assert!(
        row.end() <= known / size * size,
        "{row:?} computes a part of a block"
    );
    let logits = usize::from(row.end() == known);
    assert_eq!(
        (row.logits as usize, row.behind_logits),
        (logits, 0),
        "{row:?}"
    );
    assert_eq!(row.tokens_behind, 0, "{row:?}");
    let block = if is_causal { 0 } else { size };
    assert_eq!(row.block as usize, block, "{row:?}");
    assert!(is_causal || start.is_multiple_of(size) && row.end().is_multiple_of(size));
}

/// Asserts that a batch keeps its limits (S1, S12) and writes no page that another row reads (M3).
pub(crate) fn check_batch(
    batch: &Batch,
    limits: &Limits,
    policy: &Policy,
    clients: &BTreeMap<SequenceId, Client>,
) {
    let rows = batch.rows();
    assert!(
        !rows.is_empty() && rows.len() <= limits.max_running as usize,
        "S12: the batch has {} rows",
        rows.len()
    );
    check_token_counts(batch, limits, policy, clients);
    check_copies(batch);
    for row in rows {
        let longest = clients[&row.sequence]
            .block()
            .max(limits.prefill_chunk as usize);
        assert!(row.len() - drafts_of(row, clients) <= longest);
        let written = &batch.pages(row)[row.start as usize / PAGE_TOKENS..];
        assert!(
            !batch
                .copies()
                .iter()
                .any(|copy| written.contains(&copy.from)),
            "M3: {row:?} writes a page that is copied"
        );
        for other in rows.iter().filter(|other| *other != row) {
            assert_ne!(other.sequence, row.sequence, "a sequence has one row");
            let shared = batch
                .pages(other)
                .iter()
                .find(|page| written.contains(page));
            assert_eq!(
                shared, None,
                "M3: {row:?} writes a page that {other:?} reads"
            );
        }
    }
}

/// S1: The known tokens of a step are within `step_tokens` and the policy's token budget, or they
/// are the decodes and at most `PREFILL_FLOOR` prompt tokens.
fn check_token_counts(
    batch: &Batch,
    limits: &Limits,
    policy: &Policy,
    clients: &BTreeMap<SequenceId, Client>,
) {
    let rows = batch.rows();
    let drafts_of = |row: &Row| drafts_of(row, clients);
    let drafted: usize = rows.iter().map(drafts_of).sum();
    let decodes = rows
        .iter()
        .filter(|row| row.len() - drafts_of(row) == 1)
        .count();
    let budget = match policy.budget {
        Budget::Tokens(tokens) => tokens.min(limits.step_tokens),
        Budget::Time { .. } | Budget::PrefillFirst => limits.step_tokens,
    };
    let block = limits.diffusion.map_or(0, |rules| rules.block as usize);
    let limit = (budget as usize).max(decodes + PREFILL_FLOOR.max(block));
    let known = batch.token_count() - drafted;
    assert!(
        known <= limit,
        "S1: the step has {known} known tokens; the limit is {limit}"
    );
    assert!(
        batch.token_count() <= limits.max_batch_tokens(),
        "S1: the step exceeds max_batch_tokens"
    );
    assert!(drafted <= MAX_DRAFTED_TOKENS);
    for row in rows {
        let (drafts, own) = (drafts_of(row), row.own_drafts);
        let block = policy.own_drafts.map_or(0, |own| own.block);
        let is_within = match own {
            0 => drafts <= policy.max_draft as usize,
            _ => drafts == own as usize && own <= block,
        };
        assert!(is_within, "{row:?} has {drafts} drafts");
    }
    let logits: usize = rows.iter().map(|row| row.logits as usize).sum();
    assert_eq!(batch.logits_count(), logits);
    assert!(logits <= limits.max_logits());
    // Each sequence may have one row of logits beside its drafts.
    let further = |row: &Row| (row.logits as usize - drafts_of(row)).saturating_sub(1);
    let scores: usize = rows.iter().map(further).sum();
    assert!(
        scores <= MAX_SCORED_TOKENS,
        "the step scores {scores} tokens"
    );
}

/// Asserts that each copy goes to the first page that some row writes, and no two to the same page.
fn check_copies(batch: &Batch) {
    let mut targets = BTreeSet::new();
    for copy in batch.copies() {
        assert!(
            targets.insert(copy.to),
            "M3: {copy:?} overwrites another copy"
        );
    }
    let is_for_a_row = |copy: &PageCopy| {
        batch
            .rows()
            .iter()
            .any(|row| batch.pages(row).get(row.start as usize / PAGE_TOKENS) == Some(&copy.to))
    };
    assert!(
        batch.copies().iter().all(is_for_a_row),
        "a copy goes to the first page that a row writes"
    );
}
