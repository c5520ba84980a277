//! A world from a seed: tenants, requests, cancels, steps that fail; and what must hold after each of them.

use std::collections::{BTreeMap, BTreeSet};

use sterna_scheduler::{
    Batch, Event, FinishReason, Limits, Micros, PAGE_TOKENS, Plan, Policy, Refusal, Request, Row,
    Sampled, Scheduler, SequenceId, TenantId, TenantPolicy, TokenId,
};

use crate::Counts;
use crate::checks::Account;
use crate::clock::{Clock, Learnt, Pace};
use crate::model::{Client, Model, Rng, mix};
use crate::rules::{self, check_batch, check_row};
use crate::terms::{random_cost, random_policy};

pub(crate) const TURNS_A_WORLD: u64 = 400;

/// As the scheduler's.
pub(crate) const PATIENCE: u32 = 32;

/// Lengths of outputs: of any kind, or so long that memory runs out after the admission.
pub(crate) const LENGTHS: [[u32; 6]; 2] = [[1, 2, 15, 16, 17, 60], [1, 80, 120, 160, 200, 240]];

pub(crate) fn alive(clients: &mut BTreeMap<SequenceId, Client>, id: SequenceId) -> &mut Client {
    clients.get_mut(&id).expect("the request has not ended")
}

/// What becomes of a step.
#[derive(PartialEq, Eq)]
pub(crate) enum Fate {
    Committed,
    Dropped,
    Failed,
}

impl Fate {
    fn random(rng: &mut Rng) -> Fate {
        match rng.below(100) {
            0..4 => Fate::Dropped,
            4..6 => Fate::Failed,
            _ => Fate::Committed,
        }
    }
}

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) rng: Rng,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) scheduler: Scheduler,
    pub(crate) terms: Vec<TenantPolicy>,  // By tenant.
    pub(crate) public: Vec<Vec<TokenId>>, // The public prefixes, in whole pages.
    pub(crate) accounts: Vec<Account>,    // By tenant.
    pub(crate) clock: Clock,
    pub(crate) predicted: Micros, // Of all committed steps.
    pub(crate) steps: u64,
    pub(crate) asked: u64,
    pub(crate) refused: BTreeSet<u64>, // Which of those asked.
    pub(crate) skipped: BTreeSet<u64>, // Of those to be asked: they are not.
    pub(crate) model: Model,
    pub(crate) clients: BTreeMap<SequenceId, Client>,
    pub(crate) blocks: Vec<Vec<TokenId>>, // What prompts are made of, so that many begin alike.
    pub(crate) ended: Vec<(SequenceId, Vec<TokenId>)>, // With their conversations, which may go on.
    pub(crate) tenants: u64,
    pub(crate) load: u64, // Chance in percent that a turn brings a request.
    pub(crate) lengths: [u32; 6], // Of outputs.
    pub(crate) longest: u64, // Blocks in a prompt.
    pub(crate) latest: Option<Request>,
    pub(crate) submitted: u64,
    pub(crate) now: Micros,
    pub(crate) trace: u64,
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
        let mut rng = Rng(mix(seed));
        let pages = *rng.pick(&[4, 8, 12, 12, 16, 16, 24, 64]);
        let limits = Limits {
            pages,
            max_running: *rng.pick(&[1, 4, 8, 12]),
            max_queued: rng.between(1, 12) as u32,
            max_queued_time: *rng.pick(&[100_000, 10_000_000]),
            step_tokens: rng.between(1, 96) as u32,
            prefill_chunk: rng.between(16, 64) as u32,
            max_sequence_tokens: rng.between(16 * u64::from(pages) / 2, 16 * u64::from(pages) + 8)
                as u32,
        };
        let policy = random_policy(&mut rng);
        let alphabet = rng.between(2, 3);
        let block = |rng: &mut Rng| -> Vec<TokenId> {
            let tokens = (0..PAGE_TOKENS).map(|_| rng.below(alphabet) as TokenId);
            tokens.collect()
        };
        let blocks: Vec<_> = (0..3).map(|_| block(&mut rng)).collect();
        let mut scheduler = Scheduler::new(limits.clone(), policy.clone());
        let cost = random_cost(&mut rng);
        scheduler.calibrate(cost);
        let clock = Clock::random(&mut rng, cost);
        let public = if pages >= 12 && rng.percent(50) {
            vec![[&blocks[0][..], &blocks[1]].concat(), blocks[2].clone()]
        } else {
            Vec::new()
        };
        for prefix in &public {
            scheduler.declare_public(prefix);
        }
        let mut world = World {
            seed,
            policy,
            scheduler,
            terms: Vec::new(),
            public,
            accounts: Vec::new(),
            clock,
            predicted: 0,
            asked: 0,
            refused: BTreeSet::new(),
            skipped: BTreeSet::new(),
            model: Model {
                cells: vec![None; pages as usize * PAGE_TOKENS],
                alphabet,
            },
            limits,
            clients: BTreeMap::new(),
            blocks,
            ended: Vec::new(),
            tenants: rng.between(2, 4),
            load: rng.between(20, 60),
            lengths: *rng.pick(&LENGTHS),
            longest: *rng.pick(&[1, 4]),
            latest: None,
            submitted: 0,
            now: 0,
            steps: 0,
            trace: 0,
            rng,
        };
        world.accounts = vec![Account::default(); world.tenants as usize];
        world.set_tenants();
        world
    }

    /// Tokens of one sequence of a tenant at most.
    pub(crate) fn longest_sequence(&self, tenant: TenantId) -> usize {
        let reserved: usize = self
            .public
            .iter()
            .map(|prefix| prefix.len() / PAGE_TOKENS)
            .sum();
        let left = self.limits.pages as usize - reserved;
        let cap = self.terms[tenant.0 as usize].max_pages as usize;
        (cap.min(left) * PAGE_TOKENS).min(self.limits.max_sequence_tokens as usize)
    }

    /// Lives, drains, and returns a hash of everything that happened.
    pub(crate) fn run(&mut self, seen: &mut Counts) -> u64 {
        for _ in 0..TURNS_A_WORLD {
            self.turn(seen);
        }
        self.scheduler.drain();
        let length = |client: &Client| client.request.prompt.len() + client.answer.len();
        let work: usize = self.clients.values().map(length).sum();
        for _ in 0..3 * work + 200 {
            self.now += 100;
            self.step(seen);
            if self.clients.is_empty() {
                break;
            }
        }
        assert!(self.clients.is_empty(), "S9: a drain ends");
        let refused = self.scheduler.submit(self.now, self.small_request());
        assert_eq!(refused, Err(Refusal::Draining));

        let end = self.scheduler.snapshot();
        let public: usize = self.public.iter().map(|p| p.len() / PAGE_TOKENS).sum();
        assert_eq!(end.private, 0, "M8: nobody holds a page");
        assert!(end.pinned <= public, "M8: only public pages are pinned");
        seen.evictions += end.evictions;
        seen.preemptions += end.preemptions;
        seen.redirects += end.redirects;
        seen.deferrals += end.deferrals;
        seen.copies += end.copies;
        seen.drafted += end.drafted;
        seen.accepted += end.accepted;
        let difference = self.predicted.abs_diff(self.service());
        assert!(
            difference <= self.tenants + self.steps,
            "S7: charges are what was predicted"
        );
        self.scheduler.reset_prefix_cache();
        self.scheduler.check();
        assert_eq!(
            self.scheduler.snapshot().tree,
            end.pinned,
            "M8: only public pages stay"
        );
        self.trace
    }

    pub(crate) fn turn(&mut self, seen: &mut Counts) {
        self.now += self.rng.below(1000);
        if self.rng.percent(1) && self.rng.percent(50) {
            self.set_tenants();
            seen.reloads += 1;
        }
        if self.rng.percent(1) && self.rng.percent(20) {
            self.clock.cost = random_cost(&mut self.rng);
            self.clock.learnt = Learnt::nothing();
            self.scheduler.calibrate(self.clock.cost);
            seen.calibrations += 1;
        }
        while self.rng.percent(self.load) {
            self.submit(seen);
        }
        if self.rng.percent(3) {
            self.cancel(seen);
        }
        if self.rng.percent(1) {
            self.scheduler.reset_prefix_cache();
            self.scheduler.check();
            seen.resets += 1;
        }
        self.step(seen);
    }

    pub(crate) fn submit(&mut self, seen: &mut Counts) {
        let again = self.latest.clone().filter(|_| self.rng.percent(40));
        let request = again.unwrap_or_else(|| self.request());
        self.latest = Some(request.clone());
        self.asked += 1;
        if self.skipped.contains(&self.asked) {
            return;
        }
        seen.submits += 1;
        let before = self.picture();
        let needed = request.prompt.len() + request.max_new_tokens as usize;
        let can_fit = needed <= self.longest_sequence(request.tenant);
        match self.scheduler.submit(self.now, request.clone()) {
            Ok(id) => {
                assert!(can_fit, "S3: it could not even run alone");
                assert!(before.0.queued < self.limits.max_queued as usize, "S12");
                self.check_rates(&request, &before);
                let mut client = Client::new(self.submitted, request, self.model.alphabet);
                client.arrived = self.now;
                client.public = self.public_of(client.request.tenant);
                let stranger = self.clients.insert(id, client);
                assert!(stranger.is_none(), "a handle is not given twice");
                self.submitted += 1;
            }
            Err(refusal) => {
                assert_eq!(can_fit, !matches!(refusal, Refusal::TooLong { .. }));
                match refusal {
                    Refusal::RateLimited { .. } => seen.rate_limited += 1,
                    Refusal::TenantQueueFull { .. } => seen.tenant_queue_full += 1,
                    Refusal::Overloaded { .. } => seen.overloaded += 1,
                    Refusal::Deadline { .. } => seen.too_late += 1,
                    _ => {}
                }
                assert_eq!(self.picture(), before, "S10: a refusal leaves no trace");
                self.refused.insert(self.asked);
                seen.refusals += 1;
            }
        }
        self.check();
    }

    /// The public prefixes that a tenant may use now.
    fn public_of(&self, tenant: TenantId) -> Vec<Vec<TokenId>> {
        let allowed = self.terms[tenant.0 as usize].public.iter();
        allowed
            .map(|prefix| self.public[prefix.0 as usize].clone())
            .collect()
    }

    pub(crate) fn small_request(&self) -> Request {
        Request {
            prompt: vec![0],
            max_new_tokens: 1,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            tenant: TenantId(0),
            ..Request::default()
        }
    }

    pub(crate) fn request(&mut self) -> Request {
        let mut prompt = Vec::new();
        if !self.ended.is_empty() && self.rng.percent(25) {
            prompt.extend_from_slice(&self.rng.pick(&self.ended).1);
        } else {
            for _ in 0..=self.rng.below(self.longest) {
                prompt.extend_from_slice(self.rng.pick::<Vec<_>>(&self.blocks));
            }
        }
        match self.rng.below(4) {
            0 => {}
            1 => drop(prompt.pop()),
            2 => prompt.push(self.rng.below(self.model.alphabet) as TokenId),
            _ => {
                for _ in 0..self.rng.below(40) {
                    prompt.push(self.rng.below(self.model.alphabet) as TokenId);
                }
            }
        }
        if prompt.is_empty() {
            prompt.push(0);
        }
        let tenant = TenantId(self.rng.below(self.tenants) as u32);
        let room = self.longest_sequence(tenant);
        let mut max_new_tokens = *self.rng.pick(&self.lengths);
        if self.rng.percent(95) {
            prompt.truncate((room - 1).max(1));
            max_new_tokens = max_new_tokens
                .min((room.saturating_sub(prompt.len())) as u32)
                .max(1);
        }
        let slower = if self.clock.pace == Pace::AtOnce {
            1
        } else {
            10
        };
        Request {
            prompt,
            max_new_tokens,
            min_new_tokens: self.rng.below(30) as u32,
            stop_tokens: vec![0; usize::from(self.rng.percent(30))],
            tenant,
            is_another_choice: self.rng.percent(10),
            first_token_within: self.rng.percent(4).then(|| self.rng.below(20_000) * slower),
            ends_within: self.rng.percent(4).then(|| self.rng.below(60_000) * slower),
        }
    }

    /// Somebody goes away: a client in any state, or one who is long gone.
    pub(crate) fn cancel(&mut self, seen: &mut Counts) {
        if let Some(&(id, _)) = self.ended.last() {
            let is_alive = self.scheduler.cancel(id, FinishReason::Cancelled);
            assert!(!is_alive, "a stale handle names nobody");
        }
        let alive = self.clients.len() as u64;
        if alive == 0 {
            return;
        }
        let number = self.rng.below(alive) as usize;
        let nth = self.clients.iter_mut().nth(number);
        let (&id, client) = nth.expect("there are more");
        client.reason = *self.rng.pick(&[
            FinishReason::Cancelled,
            FinishReason::Stop,
            FinishReason::Shutdown,
        ]);
        client.answer.truncate(client.output.len());
        seen.cancels += 1;
        seen.cancels_while_waiting += u64::from(client.is_waiting);
        let reason = client.reason;
        let before = self.scheduler.snapshot();
        assert!(self.scheduler.cancel(id, reason));
        assert!(!self.scheduler.cancel(id, FinishReason::Error));
        self.check_pages_back(&before);
        self.settle(seen);
    }

    pub(crate) fn step(&mut self, seen: &mut Counts) {
        let before = self.scheduler.snapshot();
        let service = self.service();
        let decodes = rules::decodes(&self.clients);
        let policy = self.policy.clone();
        self.clock.planned_at = self.now;
        seen.plans += 1;
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            self.settle(seen);
            assert!(self.clients.is_empty(), "S3: idle, and somebody waits");
            return;
        };
        let batch = step.batch().clone();
        let (shape, predicted) = (step.shape(), step.predicted());
        for row in batch.rows() {
            check_row(&step, row, &self.clients[&row.sequence]);
            seen.chunks += u64::from(row.logits == 0);
        }
        check_batch(&batch, &self.limits, &policy);
        let time = (shape, predicted);
        self.clock.check_time(&policy, &batch, time, &self.clients);
        self.trace = trace(self.trace, &batch);
        seen.steps += 1;

        let fate = Fate::random(&mut self.rng);
        let breaks_off = || fate != Fate::Committed && self.rng.percent(30);
        let next = self.model.forward(&batch, &self.clients, seen, breaks_off);
        let took = self.clock.took(&mut self.rng, predicted);
        match fate {
            Fate::Committed => {
                self.now += took;
                let people = (&mut self.clients, &mut self.model);
                let sampled = receive((&batch, next), people, self.now, &mut self.rng, seen);
                step.commit(self.now, &sampled);
                let raw = self.clock.cost.predict(shape);
                self.clock.learnt.learn(raw, took * 1000);
                seen.corrected += u64::from(self.clock.learnt.is_much());
                self.predicted += predicted;
                self.steps += 1;
                self.check_charges(service, predicted);
            }
            Fate::Dropped => {
                drop(step);
                self.check_evictions(&before);
                seen.dropped_steps += 1;
            }
            Fate::Failed => {
                let mut ids: Vec<_> = batch.rows().iter().map(|row| row.sequence).collect();
                ids.retain(|_| self.rng.percent(15));
                step.fail(&ids);
                for id in ids {
                    alive(&mut self.clients, id).fail();
                }
                seen.failed_steps += 1;
            }
        }
        if self.scheduler.snapshot().deferrals > before.deferrals {
            let waiting = self.clients.values_mut().filter(|client| client.is_waiting);
            waiting.for_each(|client| client.may_be_passed = true);
        }
        self.settle(seen);
        let rested = rules::check_decodes(&decodes, &batch, &policy, &mut self.clients);
        seen.rests += u64::from(rested > 0);
        seen.longest_rest = seen.longest_rest.max(u64::from(rested));
    }

    /// Takes the events, and checks all that must hold between two calls.
    pub(crate) fn settle(&mut self, seen: &mut Counts) {
        self.check();
        let events: Vec<Event> = self.scheduler.events().collect();
        for event in events {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    let prompt = &self.clients[&id].request.prompt;
                    assert!((cached_tokens as usize) < prompt.len(), "one is computed");
                    seen.prefix_hits += u64::from(cached_tokens > 0);
                    let client = alive(&mut self.clients, id);
                    client.is_waiting = false;
                    client.was_admitted = true;
                    client.last_token_at.get_or_insert(self.clock.planned_at);
                    self.check_order(id);
                    self.trace = mix(self.trace ^ u64::from(cached_tokens));
                }
                Event::Preempted { id } => {
                    let client = alive(&mut self.clients, id);
                    client.is_waiting = true;
                    client.computed = None;
                    client.last_token_at = None;
                    seen.preempted_again += u64::from(client.preempted >= 3);
                    client.preempted += 1;
                    self.trace = mix(self.trace ^ 1);
                }
                Event::Finished {
                    id,
                    reason,
                    tenant,
                    prompt_tokens,
                    output_tokens,
                    ..
                } => {
                    let mut client = self.clients.remove(&id).expect("a request ends once");
                    if reason == FinishReason::Deadline {
                        assert!(client.is_late(self.now), "it was in time");
                        client.reason = reason;
                        client.answer.truncate(client.output.len());
                        seen.late += 1;
                    }
                    let request = client.request;
                    let account = &mut self.accounts[tenant.0 as usize];
                    account.accepted -=
                        i64::from(!client.was_admitted && !request.is_another_choice);
                    assert_eq!((reason, tenant), (client.reason, request.tenant));
                    assert_eq!(client.output, client.answer, "D2: as alone");
                    assert_eq!(prompt_tokens as usize, request.prompt.len());
                    assert_eq!(output_tokens as usize, client.output.len());
                    let conversation = [request.prompt, client.output].concat();
                    self.remember(id, conversation);
                    self.trace = mix(self.trace ^ u64::from(output_tokens));
                    seen.finished += 1;
                }
            }
        }
        for client in self.clients.values() {
            assert!(client.output.len() < client.answer.len(), "it has ended");
        }
        let state = self.scheduler.snapshot();
        assert_eq!(state.running + state.queued, self.clients.len());
        let pages = state.free + state.private + state.tree;
        assert_eq!(pages, self.limits.pages as usize, "M1");
    }

    pub(crate) fn remember(&mut self, id: SequenceId, conversation: Vec<TokenId>) {
        if self.ended.len() == 4 {
            self.ended.remove(0);
        }
        self.ended.push((id, conversation));
    }
}

/// Tells everybody what the model said about their rows, some of which went wrong, and returns it.
fn receive(
    (batch, next): (&Batch, Vec<(Row, Vec<TokenId>)>),
    (clients, model): (&mut BTreeMap<SequenceId, Client>, &mut Model),
    now: Micros,
    rng: &mut Rng,
    seen: &mut Counts,
) -> Vec<Sampled> {
    let mut sampled = Vec::new();
    for (row, tokens) in next {
        let fails_at = (rng.below(400) == 0 && row.logits > 0)
            .then(|| rng.below(u64::from(row.logits)) as usize);
        let known = row.len() - rules::drafts_of(&row);
        let drafts = &batch.tokens(&row)[known..];
        let client = alive(clients, row.sequence);
        let own = client.receive(&tokens, drafts, fails_at);
        if own.contains(&Sampled::Failed) {
            model.spoil(batch, row.sequence);
            seen.failed_rows += 1;
        }
        let reached = if row.logits == 0 {
            row.end()
        } else {
            client.known() - 1
        };
        client.computed = Some(reached);
        if row.logits > 0 {
            client.last_token_at = Some(now);
        }
        sampled.extend(own);
    }
    sampled
}

/// Continues the hash of everything that happened.
pub(crate) fn trace(mut trace: u64, batch: &Batch) -> u64 {
    for row in batch.rows() {
        trace = mix(trace ^ u64::from(row.start)).wrapping_add(row.len() as u64);
        for page in batch.pages(row) {
            trace = mix(trace ^ page.index() as u64);
        }
    }
    trace
}
