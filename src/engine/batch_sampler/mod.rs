//! Draws the tokens of a step from its logits.
//!
//! A batch row with draft tokens has several rows of logits. The sampler draws from them in turn,
//! as long as each drawn token equals the draft token in its place. A row of a prompt that is
//! scored has logits too: the sampler scores the token that follows each of them, and draws after
//! the last one of the prompt. Several threads may score the tokens of one batch row.
//!
//! Invariant: a sequence's tokens and log-probabilities are the same with and without draft
//! tokens. A draft token is only compared with the drawn token, and later draws see the drawn one.

mod deciding;

use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, OutputRules, Row, Sampled, SequenceId, TokenId};

use super::forward::{CopyRow, LogitRows};
use super::sampler::{DrawContext, Sampler, Unsampleable};
use super::sampling_params::{SamplingParams, ScoredToken, TokenOutput};
use crate::constraint::{Mask, MaskState, TokenMasks};
use crate::fault::{self, Place};

pub(super) use deciding::DecidingLogits;

/// A sequence whose next tokens are drawn.
pub struct Continuation<'a> {
    /// How its tokens are drawn.
    pub params: &'a SamplingParams,
    /// When its output ends.
    pub rules: &'a OutputRules,
    /// Its prompt and output so far.
    pub known: &'a [TokenId],
    /// The tokens after those up to the end of the block that it fills, some of them mask tokens.
    pub ahead: &'a [TokenId],
    /// The length of its prompt.
    pub prompt_tokens: usize,
    /// Which tokens may be drawn, if its output follows a grammar.
    pub masks: Option<&'a TokenMasks>,
}

impl<'a> Continuation<'a> {
    /// Returns the context of the draw after `history`: the known tokens and the draft tokens
    /// that were accepted.
    ///
    /// # Errors
    /// The outcome, if nothing can be drawn now.
    fn context<'h>(&self, history: &'h [TokenId]) -> Result<DrawContext<'h>, DrawOutcome>
    where
        'a: 'h,
    {
        let output = &history[self.prompt_tokens..];
        let output_tokens = output.len();
        let mask = match self.masks.map(|masks| masks.at(output_tokens)) {
            None => None,
            Some(MaskState::Ready(mask)) => Some(mask),
            Some(MaskState::Pending) => return Err(DrawOutcome::Deferred),
            Some(MaskState::DeadEnd) => return Err(DrawOutcome::Failed(Unsampleable::DeadEnd)),
        };
        // In reasoning, a grammar allows the closing tag after each whole character, so the budget
        // takes its mask's place.
        let budget = self.params.thinking.as_ref();
        let forced = budget.and_then(|budget| budget.forced(output));
        Ok(DrawContext {
            params: self.params,
            history,
            prompt_tokens: self.prompt_tokens,
            forbidden: match forced {
                Some(_) => &[],
                None => (self.rules).forbidden_tokens(output_tokens),
            },
            mask: forced.map(Mask::Only).or(mask),
        })
    }
}

/// The draw from one row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The sequence that continues.
    pub sequence: SequenceId,
    /// The result.
    pub outcome: DrawOutcome,
}

/// The result of a draw.
#[derive(Clone, Debug, PartialEq)]
pub enum DrawOutcome {
    /// The sampler drew this token.
    Token(TokenOutput),
    /// The sampler drew this token in the place of a mask token, and it stays.
    Unmasked {
        /// The position of the token in its sequence.
        position: usize,
        /// The token.
        output: TokenOutput,
        /// Its plain probability.
        confidence: f32,
    },
    /// The sampler scored the token of the prompt that follows the row of logits.
    Scored(ScoredToken),
    /// The hidden state of a token, of which the request wants an embedding.
    State {
        /// The state after the last norm.
        state: Vec<f32>,
        /// The token is the last of the text.
        is_last: bool,
    },
    /// No token can be drawn, so the request fails.
    Failed(Unsampleable),
    /// The mask of the sequence's grammar is not computed yet. A later step computes the logits
    /// again.
    Deferred,
    /// The sampler drew nothing: an earlier draw of the same batch row failed, ended the sequence
    /// or differs from the draft token. Or the drawn token does not replace its mask token.
    Void,
}

impl Draw {
    /// Returns what the scheduler commits.
    pub(super) fn sampled(&self) -> Sampled {
        match &self.outcome {
            DrawOutcome::Token(output) | DrawOutcome::Unmasked { output, .. } => {
                Sampled::Token(output.token)
            }
            DrawOutcome::Failed(_) => Sampled::Failed,
            DrawOutcome::Deferred => Sampled::Deferred,
            // An embedding ends as an answer of one token does. The token does not matter.
            DrawOutcome::State { is_last: true, .. } => Sampled::Token(TokenId::default()),
            DrawOutcome::Scored(_) | DrawOutcome::State { .. } | DrawOutcome::Void => Sampled::Void,
        }
    }
}

/// Draws the tokens of a step on several threads, with memory that it reuses for the next step.
pub struct BatchSampler {
    vocabulary: usize,
    workers: Vec<SamplerWorker>, // One for each thread.
    draws: Vec<Draw>,
}

impl BatchSampler {
    /// Returns a sampler for rows of `vocabulary` logits.
    #[must_use]
    pub fn new(vocabulary: usize) -> BatchSampler {
        BatchSampler {
            vocabulary,
            workers: Vec::new(),
            draws: Vec::new(),
        }
    }

    /// Draws the tokens of `batch`. Returns one draw for each row of logits, in their order.
    /// `continuation` returns the state of a row's sequence.
    pub fn sample<'a>(
        &mut self,
        batch: &Batch,
        logits: &mut impl LogitRows,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> &[Draw] {
        self.draws.clear();
        for row in batch.rows() {
            let void = || Draw {
                sequence: row.sequence,
                outcome: DrawOutcome::Void,
            };
            let len = self.draws.len() + row.logits as usize;
            self.draws.resize_with(len, void);
        }
        // A panic loses the workers, so that nothing half done stays in their buffers. The next
        // step allocates new ones.
        let mut workers = std::mem::take(&mut self.workers);
        let worker_count = logits.workers().min(self.draws.len());
        while workers.len() < worker_count {
            workers.push(SamplerWorker::new(logits.kernels(), self.vocabulary));
        }
        let scored = |row: &Row| scored_of(row, continuation(row.sequence).known.len());
        let parts = split(batch, &mut workers[..worker_count], &mut self.draws, scored);
        logits.share(parts, |part, copy_row| {
            part.sample(batch, copy_row, &continuation);
        });
        self.workers = workers;
        keep_confident(batch, &mut self.draws, &continuation);
        take_states(batch, logits, &mut self.draws, continuation);
        void_after_failures(batch, &mut self.draws);
        &self.draws
    }

    /// Sets each draft to the likeliest token of its row of logits. A mask token is no draft, and
    /// stays in place of one if a row has no largest logit.
    pub(super) fn draft(
        &mut self,
        logits: &mut impl LogitRows,
        mask_token: TokenId,
        drafts: &mut [TokenId],
    ) {
        let workers = logits.workers().min(drafts.len());
        while self.workers.len() < workers {
            let worker = SamplerWorker::new(logits.kernels(), self.vocabulary);
            self.workers.push(worker);
        }
        let size = drafts.len().div_ceil(workers);
        let parts = drafts.chunks_mut(size).zip(&mut self.workers).enumerate();
        logits.share(parts, |(part, (drafts, worker)), copy_row| {
            for (place, draft) in drafts.iter_mut().enumerate() {
                copy_row(part * size + place, &mut worker.logits);
                *draft = likeliest(&worker.logits, mask_token);
            }
        });
    }

    /// Returns the draws of the last call of `sample`, unless they were taken.
    pub(super) fn draws(&self) -> &[Draw] {
        &self.draws
    }

    /// Replaces the draws.
    pub(super) fn set_draws(&mut self, draws: Vec<Draw>) {
        self.draws = draws;
    }

    /// Takes the draws, and keeps their memory.
    pub(super) fn take_draws(&mut self) -> impl Iterator<Item = Draw> + '_ {
        self.draws.drain(..)
    }
}

/// Returns the token with the largest logit except the mask token, the lowest of equal ones.
fn likeliest(logits: &[f32], mask_token: TokenId) -> TokenId {
    let mut best = (f32::NEG_INFINITY, mask_token);
    for (token, &logit) in (0..).zip(logits) {
        if logit > best.0 && token != mask_token {
            best = (logit, token);
        }
    }
    best.1
}

/// Cuts the batch's rows of logits into one part for each worker, with about as many each.
/// `scored` returns how many rows of logits of a row are scored.
fn split<'a>(
    batch: &'a Batch,
    workers: &'a mut [SamplerWorker],
    mut draws: &'a mut [Draw],
    scored: impl Fn(&Row) -> usize + 'a,
) -> impl Iterator<Item = WorkerPart<'a>> {
    let (draw_count, worker_count, mut first) = (draws.len(), workers.len(), 0);
    (1..).zip(workers).map(move |(part, worker)| {
        let end = cut(batch, part * draw_count / worker_count, &scored).max(first);
        let part = WorkerPart {
            first,
            draws: draws
                .split_off_mut(..end - first)
                .expect("each row of logits has a draw"),
            worker,
        };
        first = end;
        part
    })
}

/// Returns the first place from `target` on at which the rows of logits may be cut in two: between
/// batch rows, or after a score. The draws of a batch row depend on each other.
fn cut(batch: &Batch, target: usize, scored: impl Fn(&Row) -> usize) -> usize {
    let mut end = 0;
    for row in batch.rows().iter().filter(|row| row.logits > 0) {
        let begin = end;
        end += row.logits as usize;
        if end >= target {
            return if target.saturating_sub(begin) <= scored(row) {
                target
            } else {
                end
            };
        }
    }
    end
}

/// Returns how many rows of logits of a batch row are scored: the rows before the last of the
/// `known` tokens of the sequence, because the next token is known.
fn scored_of(row: &Row, known: usize) -> usize {
    let first = row.logits_range().start;
    (known - 1).saturating_sub(first).min(row.logits as usize)
}

/// Returns the known tokens of a row, then its draft tokens. `memory` holds them if there are draft
/// tokens.
fn with_drafts<'a>(
    known: &'a [TokenId],
    drafts: &[TokenId],
    memory: &'a mut Vec<TokenId>,
) -> &'a [TokenId] {
    if drafts.is_empty() {
        return known;
    }
    memory.clear();
    memory.extend_from_slice(known);
    memory.extend_from_slice(drafts);
    memory
}

/// Copies the hidden states of the sequences that want an embedding.
fn take_states<'a>(
    batch: &Batch,
    logits: &impl LogitRows,
    mut draws: &mut [Draw],
    continuation: impl Fn(SequenceId) -> Continuation<'a>,
) {
    let mut index = 0;
    for row in batch.rows().iter().filter(|row| row.logits > 0) {
        let count = row.logits as usize;
        let own = draws
            .split_off_mut(..count)
            .expect("a draw for each row of logits");
        let sequence = continuation(row.sequence);
        let first = index;
        index += count;
        if sequence.params.pooling.is_none() {
            continue;
        }
        for (place, draw) in own.iter_mut().enumerate() {
            let mut state = vec![0.0; logits.state_width()];
            logits.copy_state(first + place, &mut state);
            draw.outcome = if state.iter().all(|value| value.is_finite()) {
                DrawOutcome::State {
                    state,
                    is_last: row.logits_range().start + place + 1 == sequence.known.len(),
                }
            } else {
                DrawOutcome::Failed(Unsampleable::NotFinite)
            };
        }
    }
}

/// Decides which of the tokens that were drawn in the places of mask tokens stay: see
/// [`Unmasking`](super::Unmasking). If a draw of a block has failed, none does.
fn keep_confident<'a>(
    batch: &Batch,
    mut draws: &mut [Draw],
    continuation: impl Fn(SequenceId) -> Continuation<'a>,
) {
    for row in batch.rows() {
        let of_row = draws
            .split_off_mut(..row.logits as usize)
            .expect("each row of logits has a draw");
        if row.block == 0 {
            continue;
        }
        let confidences = of_row.iter().map(|draw| match draw.outcome {
            DrawOutcome::Unmasked { confidence, .. } => confidence,
            DrawOutcome::Failed(_) => f32::INFINITY,
            _ => f32::NEG_INFINITY,
        });
        let mut best = (f32::NEG_INFINITY, 0);
        for (place, confidence) in confidences.enumerate() {
            if confidence > best.0 {
                best = (confidence, place);
            }
        }
        let unmasking = continuation(row.sequence).params.unmasking;
        let threshold = unmasking.map_or(0.0, |unmasking| unmasking.threshold);
        for (place, draw) in of_row.iter_mut().enumerate() {
            if let DrawOutcome::Unmasked { confidence, .. } = draw.outcome
                && (best.0 == f32::INFINITY || confidence <= threshold && place != best.1)
            {
                draw.outcome = DrawOutcome::Void;
            }
        }
    }
}

/// Makes what follows a failure in the same batch row void. Another worker may have computed it.
fn void_after_failures(batch: &Batch, mut draws: &mut [Draw]) {
    for row in batch.rows() {
        let of_row = draws
            .split_off_mut(..row.logits as usize)
            .expect("each row of logits has a draw");
        let has_failed = |draw: &Draw| matches!(draw.outcome, DrawOutcome::Failed(_));
        if let Some(place) = of_row.iter().position(has_failed) {
            for draw in &mut of_row[place + 1..] {
                draw.outcome = DrawOutcome::Void;
            }
        }
    }
}

/// A worker's part of the rows of logits.
struct WorkerPart<'a> {
    first: usize, // The index of the part's first row of logits.
    draws: &'a mut [Draw],
    worker: &'a mut SamplerWorker,
}

impl WorkerPart<'_> {
    fn sample<'a>(
        self,
        batch: &Batch,
        copy_row: &CopyRow<'_>,
        continuation: impl Fn(SequenceId) -> Continuation<'a>,
    ) {
        fault::pass(Place::SamplingBegun);
        let (first, end) = (self.first, self.first + self.draws.len());
        let mut begin = 0; // The index of the first row of logits of `row`.
        for row in batch.rows().iter().filter(|row| row.logits > 0) {
            let own = first.max(begin)..end.min(begin + row.logits as usize);
            begin += row.logits as usize;
            if own.is_empty() {
                continue;
            }
            let sequence = continuation(row.sequence);
            if sequence.params.pooling.is_some() {
                continue; // `take_states` copies its states.
            }
            let position = |index: usize| row.logits_range().end - (begin - index);
            let logits = |index: usize, logits: &mut [f32]| {
                copy_row(index, logits);
                fault::pass_row(Place::LogitsCopied, index, logits);
            };
            let draws = &mut self.draws[own.start - first..own.end - first];
            if sequence.params.unmasking.is_some() && row.end() > sequence.known.len() {
                let of_place = |place, row: &mut [f32]| logits(own.start + place, row);
                let first = position(own.start) + 1;
                self.worker.unmask_row(&sequence, first, of_place, draws);
                continue;
            }
            let scored = scored_of(row, sequence.known.len());
            let first_drawn = begin - row.logits as usize + scored;
            let scores = first_drawn.clamp(own.start, own.end) - own.start;
            let (scores, draws) = draws.split_at_mut(scores);
            let known = &sequence.known[position(own.start) + 1..];
            let count = sequence.params.prompt_logprobs.unwrap_or(0);
            let of_score = |place, row: &mut [f32]| logits(own.start + place, row);
            if !self.worker.score_row(known, count, of_score, scores) || draws.is_empty() {
                continue;
            }
            // All tokens that are drawn from, except the first one, are draft tokens.
            let drafts = &batch.tokens(row)[row.len() + 1 - draws.len()..];
            debug_assert_eq!(
                sequence.known.len() + drafts.len(),
                row.end(),
                "known tokens, then draft tokens"
            );
            let of_draw = |place, row: &mut [f32]| logits(first_drawn + place, row);
            self.worker.sample_row(&sequence, drafts, of_draw, draws);
        }
    }
}

/// The buffers of one thread.
struct SamplerWorker {
    logits: Vec<f32>,
    sampler: Sampler,
    history: Vec<TokenId>, // The known tokens of a row, then its draft tokens.
}

impl SamplerWorker {
    fn new(kernels: Kernels, vocabulary: usize) -> SamplerWorker {
        SamplerWorker {
            logits: vec![0.0; vocabulary],
            sampler: Sampler::new(kernels, vocabulary),
            history: Vec::new(),
        }
    }

    /// Scores the next `scores.len()` tokens of `known`. Returns whether all could be scored.
    fn score_row(
        &mut self,
        known: &[TokenId],
        count: u32,
        copy_row: impl Fn(usize, &mut [f32]),
        scores: &mut [Draw],
    ) -> bool {
        for (place, score) in scores.iter_mut().enumerate() {
            copy_row(place, &mut self.logits);
            match self.sampler.score(&self.logits, known[place], count) {
                Ok(token) => score.outcome = DrawOutcome::Scored(token),
                Err(error) => {
                    score.outcome = DrawOutcome::Failed(error);
                    return false;
                }
            }
        }
        true
    }

    /// Draws a token in the place of each mask token among the positions from `first` on.
    fn unmask_row(
        &mut self,
        sequence: &Continuation<'_>,
        first: usize,
        copy_row: impl Fn(usize, &mut [f32]),
        draws: &mut [Draw],
    ) {
        let Some(unmasking) = sequence.params.unmasking else {
            return;
        };
        self.history.clear();
        self.history.extend_from_slice(sequence.known);
        self.history.extend_from_slice(sequence.ahead);
        for (place, draw) in draws.iter_mut().enumerate() {
            let position = first + place;
            if self.history[position] != unmasking.mask_token {
                continue;
            }
            copy_row(place, &mut self.logits);
            let context = DrawContext {
                params: sequence.params,
                history: &self.history[..position],
                prompt_tokens: sequence.prompt_tokens,
                forbidden: (sequence.rules).forbidden_tokens(position - sequence.prompt_tokens),
                mask: None,
            };
            let drawn = self.sampler.sample(&self.logits, &context);
            let scored = drawn.and_then(|output| {
                let score = self.sampler.score(&self.logits, output.token, 0)?;
                Ok((output, score.logprob.exp()))
            });
            draw.outcome = match scored {
                Ok((output, confidence)) => DrawOutcome::Unmasked {
                    position,
                    output,
                    confidence,
                },
                Err(error) => DrawOutcome::Failed(error),
            };
        }
    }

    /// Draws the token after the known ones. If that token equals the draft token, draws the next
    /// one, and so on.
    fn sample_row(
        &mut self,
        sequence: &Continuation<'_>,
        drafts: &[TokenId],
        copy_row: impl Fn(usize, &mut [f32]),
        draws: &mut [Draw],
    ) {
        let known = sequence.known.len();
        let tokens = with_drafts(sequence.known, drafts, &mut self.history);
        for (place, draw) in draws.iter_mut().enumerate() {
            let history = &tokens[..known + place];
            let context = match sequence.context(history) {
                Ok(context) => context,
                Err(outcome) => {
                    draw.outcome = outcome;
                    return;
                }
            };
            copy_row(place, &mut self.logits);
            let drawn = self.sampler.sample(&self.logits, &context);
            let output = match drawn {
                Ok(output) => output,
                Err(error) => {
                    draw.outcome = DrawOutcome::Failed(error);
                    return;
                }
            };
            let token = output.token;
            draw.outcome = DrawOutcome::Token(output);
            let output_tokens = history.len() + 1 - sequence.prompt_tokens;
            if !(sequence.rules).accepts_draft(drafts.get(place), token, output_tokens) {
                return;
            }
            fault::pass(Place::DraftAccepted);
        }
    }
}

#[cfg(test)]
mod tests;
