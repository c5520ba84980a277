//! Accepts or rejects a new request. A rejection says when a retry may succeed.
//!
//! Invariant: a request is accepted or rejected with all its prompts and their choices, which take
//! one place in the queue. So a request that fits alone finds room in an empty queue.

use super::room::{Leaving, Newcomer, find_room};
use crate::pages::common_prefix;
use crate::state::SchedulerState;
use crate::{
    Diffusion, Limits, MAX_DRAW_TIME, Micros, Nanos, PAGE_TOKENS, Refusal, Request, SequenceId,
    StepShape, TenantId,
};

/// Running sequences that a new request is compared with.
const COMPARED: usize = 8;

/// What is known of a prompt of an accepted request.
struct Accepted {
    uncached: usize, // Prompt tokens that are not cached.
    first: Nanos,    // The machine time of the first choice, as at the calibration.
    further: Nanos,  // The same for each other choice.
}

/// Adds a request of one prompt and one choice to the queue.
///
/// # Errors
/// A [`Refusal`] if it can never run, or not now. Then nothing changes.
pub(crate) fn submit(state: &mut SchedulerState, request: Request) -> Result<SequenceId, Refusal> {
    let accepted = accept(state, std::slice::from_ref(&request), 1)?;
    let first_choice = state.sequences.arrivals();
    let uncached = Some(accepted[0].uncached);
    Ok(state.submit(request, first_choice, uncached, accepted[0].first))
}

/// Adds a request to the queue: each of its `prompts` once for each of its `choices`. Returns their
/// handles, those of the first prompt first.
///
/// # Errors
/// A [`Refusal`] if it can never run, or not now. Then nothing changes.
pub(crate) fn submit_prompts(
    state: &mut SchedulerState,
    prompts: Vec<Request>,
    choices: usize,
) -> Result<Vec<SequenceId>, Refusal> {
    assert!(choices > 0, "a request has a choice");
    let accepted = accept(state, &prompts, choices)?;
    let mut ids = Vec::with_capacity(prompts.len() * choices);
    let first_choice = state.sequences.arrivals();
    for (prompt, accepted) in prompts.into_iter().zip(accepted) {
        for choice in 0..choices {
            let (uncached, estimate) = match choice {
                0 => (Some(accepted.uncached), accepted.first),
                _ => (None, accepted.further),
            };
            ids.push(state.submit(prompt.clone(), first_choice, uncached, estimate));
        }
    }
    Ok(ids)
}

/// Decides about a request with all its prompts and choices, and makes room for it in a full queue.
fn accept(
    state: &mut SchedulerState,
    prompts: &[Request],
    choices: usize,
) -> Result<Vec<Accepted>, Refusal> {
    let tenant = prompts.first().expect("a request has a prompt").tenant;
    let (mut accepted, mut time, mut prefill) = (Vec::with_capacity(prompts.len()), 0, 0);
    for request in prompts {
        assert_eq!(request.tenant, tenant, "a request has one tenant");
        assert!(request.draw_time <= MAX_DRAW_TIME, "draws take less");
        check_possible(state, request)?;
        let (uncached, expected_uncached) = uncached(state, request);
        let len = request.prompt.len();
        let first = estimate(state, request, expected_uncached);
        // The other choices find the whole pages of the prompt in the cache.
        let further = match choices {
            1 => 0,
            _ if request.scores_prompt => first,
            _ => estimate(state, request, len - (len - 1) / PAGE_TOKENS * PAGE_TOKENS),
        };
        time += first + further * (choices as Nanos - 1);
        prefill += (state.conditions.predictor).prefill_time(len, expected_uncached);
        accepted.push(Accepted {
            uncached,
            first,
            further,
        });
    }
    let newcomer = Newcomer { tenant, time };
    let within = prompts
        .iter()
        .filter_map(|prompt| prompt.first_token_within);
    for leaving in check_capacity(state, newcomer, prefill / 1000, within.min())? {
        state.displace(leaving.tenant, leaving.first_choice);
    }
    Ok(accepted)
}

/// Returns how many tokens of a prompt are not cached now, and how many are probably not cached
/// when the request starts.
fn uncached(state: &SchedulerState, request: &Request) -> (usize, usize) {
    let len = request.prompt.len();
    if request.scores_prompt {
        return (len, len); // The cache has no logits.
    }
    let public = &state.queue.tenant(request.tenant).policy.public;
    let diffusion = state.conditions.limits.diffusion;
    let diffusion = diffusion.filter(|_| request.is_diffused);
    let block = diffusion.map_or(0, |rules| rules.attended_block());
    let tree = state.pool.tree();
    let pages = tree.find(request.tenant, public, block, &request.prompt);
    let cached = pages.count() * PAGE_TOKENS;
    let uncached = len - cached.min(len - 1);
    (
        uncached,
        uncached.min(len - prefix_on_its_way(state, request)),
    )
}

/// Refuses a request that could not even run alone, and every request while the scheduler drains.
fn check_possible(state: &SchedulerState, request: &Request) -> Result<(), Refusal> {
    let needed_tokens = request.prompt.len() as u64 + u64::from(request.max_new_tokens);
    let diffusion = state.conditions.limits.diffusion;
    assert!(
        !request.is_diffused || diffusion.is_some() && !request.scores_prompt,
        "the model fills blocks, and scores no prompt by them"
    );
    let needed_tokens = match diffusion {
        Some(Diffusion { block, .. }) if request.is_diffused => {
            needed_tokens.next_multiple_of(u64::from(block))
        }
        _ => needed_tokens,
    };
    let limit_tokens = longest_sequence(state, request.tenant);
    if request.prompt.is_empty() {
        Err(Refusal::EmptyPrompt)
    } else if request.max_new_tokens == 0 {
        Err(Refusal::NothingToGenerate)
    } else if needed_tokens > limit_tokens {
        Err(Refusal::TooLong {
            needed_tokens,
            limit_tokens,
        })
    } else if state.conditions.is_draining {
        Err(Refusal::Draining)
    } else {
        Ok(())
    }
}

/// Returns the greatest length of one sequence of this tenant, prompt and output together.
fn longest_sequence(state: &SchedulerState, tenant: TenantId) -> u64 {
    let limits = &state.conditions.limits;
    let cap = state.queue.tenant(tenant).policy.max_pages;
    let pages = cap.min(limits.pages - state.pool.reserved());
    let limits = limits.clone();
    Limits { pages, ..limits }.longest_sequence()
}

/// Returns how many tokens of a prompt, in whole pages, the last waiting request of its tenant or a
/// running one has in common with it. They should be cached when this request starts.
fn prefix_on_its_way(state: &SchedulerState, request: &Request) -> usize {
    let waiting = state.queue.tenant(request.tenant).waiting.back();
    let latest = waiting.map(|waiting| &state.sequences[waiting.slot]);
    let running = state.sequences.iter_running().rev().take(COMPARED);
    let others = latest.into_iter().chain(running);
    let own = others.filter(|other| other.tenant == request.tenant);
    let reusable = &request.prompt[..request.prompt.len() - 1];
    let shared = own.map(|other| common_prefix(reusable, other.tokens()));
    shared.max().unwrap_or(0) / PAGE_TOKENS * PAGE_TOKENS
}

/// Returns the predicted machine time of a whole request, as at the calibration: its prefill, and
/// its part of the steps that decode it beside as many sequences as run now.
fn estimate(state: &SchedulerState, request: &Request, uncached: usize) -> Nanos {
    let (cost, len) = (
        state.conditions.predictor.calibrated(),
        request.prompt.len(),
    );
    let tenant = state.queue.tenant(request.tenant);
    let output = tenant.expected_output(request.max_new_tokens as usize);
    let running = state.sequences.running().len().max(1) as u64;
    let step = cost.predict(decodes(running, len + output / 2));
    let token = step / running + cost.draw_time(request.draw_time);
    let scores = match request.scores_prompt {
        true => cost.scoring_time(len, request.draw_time),
        false => 0,
    };
    cost.prefill_time(len, uncached) + scores + token * output as u64
}

/// Returns the shape of a step that decodes `count` sequences of `len` tokens.
fn decodes(count: u64, len: usize) -> StepShape {
    let decode = StepShape::decode(len);
    StepShape {
        rows: decode.rows * count,
        decode_keys: decode.decode_keys * count,
        logits: decode.logits * count,
        ..decode
    }
}

/// Returns how long an answer of the tenant's usual length takes beside as many sequences as run
/// now.
fn answer_time(state: &SchedulerState, tenant: TenantId) -> Micros {
    let output = state.queue.tenant(tenant).expected_output(usize::MAX);
    let running = state.sequences.running().len().max(1) as u64;
    let step = state.conditions.predictor.predict(decodes(running, output));
    step / 1000 * output as u64
}

/// Returns how many more requests of a tenant find places in the queue now. Each may still be
/// refused for what it asks for. If other tenants have places, the tenant's own limit alone counts,
/// because the tenant may get theirs.
///
/// # Errors
/// A [`Refusal`] if every request of the tenant is refused now, whatever it asks for.
pub(crate) fn places_for(state: &SchedulerState, tenant: TenantId) -> Result<usize, Refusal> {
    find_place(state, Newcomer { tenant, time: 0 })?;
    let (backlog, own) = (state.queue.backlog(), state.queue.tenant(tenant));
    let left = |limit: u32, used: usize| (limit as usize).saturating_sub(used);
    let of_tenant = left(own.policy.max_queued, own.backlog.places);
    if backlog.places > own.backlog.places {
        return Ok(of_tenant);
    }
    Ok(of_tenant.min(left(state.conditions.limits.max_queued, backlog.places)))
}

/// Returns the requests that must leave the queue for a new one. Refuses it if it exceeds its
/// tenant's rates or a backlog limit now. A request that takes more time is never refused less.
fn find_place(state: &SchedulerState, newcomer: Newcomer) -> Result<Vec<Leaving>, Refusal> {
    let queue = &state.queue;
    let tenant = queue.tenant(newcomer.tenant);
    let (now, answer_time) = (state.conditions.now, || answer_time(state, newcomer.tenant));
    if let Err((rate, retry_after)) = tenant.rates.likely_conforms(now, answer_time) {
        return Err(Refusal::RateLimited { rate, retry_after });
    }
    // One request may always wait, however long it takes.
    let predictor = &state.conditions.predictor;
    let own_time = predictor.at_present(tenant.backlog.time + newcomer.time) / 1000;
    let waiting = tenant.backlog.places;
    if waiting >= tenant.policy.max_queued as usize
        || waiting > 0 && !predictor.is_unsure() && own_time > tenant.policy.max_queued_time
    {
        let queued = predictor.at_present(tenant.queued_time);
        let retry_after = queue.time_at_share(newcomer.tenant, queued);
        return Err(Refusal::TenantQueueFull { retry_after });
    }
    find_room(state, newcomer).ok_or_else(|| {
        let retry_after = state.queued_time();
        Refusal::Overloaded { retry_after }
    })
}

/// Returns the requests that must leave the queue for this one. Refuses it if it exceeds its
/// tenant's rates, a backlog limit or its own deadline now. Its prompts take the time `prefill`,
/// and its first token is late after `latest`.
fn check_capacity(
    state: &SchedulerState,
    newcomer: Newcomer,
    prefill: Micros,
    latest: Option<Micros>,
) -> Result<Vec<Leaving>, Refusal> {
    let leaving = find_place(state, newcomer)?;
    let queue = &state.queue;
    let queued = queue.tenant(newcomer.tenant).queued_time;
    let queued = state.conditions.predictor.at_present(queued);
    let latest = latest.unwrap_or(Micros::MAX);
    // How long the waiting requests keep another request of this tenant from running.
    let at_share = queue.time_at_share(newcomer.tenant, queued);
    let expected = prefill + at_share.min(state.queued_time());
    if expected > latest {
        let retry_after = (prefill <= latest).then(|| expected - latest);
        return Err(Refusal::Deadline { retry_after });
    }
    Ok(leaving)
}
