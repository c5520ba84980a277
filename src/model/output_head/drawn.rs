//! The logits that decide a draw, from limits of all of them: which token has the largest score,
//! and whether the filters keep it.
//!
//! A score never falls if the logit rises, so a row whose limit has a smaller score than a known
//! row does not win. Of the winner's place in the order of falling logits, the filters need the
//! rows before it: those whose limit is not below its logit. Top-p also needs the weight of all
//! tokens. It is at least that of the known rows, which decides most draws: if the winner is in the
//! nucleus of these, it is in that of all. Otherwise, the draw needs all logits.

use sterna_kernels::{DrawScores, Kernels, PANEL_ROWS, Rank};

use super::known::{EXACT_ROWS, RowLogits, RowSearch, max_candidates};
use super::top::TopSearch;
use crate::model::wanted::WantedDraw;

/// The rows of the greatest limits that are computed first: most rows of lower logits are settled
/// by them.
const FIRST_ROWS: usize = EXACT_ROWS + 8;
/// The candidates that are computed first.
const FIRST_CANDIDATES: usize = 32;
/// More than the relative error of a weight, and of a sum of weights.
const ROUNDING: f32 = 1e-4;

/// The rows that may have the largest score, with the scores of their limits.
pub(super) type Candidates = Vec<(f32, u32)>;

/// Returns the memory for the candidates of a head of `rows` rows.
pub(super) fn candidates(rows: usize) -> Candidates {
    Vec::with_capacity(max_candidates(rows) + PANEL_ROWS)
}

/// Finds the logits that decide a draw: settles their rows. Returns `None` if that takes too many.
pub(super) fn find_drawn<C: FnMut(&[u32], &mut Vec<RowLogits>)>(
    search: &mut RowSearch<'_, C>,
    draw: &WantedDraw,
    kernels: Kernels,
    (top, candidates): (&mut TopSearch, &mut Candidates),
) -> Option<()> {
    search.know_greatest(FIRST_ROWS, top)?;
    let lower = search.lower(0).map(|(_, logit)| logit);
    let bound = lower.fold(f32::NEG_INFINITY, f32::max);
    search.settle_from(bound)?;
    let logits = search.changed().map(|(_, logit)| logit);
    let largest = logits.fold(f32::NEG_INFINITY, f32::max);
    if !largest.is_finite() {
        return None; // No known row is allowed, or a logit is infinite.
    }
    let rule = Rule {
        scores: draw.scores(largest),
        least_weight: draw.min_p.min(1.0),
    };
    let mut winner = find_winner(search, rule, kernels, candidates)?;
    if draw.top_k == 0 && draw.top_p >= 1.0 {
        return Some(());
    }
    search.settle_from(winner.logit)?;
    loop {
        let before = search.changed().filter(|row| winner.is_after(row.1, row.0));
        if draw.top_k == 0 || before.clone().count() < draw.top_k as usize {
            let is_kept = draw.top_p >= 1.0 || is_in_nucleus(search, before, rule, draw.top_p);
            return is_kept.then_some(());
        }
        winner = rule.best(before); // The largest logit always has a place.
    }
}

/// Which rows of a token can be drawn, and which one is.
#[derive(Clone, Copy)]
struct Rule {
    scores: DrawScores,
    /// That of min-p.
    least_weight: f32,
}

impl Rule {
    /// Returns the score of a row, or −∞ if min-p does not keep the row. With a slack above 0, it
    /// keeps rows that are a little less likely, and with one below 0 it drops some that are a
    /// little more likely.
    fn score(self, (row, logit): (u32, f32), slack: f32) -> f32 {
        match self.scores.scale.weight(logit) >= self.least_weight * (1.0 - slack) {
            true => self.scores.of(logit, row),
            false => f32::NEG_INFINITY,
        }
    }

    /// Returns the row with the best score, the first of equal ones.
    fn best(self, rows: impl Iterator<Item = (u32, f32)>) -> Rank {
        let mut best = (f32::NEG_INFINITY, Rank::END);
        for (token, logit) in rows {
            let score = self.score((token, logit), 0.0);
            if score > best.0 || score == best.0 && token < best.1.token {
                best = (score, Rank { logit, token });
            }
        }
        best.1
    }
}

/// Returns whether a row is surely among the first ones that together have the share `top_p` of the
/// weight of all rows. `before` are the rows before it.
fn is_in_nucleus<C: FnMut(&[u32], &mut Vec<RowLogits>)>(
    search: &RowSearch<'_, C>,
    before: impl Iterator<Item = (u32, f32)>,
    rule: Rule,
    top_p: f32,
) -> bool {
    let weight = |(_, logit): (u32, f32)| f64::from(rule.scores.scale.weight(logit));
    let before: f64 = before.map(weight).sum();
    let known: f64 = search.changed().map(weight).sum();
    // The nucleus has at least one row.
    before == 0.0 || before * f64::from(1.0 + ROUNDING) < f64::from(top_p) * known
}

/// Returns the row with the largest score of those that min-p keeps.
fn find_winner<C: FnMut(&[u32], &mut Vec<RowLogits>)>(
    search: &mut RowSearch<'_, C>,
    rule: Rule,
    kernels: Kernels,
    candidates: &mut Candidates,
) -> Option<Rank> {
    let settled = search.changed().map(|row| rule.score(row, 0.0));
    let mut floor = settled.fold(f32::NEG_INFINITY, f32::max);
    find_candidates(search, rule, floor, kernels, candidates)?;
    // The first ones usually rule out most of the rest.
    let (first, rest) = candidates.split_at(candidates.len().min(FIRST_CANDIDATES));
    for candidates in [first, rest] {
        let above = candidates.iter().take_while(|(score, _)| *score >= floor);
        let known = search.count();
        search.know(above.map(|(_, row)| *row))?;
        let lower = search.lower(known).map(|row| rule.score(row, -ROUNDING));
        floor = lower.fold(floor, f32::max);
    }
    search.settle(|row, upper| rule.score((row, upper), ROUNDING) >= floor)?;
    Some(rule.best(search.changed()))
}

/// Collects the unknown rows whose limits have at least the score `floor`, the largest score first.
/// Returns `None` if there are too many.
fn find_candidates<C: FnMut(&[u32], &mut Vec<RowLogits>)>(
    search: &RowSearch<'_, C>,
    rule: Rule,
    floor: f32,
    kernels: Kernels,
    candidates: &mut Candidates,
) -> Option<()> {
    candidates.clear();
    for (panel, maximum) in search.limits.maxima().enumerate() {
        let (first, limits) = ((panel * PANEL_ROWS) as u32, search.limits.panel(panel));
        let below = floor.next_down();
        let (scores, peak) = (rule.scores.starting_at(first), [maximum]);
        let (best, _) = kernels.best_score(limits, scores, Rank::END, &peak, below);
        if best < floor {
            continue;
        }
        let reaching = rule.scores.reaching(limits, first, maximum, floor);
        candidates.extend(reaching.filter(|(_, row)| {
            let limit = limits[(row - first) as usize];
            !search.is_known(*row) && rule.score((*row, limit), ROUNDING) >= floor
        }));
        if candidates.len() > max_candidates(search.limits.rows) {
            return None;
        }
    }
    candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    Some(())
}
