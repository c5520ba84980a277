//! One request between `submit` and its end.
//!
//! Invariant: the first `computed` of a sequence's tokens are in its pages. At least one more token
//! is known, and the next step computes it. With several more tokens the sequence is a prefill,
//! with one it is a decode; nothing else distinguishes them. A sequence that fills blocks is always
//! a prefill: see [`block`].
//!
//! Invariant: a queued sequence holds no page.

mod acceptance;
mod block;
mod deadlines;
mod invariants;
mod kv;
mod output_rules;
mod sequences;
mod states;

pub(crate) use acceptance::Acceptances;
pub(crate) use block::BlockRow;
use block::MaskedBlock;
pub(crate) use deadlines::DeadlineQueue;
pub use output_rules::OutputRules;
pub(crate) use sequences::Sequences;
use states::SequenceStates;

use crate::pages::{PagePool, PageTable, common_prefix};
use crate::queue::{QueueTurn, RateReservation, Waiting};
use crate::{
    Band, Diffusion, FinishReason, Micros, Nanos, PAGE_TOKENS, Page, PublicPrefix, Request,
    Sampled, SequenceId, StepShape, SubTenant, TenantId, TenantPolicy, TokenId,
};

/// A request, its tokens, and how far they are computed. Only the files of this folder change it.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) arrival: u64, // The number of sequences that came before.
    pub(crate) tenant: TenantId,
    pub(crate) prompt_len: usize,
    pub(crate) output_rules: OutputRules,
    pub(crate) draw_time: Nanos,     // Beyond a plain draw, as measured.
    tokens: Vec<TokenId>,            // The prompt, then the output.
    scored: usize,                   // The prompt tokens that have given logits, or need not.
    forced: Option<Vec<TokenId>>,    // What a grammar forces next; `None` without a grammar.
    block: Option<Box<MaskedBlock>>, // If its output comes by block diffusion.
    pub(crate) is_running: bool,
    pub(crate) band: Band, // As of the admission, so that the running order is stable.
    kv: KvState,
    states: SequenceStates,
    pub(crate) record: AdmissionRecord,
    pub(crate) pacing: Pacing,
}

/// Which tokens of a sequence are in KV memory, and where.
#[derive(Debug, Default)]
struct KvState {
    public: Vec<PublicPrefix>, // The prefixes that the tenant could use at `submit`.
    public_tokens: usize,      // Prompt tokens that a public prefix covers; whole pages.
    computed: usize,
    table: PageTable,
    copy: Option<PendingCopy>,
}

/// A cached page that begins with the tokens after the computed ones. It is pinned until the step
/// that copies it commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingCopy {
    from: Page,
    tokens: usize, // Tokens to reuse; less than a page.
}

/// What the queue and the rate limits know of a sequence.
#[derive(Debug, Default)]
pub(crate) struct AdmissionRecord {
    pub(crate) first_choice: u64, // The arrival of its request's first choice.
    pub(crate) client: Option<SubTenant>,
    pub(crate) turn: QueueTurn, // Among the requests of its tenant.
    pub(crate) estimate: Nanos, // Predicted machine time of the whole sequence.
    pub(crate) reserved: RateReservation,
    /// Prompt tokens found in the tree at the first admission; `None` before it.
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) times_bypassed: u32,
    pub(crate) times_preempted: u32,
}

/// How regularly a running sequence advances.
#[derive(Debug, Default)]
pub(crate) struct Pacing {
    pub(crate) last_token_at: Micros, // The admission, before the first token.
    pub(crate) prefill_waited: Micros, // Since a step last computed a part of the prompt.
    pub(crate) paused_steps: u32,     // Consecutive steps that omitted it.
    acceptances: Option<Acceptances>, // `None`: what is usual.
}

/// What a committed row adds to its sequence.
#[derive(Default)]
pub(crate) struct DrawnTokens {
    pub(crate) tokens: usize,
    pub(crate) accepted: usize, // Draft tokens.
    is_deferred: bool,
    pub(crate) ending: Option<FinishReason>,
}

/// Returns how many pages `tokens` tokens occupy.
pub(crate) fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl Sequence {
    pub(crate) fn new(
        id: SequenceId,
        arrival: u64,
        request: Request,
        public: Vec<PublicPrefix>,
        (pool, diffusion): (&PagePool, Option<Diffusion>),
        record: AdmissionRecord,
    ) -> Sequence {
        let diffusion = diffusion.filter(|_| request.is_diffused);
        let prompt_len = request.prompt.len();
        // A block at the end of a public prefix may hold a tenant's own tokens.
        let is_causal = diffusion.is_none_or(|rules| rules.is_causal);
        let public: Vec<PublicPrefix> = public.into_iter().filter(|_| is_causal).collect();
        let public_pages = pool.tree().public.shared_pages(&public, &request.prompt);
        Sequence {
            id,
            arrival,
            tenant: request.tenant,
            prompt_len,
            output_rules: OutputRules {
                min_new_tokens: request.min_new_tokens as usize,
                max_new_tokens: request.max_new_tokens as usize,
                stop_tokens: request.stop_tokens,
            },
            draw_time: request.draw_time,
            scored: if request.scores_prompt {
                0
            } else {
                request.prompt.len()
            },
            tokens: request.prompt,
            forced: None,
            block: diffusion.map(|rules| Box::new(MaskedBlock::new(rules, prompt_len))),
            is_running: false,
            band: Band::default(),
            kv: KvState {
                public,
                public_tokens: public_pages * PAGE_TOKENS,
                ..KvState::default()
            },
            states: SequenceStates::default(),
            record,
            pacing: Pacing::default(),
        }
    }

    /// Returns all known tokens: the prompt, then the output.
    pub(crate) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Takes the tokens that a grammar forces next as drafts.
    pub(crate) fn force(&mut self, tokens: impl Iterator<Item = TokenId>) {
        let forced = self.forced.get_or_insert_default();
        forced.clear();
        forced.extend(tokens);
    }

    /// Returns the tokens that a grammar forces next, if the output follows one.
    pub(crate) fn forced(&self) -> Option<&[TokenId]> {
        self.forced.as_deref()
    }

    /// Returns the number of known tokens.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the band in which the sequence runs: its tenant's band, or a lower one of its own.
    pub(crate) fn band_within(&self, tenant: &TenantPolicy) -> Band {
        let own = self.record.turn.lowered;
        own.map_or(tenant.band, |own| own.max(tenant.band))
    }

    /// Returns the key of the running order: sequences of earlier bands first, then by arrival.
    pub(crate) fn rank(&self) -> (Band, u64) {
        (self.band, self.arrival)
    }

    pub(crate) fn table(&self) -> &PageTable {
        &self.kv.table
    }

    /// Returns the position where the next row begins: after the computed tokens and the tokens
    /// that a pending copy brings.
    pub(crate) fn start(&self) -> usize {
        self.kv.computed + self.kv.copy.map_or(0, |copy| copy.tokens)
    }

    /// Returns how many known tokens are still to be computed; at least one.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.start()
    }

    pub(crate) fn is_prefill(&self) -> bool {
        self.remaining() > 1 || self.is_diffused()
    }

    pub(crate) fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Returns how many output tokens may still come.
    pub(crate) fn output_left(&self) -> usize {
        self.output_rules.max_new_tokens - self.output_len()
    }

    /// Returns the greatest number of tokens that the sequence can reach.
    pub(crate) fn max_len(&self) -> usize {
        self.prompt_len + self.output_rules.max_new_tokens
    }

    /// Returns the greatest number of pages that the sequence can need.
    pub(crate) fn max_pages(&self) -> u32 {
        let tokens = self.with_whole_blocks(self.max_len());
        (pages_for(tokens) + usize::from(self.kv.copy.is_some())) as u32
    }

    /// Returns the tokens whose keys and values the cache may supply: all except the tokens
    /// whose logits are needed, at least the last token.
    pub(crate) fn reusable_tokens(&self) -> &[TokenId] {
        let last = self.in_whole_blocks(self.tokens.len() - 1);
        if self.is_scoring() {
            &self.tokens[..self.scored]
        } else {
            &self.tokens[..last]
        }
    }

    /// Returns whether the logits of prompt tokens before the last one are still wanted. All known
    /// tokens are then of the prompt.
    pub(crate) fn is_scoring(&self) -> bool {
        self.scored + 1 < self.prompt_len
    }

    /// Returns how many of the next `tokens` tokens need logits. They are the last ones, except in
    /// a pass over a block.
    pub(crate) fn logits_of(&self, tokens: usize) -> usize {
        if self.is_unmasking() {
            return self.logits_of_pass();
        }
        let end = self.start() + tokens;
        if self.is_scoring() {
            end.saturating_sub(self.start().max(self.scored))
        } else {
            usize::from(end == self.tokens.len())
        }
    }

    /// Returns how many leading pages this sequence may share with `other` in the cache.
    pub(crate) fn shareable_with(&self, other: &Sequence) -> usize {
        if self.attended_block() != other.attended_block() {
            return 0;
        }
        let others = &other.tokens[..other.in_whole_blocks(other.len())];
        let mut shared = common_prefix(self.reusable_tokens(), others);
        if other.tenant != self.tenant {
            shared = shared.min(self.kv.public_tokens.min(other.kv.public_tokens));
        }
        self.reusable_pages(shared / PAGE_TOKENS)
    }

    /// Returns what the next `tokens` tokens add to a step.
    pub(crate) fn shape_of(&self, tokens: usize) -> StepShape {
        if self.is_prefill() {
            let logits = self.logits_of(tokens);
            StepShape::chunk(self.start(), tokens, logits).with_draws(self.draw_time)
        } else {
            self.decode_shape()
        }
    }

    /// Returns what a decode of the sequence, or a draft after it, adds to a step.
    #[inline]
    pub(crate) fn decode_shape(&self) -> StepShape {
        StepShape {
            sampling: self.draw_time,
            ..StepShape::decode(self.len())
        }
    }

    pub(crate) fn as_waiting(&self) -> Waiting {
        Waiting {
            turn: self.record.turn,
            arrival: self.arrival,
            first_choice: self.record.first_choice,
            has_run: self.record.cached_tokens.is_some(),
            slot: self.id.slot(),
            estimate: self.record.estimate,
            tokens: self.tokens().len() as u32,
        }
    }

    /// Notes the cached prompt tokens at the first admission and returns them. Returns `None` at
    /// later admissions.
    pub(crate) fn note_first_admission(&mut self) -> Option<usize> {
        if self.record.cached_tokens.is_some() {
            return None;
        }
        self.record.cached_tokens = Some(self.start());
        self.record.cached_tokens
    }

    /// Notes that the scheduler admitted another request although this one came first.
    pub(crate) fn bypass(&mut self) {
        self.record.times_bypassed += 1;
    }

    /// Notes whether this decode or prompt pauses in the next step.
    pub(crate) fn note_pause(&mut self, pauses: bool) {
        let paused = self.pacing.paused_steps;
        self.pacing.paused_steps = if pauses { paused + 1 } else { 0 };
    }

    /// Notes whether the next step computes a part of the prompt. `since` is the time since the
    /// last plan.
    pub(crate) fn note_prefill(&mut self, is_planned: bool, since: Micros) {
        let waited = self.pacing.prefill_waited;
        self.pacing.prefill_waited = if is_planned { 0 } else { waited + since };
    }

    /// Commits a computed row: its tokens, except the drafts, and then what was drawn. The caller
    /// counts how many drafts were accepted.
    #[inline]
    pub(crate) fn commit_row(
        &mut self,
        now: Micros,
        row_tokens: usize,
        drafts: &[TokenId],
        sampled: &[Sampled],
    ) -> DrawnTokens {
        self.kv.computed += row_tokens - drafts.len();
        if let Some(forced) = &mut self.forced {
            forced.clear();
        }
        let scored = self.kv.computed.min(self.prompt_len);
        self.scored = self.scored.max(scored);
        let drawn = self.draw(drafts, sampled);
        if drawn.tokens > 0 {
            self.begin_block();
            self.pacing.last_token_at = now;
        }
        drawn
    }

    /// Returns how likely drafts of the sequence are to be right; `usual` is that of all sequences.
    pub(crate) fn acceptances(&self, usual: Acceptances) -> Acceptances {
        self.pacing.acceptances.unwrap_or(usual)
    }

    /// Learns how many drafts of a row were accepted. What a grammar forces and a part of a prompt
    /// tell nothing of that.
    /// `usual` is the acceptance of all sequences.
    pub(crate) fn learn_acceptance(
        &mut self,
        drafts: usize,
        are_own: bool,
        drawn: &DrawnTokens,
        usual: &mut Acceptances,
    ) {
        if self.forced.is_some() || drawn.tokens == 0 {
            return;
        }
        // A draft behind a deferred draw was not tested.
        let tested = if drawn.is_deferred {
            drawn.accepted
        } else {
            drafts
        };
        if tested == 0 && self.pacing.acceptances.is_none() && usual.have_recovered() {
            return; // Nothing would change. Most rows end here.
        }
        let [tested, accepted] = [tested, drawn.accepted].map(|count| count as u32);
        let acceptances = self.pacing.acceptances.get_or_insert(*usual);
        acceptances.record(are_own, tested, accepted);
        usual.record_usual(are_own, tested, accepted);
    }

    /// Appends the drawn tokens of a row: the first one, and each next one whose draft was right.
    #[inline]
    pub(crate) fn draw(&mut self, drafts: &[TokenId], sampled: &[Sampled]) -> DrawnTokens {
        let mut drawn = DrawnTokens::default();
        for (place, entry) in sampled.iter().enumerate() {
            drawn.ending = match entry {
                Sampled::Token(token) => {
                    drawn.tokens += 1;
                    self.tokens.push(*token);
                    let (draft, output_tokens) = (drafts.get(place), self.output_len());
                    if (self.output_rules).accepts_draft(draft, *token, output_tokens) {
                        self.kv.computed += 1;
                        drawn.accepted += 1;
                        continue;
                    }
                    self.output_rules.ending(*token, output_tokens)
                }
                Sampled::Failed => Some(FinishReason::Error),
                Sampled::Deferred => {
                    // The last known token is computed again, for its logits.
                    self.kv.computed -= 1;
                    drawn.is_deferred = true;
                    None
                }
                Sampled::Void => panic!("a token was due"),
            };
            let mut rest = sampled[place + 1..].iter();
            assert!(
                rest.all(|entry| *entry == Sampled::Void),
                "nothing more was due"
            );
            break;
        }
        drawn
    }
}
