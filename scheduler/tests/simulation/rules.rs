//! What must hold of a batch, of who is in it, and of what each tenant has.

use std::collections::{BTreeMap, BTreeSet};

use sterna_scheduler::{
    Batch, Budget, Limits, MAX_DRAFTED_TOKENS, Order, PAGE_TOKENS, PageCopy, Policy, Row,
    SequenceId, Step, TokenId,
};

use crate::model::Client;

/// As the scheduler's.
pub(crate) const PREFILL_FLOOR: usize = 8;

/// Tokens of a row that are guesses.
pub(crate) fn drafts_of(row: &Row) -> usize {
    (row.logits as usize).saturating_sub(1)
}

/// Who decodes now.
pub(crate) fn decodes(clients: &BTreeMap<SequenceId, Client>) -> Vec<SequenceId> {
    let decoding = clients.iter().filter(|(_, client)| client.decodes());
    decoding.map(|(&id, _)| id).collect()
}

/// S2: whoever decoded before the plan is in its step, unless it was preempted, or it needs a page and nobody who comes
/// after it can give one, or it rests. For a guest anybody rests for up to seven steps in a row; in the batch band one
/// rests for up to three while there is no time.
pub(crate) fn check_decodes(
    before: &[SequenceId],
    batch: &Batch,
    policy: &Policy,
    clients: &mut BTreeMap<SequenceId, Client>,
) -> u32 {
    let most = match (policy.order, policy.budget) {
        (_, Budget::PrefillFirst) => return 0,
        (Order::FairShare { .. }, _) => 7,
        (_, Budget::Time { .. }) => 3,
        (_, Budget::Tokens(_)) => 0,
    };
    let mut longest = 0;
    for id in before {
        let Some(client) = clients.get_mut(id) else {
            continue;
        };
        let is_planned = batch.rows().iter().any(|row| row.sequence == *id);
        match client.computed {
            Some(computed) if !is_planned => {
                client.missed += u32::from(!computed.is_multiple_of(PAGE_TOKENS));
            }
            _ => client.missed = 0,
        }
        let missed = client.missed;
        assert!(missed <= most, "S2: {id:?} was left out of {missed} steps");
        longest = longest.max(missed);
    }
    longest
}

/// A row holds the truth, then drafts, and wants logits from its last known token on.
pub(crate) fn check_row(step: &Step<'_>, row: &Row, client: &Client) {
    let truth: Vec<TokenId> = (0..client.known()).map(|at| client.token(at)).collect();
    assert_eq!(step.history(row.sequence), truth);
    let prompt_len = client.request.prompt.len();
    assert_eq!(step.prompt_len(row.sequence), prompt_len);
    let tokens = step.batch().tokens(row);
    let known = row.len() - drafts_of(row);
    let end = row.start as usize + known;
    assert_eq!(tokens[..known], truth[row.start as usize..end]);
    assert_eq!(row.logits > 0, end == truth.len());
    let start = row.start as usize;
    assert_eq!(
        client.computed.unwrap_or(start),
        start,
        "{row:?} repeats or skips"
    );
    let pages = step.batch().pages(row).len();
    assert_eq!(pages, row.end().div_ceil(PAGE_TOKENS), "M9: of {row:?}");
    let left = client.request.max_new_tokens as usize - client.output.len();
    assert!((row.logits as usize) <= left, "{row:?} drafts too much");
}

/// A batch keeps to its budget, and writes no page that another row can see.
pub(crate) fn check_batch(batch: &Batch, limits: &Limits, policy: &Policy) {
    let rows = batch.rows();
    assert!(
        !rows.is_empty() && rows.len() <= limits.max_running as usize,
        "S12"
    );
    let drafted: usize = rows.iter().map(drafts_of).sum();
    let decodes = rows
        .iter()
        .filter(|row| row.len() - drafts_of(row) == 1)
        .count();
    let tokens = match policy.budget {
        Budget::Tokens(tokens) => tokens.min(limits.step_tokens),
        Budget::Time { .. } | Budget::PrefillFirst => limits.step_tokens,
    };
    let most = (tokens as usize).max(decodes + PREFILL_FLOOR);
    let known = batch.token_count() - drafted;
    assert!(known <= most, "S1: {known} tokens, {most} at most");
    assert!(
        batch.token_count() <= limits.max_batch_tokens(),
        "S1: of tokens"
    );
    let longest = rows.iter().map(drafts_of).max().unwrap_or(0);
    assert!(drafted <= MAX_DRAFTED_TOKENS && longest <= policy.max_draft as usize);
    let wanted: usize = rows.iter().map(|row| row.logits as usize).sum();
    assert_eq!(batch.logits_count(), wanted);
    let mut targets = BTreeSet::new();
    for copy in batch.copies() {
        assert!(
            targets.insert(copy.to),
            "M3: {copy:?} overwrites another copy"
        );
    }
    for row in rows {
        assert!(row.len() - drafts_of(row) <= limits.prefill_chunk as usize);
        let written = &batch.pages(row)[row.start as usize / PAGE_TOKENS..];
        let copies = batch.copies().iter();
        assert!(
            !copies.clone().any(|copy| written.contains(&copy.from)),
            "{row:?}"
        );
        for other in rows.iter().filter(|other| *other != row) {
            assert_ne!(other.sequence, row.sequence, "a sequence has one row");
            let seen = batch
                .pages(other)
                .iter()
                .find(|page| written.contains(page));
            assert_eq!(seen, None, "M3: {row:?} writes what {other:?} sees");
        }
    }
    let written = |copy: &PageCopy| {
        let mut rows = rows.iter();
        rows.any(|row| batch.pages(row).get(row.start as usize / PAGE_TOKENS) == Some(&copy.to))
    };
    assert!(
        batch.copies().iter().all(written),
        "a copy is for the first page of a row"
    );
}
