//! A random world: tenants, requests, cancels, and steps that are committed, dropped or fail.

use std::collections::BTreeMap;

use sterna_random::{Random, mix};
use sterna_scheduler::{
    Batch, Event, FinishReason, Limits, Micros, PAGE_TOKENS, Plan, Policy, Refusal, Request, Row,
    Sampled, Scheduler, SequenceId, Step, TenantId, TenantPolicy, TokenId,
};

use crate::blocks::some_diffusion;
use crate::checks::{Account, PlannedCost};
use crate::clock::{Clock, Pace};
use crate::coverage::Coverage;
use crate::model::{Client, FakeModel};
use crate::rules::{self, check_batch, check_row};
use crate::states::{FakeSlabs, some_states};
use crate::terms::{random_cost, random_policy};
use crate::traffic::{OUTPUT_LENGTHS, Submissions, Traffic, small_request};

const TURNS: u64 = 400;

/// A copy of the scheduler's constant.
pub(crate) const PATIENCE: u32 = 32;

fn alive(clients: &mut BTreeMap<SequenceId, Client>, id: SequenceId) -> &mut Client {
    clients.get_mut(&id).expect("the request has not ended")
}

/// The end of a step.
#[derive(PartialEq, Eq)]
enum Fate {
    Committed,
    Dropped,
    Failed,
}

impl Fate {
    fn random(random: &mut Random) -> Fate {
        match random.below(100) {
            0..4 => Fate::Dropped,
            4..6 => Fate::Failed,
            _ => Fate::Committed,
        }
    }
}

/// A scheduler, its random users, and what they expect of it.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) random: Random,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) scheduler: Scheduler,
    pub(crate) tenants: u64,
    pub(crate) terms: Vec<TenantPolicy>,  // By tenant.
    pub(crate) accounts: Vec<Account>,    // By tenant.
    pub(crate) public: Vec<Vec<TokenId>>, // The public prefixes, in whole pages.
    pub(crate) clock: Clock,
    pub(crate) model: FakeModel,
    pub(crate) clients: BTreeMap<SequenceId, Client>,
    pub(crate) traffic: Traffic,
    pub(crate) submissions: Submissions,
    pub(crate) now: Micros,
    pub(crate) policies: u64, // The number of times that the policies were set.
    committed_steps: u64,
    predicted: Micros, // The sum over all committed steps.
    trace: u64,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> World {
        let mut random = Random::new(mix(seed));
        let limits = random_limits(&mut random);
        let pages = limits.pages;
        let policy = random_policy(&mut random);
        let alphabet = random.between(2, 3);
        let blocks: Vec<_> = (0..3)
            .map(|_| Traffic::block(&mut random, alphabet))
            .collect();
        let mut scheduler = Scheduler::new(limits.clone(), policy.clone());
        let cost = random_cost(&mut random);
        scheduler.calibrate(cost);
        let clock = Clock::random(&mut random, cost);
        let public = if pages >= 12 && random.percent(50) {
            vec![[&blocks[0][..], &blocks[1]].concat(), blocks[2].clone()]
        } else {
            Vec::new()
        };
        for prefix in &public {
            scheduler.declare_public(prefix);
        }
        let tenants = random.between(2, 4);
        let limits_have_blocks = limits.diffusion.is_some();
        let mut world = World {
            seed,
            policy,
            scheduler,
            tenants,
            terms: Vec::new(),
            accounts: vec![Account::default(); tenants as usize],
            public,
            clock,
            model: FakeModel {
                slabs: FakeSlabs::new(&limits),
                cells: vec![None; pages as usize * PAGE_TOKENS],
                alphabet,
            },
            limits,
            clients: BTreeMap::new(),
            traffic: Traffic {
                has_blocks: limits_have_blocks,
                alphabet,
                blocks,
                ended: Vec::new(),
                tenants,
                load: random.between(20, 60),
                output_lengths: random.pick(&OUTPUT_LENGTHS),
                longest_prompt: random.pick(&[1, 4]),
                latest: None,
            },
            submissions: Submissions::default(),
            now: 0,
            policies: 0,
            committed_steps: 0,
            predicted: 0,
            trace: 0,
            random,
        };
        world.set_tenants();
        world
    }

    /// Returns the largest number of tokens that one sequence of a tenant may have.
    fn longest_sequence(&self, tenant: TenantId) -> usize {
        let left = self.limits.pages as usize - self.public_pages();
        let cap = self.terms[tenant.0 as usize].max_pages as usize;
        (cap.min(left) * PAGE_TOKENS).min(self.limits.max_sequence_tokens as usize)
    }

    /// Returns the room that a request needs: prompt and output, in whole blocks if it fills them.
    fn needed_tokens(&self, request: &Request) -> usize {
        let tokens = request.prompt.len() + request.max_new_tokens as usize;
        match self.limits.diffusion {
            Some(rules) if request.is_diffused => tokens.next_multiple_of(rules.block as usize),
            _ => tokens,
        }
    }

    /// Runs the world, drains it, and returns a hash of everything that happened.
    pub(crate) fn run(&mut self, coverage: &mut Coverage) -> u64 {
        for _ in 0..TURNS {
            self.turn(coverage);
        }
        self.drain(coverage);
        let end = self.scheduler.snapshot();
        assert_eq!(
            end.private, 0,
            "M8: a page is private after the last request"
        );
        assert!(
            end.pinned <= self.public_pages(),
            "M8: a page that is not public is pinned"
        );
        coverage.evictions += end.evictions;
        coverage.preemptions += end.preemptions;
        coverage.redirects += end.redirects;
        coverage.deferrals += end.deferrals;
        coverage.copies += end.copies;
        coverage.drafted += end.drafted;
        coverage.accepted += end.accepted;
        coverage.block_passes += end.block_passes;
        coverage.unmasked += end.unmasked;
        let difference = self.predicted.abs_diff(self.service());
        assert!(
            difference <= self.tenants + self.committed_steps,
            "S7: the charges differ from the predictions"
        );
        self.scheduler.reset_prefix_cache();
        self.scheduler.check();
        assert_eq!(
            self.scheduler.snapshot().tree,
            end.pinned,
            "M8: a reset keeps only public pages"
        );
        self.trace
    }

    /// S9: After `drain` every request ends, and new requests are refused.
    fn drain(&mut self, coverage: &mut Coverage) {
        self.scheduler.drain();
        let len = |client: &Client| client.request.prompt.len() + client.answer.len();
        let tokens: usize = self.clients.values().map(len).sum();
        for _ in 0..3 * tokens + 200 {
            self.now += 100;
            self.step(coverage);
            if self.clients.is_empty() {
                break;
            }
        }
        assert!(self.clients.is_empty(), "S9: a request does not end");
        let refused = self.scheduler.submit(self.now, small_request());
        assert_eq!(refused, Err(Refusal::Draining));
    }

    fn turn(&mut self, coverage: &mut Coverage) {
        self.now += self.random.below(1000);
        if self.random.percent(1) && self.random.percent(50) {
            self.set_tenants();
            coverage.policy_changes += 1;
        }
        if self.random.percent(1) && self.random.percent(20) {
            let cost = random_cost(&mut self.random);
            self.clock.calibrate(cost);
            self.scheduler.calibrate(cost);
            coverage.calibrations += 1;
        }
        while self.random.percent(self.traffic.load) {
            self.submit(coverage);
        }
        if self.random.percent(3) {
            self.cancel(coverage);
        }
        if self.random.percent(1) {
            self.scheduler.reset_prefix_cache();
            self.scheduler.check();
            coverage.resets += 1;
        }
        self.step(coverage);
    }

    fn submit(&mut self, coverage: &mut Coverage) {
        let repeated = self
            .traffic
            .latest
            .clone()
            .filter(|_| self.random.percent(40));
        let (request, choices) = repeated.unwrap_or_else(|| {
            let deadline_factor = if self.clock.pace == Pace::Instant {
                1
            } else {
                4
            };
            let mut random = self.random.clone();
            let longest_sequence = |tenant| self.longest_sequence(tenant);
            let request = self
                .traffic
                .request(&mut random, longest_sequence, deadline_factor);
            self.random = random;
            request
        });
        self.traffic.latest = Some((request.clone(), choices));
        self.submissions.generated += 1;
        if self
            .submissions
            .skipped
            .contains(&self.submissions.generated)
        {
            return;
        }
        coverage.submits += 1;
        let before = self.picture();
        let can_fit = self.needed_tokens(&request) <= self.longest_sequence(request.tenant);
        let places = self.scheduler.places_for(self.now, request.tenant);
        assert_eq!(self.picture(), before, "S10: a question changes the state");
        let answer = self
            .scheduler
            .submit_choices(self.now, request.clone(), choices);
        assert!(
            answer.is_err() || places.is_ok_and(|places| places > 0),
            "S10: a request is accepted although its tenant has no place"
        );
        coverage.refused_unseen += u64::from(places.is_err());
        match answer {
            Ok(ids) => {
                assert!(can_fit, "S3: an accepted request does not fit alone");
                assert_eq!(ids.len(), choices);
                self.check_rates(&request, choices, &before);
                for (choice, id) in ids.into_iter().enumerate() {
                    self.add_client(id, request.clone(), choice == 0);
                }
                self.settle(coverage);
                self.check_places(&request);
            }
            Err(refusal) => {
                assert_eq!(can_fit, !matches!(refusal, Refusal::TooLong { .. }));
                self.check_refusal(&request, refusal);
                match refusal {
                    Refusal::RateLimited { .. } => coverage.rate_limited += 1,
                    Refusal::TenantQueueFull { .. } => coverage.tenant_queue_full += 1,
                    Refusal::Overloaded { .. } => coverage.overloaded += 1,
                    Refusal::Deadline { .. } => coverage.deadline_refusals += 1,
                    _ => {}
                }
                assert_eq!(self.picture(), before, "S10: a refusal changes the state");
                self.submissions.refused.insert(self.submissions.generated);
                coverage.refusals += 1;
            }
        }
        self.check();
    }

    /// Adds an accepted request, or the next choice of the last one.
    fn add_client(&mut self, id: SequenceId, request: Request, is_first_choice: bool) {
        let number = self.submissions.accepted;
        let rules = self.limits.diffusion;
        let mut client = Client::new(number, request, rules, self.model.alphabet);
        client.is_first_choice = is_first_choice;
        client.arrived = self.now;
        client.policies = self.policies;
        client.public = self.public_of(client.request.tenant);
        let previous = self.clients.insert(id, client);
        assert!(previous.is_none(), "two requests have the same handle");
        self.submissions.accepted += 1;
    }

    /// Returns the public prefixes that a tenant may use now.
    fn public_of(&self, tenant: TenantId) -> Vec<Vec<TokenId>> {
        let allowed = self.terms[tenant.0 as usize].public.iter();
        allowed
            .map(|prefix| self.public[prefix.0 as usize].clone())
            .collect()
    }

    /// Cancels a random request in any state, and tries to cancel one that has ended.
    fn cancel(&mut self, coverage: &mut Coverage) {
        if let Some(&(id, _)) = self.traffic.ended.last() {
            let is_alive = self.scheduler.cancel(id, FinishReason::Cancelled);
            assert!(!is_alive, "the handle of an ended request is dead");
        }
        let alive = self.clients.len();
        if alive == 0 {
            return;
        }
        let number = self.random.index(alive);
        let nth = self.clients.iter_mut().nth(number);
        let (&id, client) = nth.expect("the number is below the length");
        let reason = self.random.pick(&[
            FinishReason::Cancelled,
            FinishReason::Stop,
            FinishReason::Shutdown,
        ]);
        client.end(reason);
        coverage.cancels += 1;
        coverage.cancels_while_waiting += u64::from(client.is_waiting);
        let before = self.scheduler.snapshot();
        assert!(self.scheduler.cancel(id, reason));
        assert!(!self.scheduler.cancel(id, FinishReason::Error));
        self.check_pages_returned(&before);
        self.settle(coverage);
    }

    fn note_committed(&mut self, planned: &PlannedCost) {
        self.predicted += planned.predicted;
        self.committed_steps += 1;
        self.check_charges(planned);
    }

    fn step(&mut self, coverage: &mut Coverage) {
        let before = self.scheduler.snapshot();
        let service = self.services().collect();
        let decodes = self.decodes();
        let policy = self.policy.clone();
        self.clock.planned_at = self.now;
        coverage.plans += 1;
        let Plan::Step(mut step) = self.scheduler.plan(self.now) else {
            self.settle(coverage);
            assert!(
                self.clients.is_empty(),
                "S3: the plan is idle although a request is left"
            );
            return;
        };
        set_own_drafts(&mut step, &self.clients, &mut self.random, coverage);
        let batch = step.batch().clone();
        let (shape, drafting) = (step.shape(), step.drafting());
        let planned = PlannedCost::of(&step, &self.clients, service);
        for row in batch.rows() {
            check_row(&step, row, &self.clients[&row.sequence]);
            // No event says that a preempted request runs again.
            alive(&mut self.clients, row.sequence).is_waiting = false;
            coverage.chunks += u64::from(row.logits == 0);
        }
        check_batch(&batch, &self.limits, &policy, &self.clients);
        self.clock.check_time(&policy, &step, &self.clients);
        self.trace = trace(self.trace, &batch);
        coverage.steps += 1;
        coverage.costly += u64::from(shape.sampling > 0);

        let fate = Fate::random(&mut self.random);
        let is_skipped = || fate == Fate::Dropped && self.random.percent(30);
        let next = self
            .model
            .forward(&batch, &self.clients, coverage, is_skipped);
        let duration = self.clock.duration(&mut self.random, shape, drafting);
        match fate {
            Fate::Committed => {
                self.now += duration;
                let users = (&mut self.clients, &mut self.model);
                let sampled = receive((&batch, next), users, self.now, &mut self.random, coverage);
                step.commit(self.now, &sampled);
                let is_far = self.clock.learn(shape, planned.predicted, duration);
                coverage.corrected += u64::from(is_far);
                self.note_committed(&planned);
            }
            Fate::Dropped => {
                drop(step);
                self.now += duration; // So the next plan has less time.
                self.check_evictions(&before);
                coverage.dropped_steps += 1;
            }
            Fate::Failed => {
                self.now += duration;
                let users = (&mut self.clients, &mut self.model);
                let failed = fail_some(&batch, users, &mut self.random);
                let users = (&mut self.clients, &mut self.model);
                let sampled = receive((&batch, next), users, self.now, &mut self.random, coverage);
                step.commit_rerun(self.now, &sampled, &failed);
                self.note_committed(&planned);
                coverage.failed_steps += 1;
            }
        }
        if self.scheduler.snapshot().deferrals > before.deferrals {
            let waiting = self.clients.values_mut().filter(|client| client.is_waiting);
            waiting.for_each(|client| client.may_await_prefix = true);
        }
        self.settle(coverage);
        let pause = rules::check_decodes(&decodes, &batch, &policy, &mut self.clients);
        coverage.guaranteed += u64::from(decodes.iter().any(|decode| decode.must_advance));
        coverage.pauses += u64::from(pause > 0);
        coverage.longest_pause = coverage.longest_pause.max(u64::from(pause));
    }

    /// Takes the events, and checks everything that must hold between two calls.
    fn settle(&mut self, coverage: &mut Coverage) {
        self.check();
        let events: Vec<Event> = self.scheduler.events().collect();
        for event in events {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    let client = alive(&mut self.clients, id);
                    assert!(
                        (cached_tokens as usize) < client.request.prompt.len(),
                        "at least one prompt token is computed"
                    );
                    coverage.prefix_hits += u64::from(cached_tokens > 0);
                    let attends_to_blocks = client.rules.is_some_and(|rules| !rules.is_causal);
                    coverage.block_hits += u64::from(cached_tokens > 0 && attends_to_blocks);
                    let has_states = self.limits.states.is_some();
                    coverage.reused_states += u64::from(has_states && cached_tokens > 0);
                    client.is_waiting = false;
                    client.was_admitted = true;
                    client.last_token_at.get_or_insert(self.clock.planned_at);
                    self.check_order(id);
                    self.trace = mix(self.trace ^ u64::from(cached_tokens));
                }
                Event::Preempted { id } => {
                    self.check_preempted(id);
                    let client = alive(&mut self.clients, id);
                    client.is_waiting = true;
                    client.lose_pages();
                    client.last_token_at = None;
                    coverage.repeated_preemptions += u64::from(client.preempted >= 3);
                    client.preempted += 1;
                    self.trace = mix(self.trace ^ 1);
                }
                Event::Displaced { id, tenant, .. } => {
                    self.check_displaced(id, tenant);
                    self.trace = mix(self.trace ^ 2);
                    coverage.displaced += 1;
                }
                Event::Finished { .. } => self.finish(event, coverage),
            }
        }
        for client in self.clients.values() {
            assert!(
                client.output.len() < client.answer.len(),
                "a request with its whole answer has ended"
            );
        }
        let state = self.scheduler.snapshot();
        assert_eq!(state.running + state.queued, self.clients.len());
        let pages = state.free + state.private + state.tree;
        assert_eq!(
            pages, self.limits.pages as usize,
            "M1: every page is free, private or in the tree"
        );
    }

    /// D2: A request ends with the expected output and reason.
    fn finish(&mut self, event: Event, coverage: &mut Coverage) {
        let Event::Finished {
            id,
            reason,
            tenant,
            prompt_tokens,
            output_tokens,
            ..
        } = event
        else {
            panic!("{event:?} is not the end of a request");
        };
        let mut client = self.clients.remove(&id).expect("a request ends once");
        if reason == FinishReason::Deadline {
            assert!(client.is_late(self.now), "the request was in time");
            client.end(reason);
            coverage.missed_deadlines += 1;
        }
        self.settle_account(&client);
        let request = client.request;
        assert_eq!((reason, tenant), (client.reason, request.tenant));
        assert_eq!(client.output, client.answer, "D2: the same answer as alone");
        assert_eq!(prompt_tokens as usize, request.prompt.len());
        assert_eq!(output_tokens as usize, client.output.len());
        let conversation = [request.prompt, client.output].concat();
        self.traffic.remember(id, conversation);
        self.trace = mix(self.trace ^ u64::from(output_tokens));
        coverage.finished += 1;
    }
}

fn random_limits(random: &mut Random) -> Limits {
    let pages = random.pick(&[4, 8, 12, 12, 16, 16, 24, 64]);
    let limits = Limits {
        pages,
        max_running: random.pick(&[1, 4, 8, 12]),
        max_queued: random.between(1, 12) as u32,
        max_queued_time: random.pick(&[100_000, 10_000_000]),
        step_tokens: random.between(1, 96) as u32,
        prefill_chunk: random.between(16, 64) as u32,
        max_sequence_tokens: random.between(16 * u64::from(pages) / 2, 16 * u64::from(pages) + 8)
            as u32,
        states: None,
        diffusion: None,
    };
    let limits = Limits {
        states: some_states(&limits),
        ..limits
    };
    Limits {
        diffusion: some_diffusion(random, &limits),
        ..limits
    }
}

/// Sets what the model drafts for the rows of a step: some first tokens of the right ones. Now and
/// then the pass that drafts fails.
fn set_own_drafts(
    step: &mut Step<'_>,
    clients: &BTreeMap<SequenceId, Client>,
    random: &mut Random,
    coverage: &mut Coverage,
) {
    let mut drafts = Vec::new();
    for row in step.batch().rows().iter().filter(|row| row.own_drafts > 0) {
        let client = &clients[&row.sequence];
        let right = client.answer[client.output.len()..].iter().copied();
        let count = row.own_drafts as usize;
        let right = right
            .take(random.index(count + 1))
            .chain(std::iter::repeat(0));
        drafts.extend(right.take(count));
    }
    coverage.own_drafts += drafts.len() as u64;
    if !drafts.is_empty() && !random.percent(20) {
        step.set_drafts(&drafts);
    }
}

/// Gives every client the tokens of its row, some of which fail, and returns the samples.
fn receive(
    (batch, next): (&Batch, Vec<(Row, Vec<TokenId>)>),
    (clients, model): (&mut BTreeMap<SequenceId, Client>, &mut FakeModel),
    now: Micros,
    random: &mut Random,
    coverage: &mut Coverage,
) -> Vec<Sampled> {
    let mut sampled = Vec::new();
    for (row, tokens) in next {
        let fails_at =
            (random.below(400) == 0 && row.logits > 0).then(|| random.index(row.logits as usize));
        let known = row.len() - rules::drafts_of(&row, clients);
        let drafts = &batch.tokens(&row)[known..];
        let client = alive(clients, row.sequence);
        if client.has_failed() {
            sampled.extend(tokens.iter().map(|_| Sampled::Void));
            continue;
        }
        if client.is_unmasking(row.start as usize) {
            let begin = row.start as usize / client.block() * client.block();
            sampled.extend(client.unmask(&tokens, fails_at));
            if client.has_failed() {
                model.erase_row(batch, row.sequence);
                coverage.failed_rows += 1;
            }
            client.computed = Some(begin);
            coverage.part_passes += u64::from(row.len() < client.block());
            coverage.restored_blocks += u64::from(row.logits == 0);
            if row.logits > 0 {
                client.last_token_at = Some(now);
            }
            continue;
        }
        // Without the random numbers, so that seeds keep their worlds.
        client.rows += 1;
        let chance = mix(client.rows ^ client.number << 32);
        let has_masks =
            client.rules.is_none() && client.number.is_multiple_of(3) && chance.is_multiple_of(4);
        let defers_at = has_masks.then_some((chance >> 32) as usize % row.logits.max(1) as usize);
        let scores = client.scores_of(&row);
        coverage.scored_rows += u64::from(scores > 0);
        sampled.extend(client.score(scores, fails_at));
        let drawn = &tokens[if client.has_failed() {
            tokens.len()
        } else {
            scores
        }..];
        let [fails_at, defers_at] = [fails_at, defers_at].map(|at| at?.checked_sub(scores));
        let mut own = client.receive(drawn, drafts, fails_at, defers_at);
        own.resize(tokens.len() - scores, Sampled::Void);
        let has_deferred = own.contains(&Sampled::Deferred);
        coverage.deferred_draws += u64::from(has_deferred);
        if client.has_failed() {
            model.erase_row(batch, row.sequence);
            coverage.failed_rows += 1;
        }
        let computed = match row.logits as usize - scores {
            0 => row.end(),
            _ => client.known() - 1,
        };
        client.computed = Some(computed);
        client.scored = client
            .scored
            .max(row.end().min(client.request.prompt.len()));
        if matches!(own.first(), Some(Sampled::Token(_) | Sampled::Failed)) {
            client.last_token_at = Some(now);
        }
        sampled.extend(own);
    }
    sampled
}

/// Fails some rows of a batch.
fn fail_some(
    batch: &Batch,
    (clients, model): (&mut BTreeMap<SequenceId, Client>, &mut FakeModel),
    random: &mut Random,
) -> Vec<SequenceId> {
    let mut failed: Vec<_> = batch.rows().iter().map(|row| row.sequence).collect();
    failed.retain(|_| random.percent(15));
    for &id in &failed {
        alive(clients, id).fail();
        model.erase_row(batch, id);
    }
    failed
}

/// Adds a batch to the hash of everything that happened.
fn trace(mut trace: u64, batch: &Batch) -> u64 {
    for row in batch.rows() {
        trace = mix(trace ^ u64::from(row.start)).wrapping_add(row.len() as u64);
        for page in batch.pages(row) {
            trace = mix(trace ^ page.index() as u64);
        }
    }
    trace
}
