//! A world from a seed: tenants, requests, cancels, steps that fail; and what must hold after each of them.

use std::collections::{BTreeMap, BTreeSet};

use sterna_scheduler::{
    Band, Batch, Budget, CostModel, Event, FinishReason, Growth, Limits, MAX_DRAFTED_TOKENS,
    Micros, Order, PAGE_TOKENS, PageCopy, Plan, Policy, PublicPrefix, Rate, Refusal, Request, Row,
    Sampled, Scheduler, SequenceId, Step, TenantId, TenantPolicy, TokenId,
};

use crate::Counts;
use crate::model::{Client, Model, Rng, mix};

pub(crate) const TURNS_A_WORLD: u64 = 400;

/// As the scheduler's.
pub(crate) const PATIENCE: u32 = 32;
pub(crate) const PREFILL_FLOOR: usize = 8;

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

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) rng: Rng,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) scheduler: Scheduler,
    pub(crate) terms: Vec<TenantPolicy>,  // By tenant.
    pub(crate) public: Vec<Vec<TokenId>>, // The public prefixes, in whole pages.
    pub(crate) predicted: Micros,         // Of all committed steps.
    pub(crate) steps: u64,
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
        scheduler.calibrate(random_cost(&mut rng));
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
            predicted: 0,
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
        world.set_tenants();
        world
    }

    /// Gives every tenant terms, other ones than before.
    pub(crate) fn set_tenants(&mut self) {
        let reserved: usize = self
            .public
            .iter()
            .map(|prefix| prefix.len() / PAGE_TOKENS)
            .sum();
        let pages = self.limits.pages - reserved as u32;
        let all = self.public.len() as u32;
        let rng = &mut self.rng;
        let terms = (0..self.tenants).map(|_| {
            let is_capped = rng.percent(30);
            let max_pages = if is_capped {
                rng.between(1, u64::from(pages)) as u32
            } else {
                u32::MAX
            };
            let rate = |rng: &mut Rng| {
                rng.percent(15).then(|| Rate {
                    per_minute: rng.between(60_000, 6_000_000) as u32,
                    burst: rng.between(1, 100) as u32,
                })
            };
            TenantPolicy {
                band: *rng.pick(&[
                    Band::Interactive,
                    Band::Standard,
                    Band::Standard,
                    Band::Batch,
                ]),
                weight: rng.between(1, 4) as u32,
                requests: rate(rng),
                tokens: rate(rng),
                max_running: *rng.pick(&[1, 2, u32::MAX, u32::MAX]),
                max_queued: *rng.pick(&[1, 4, u32::MAX]),
                max_queued_time: *rng.pick(&[20_000, Micros::MAX, Micros::MAX]),
                guaranteed_pages: rng
                    .below(u64::from(pages / 4).max(1))
                    .min(u64::from(max_pages)) as u32,
                max_pages,
                public: (0..all)
                    .filter(|_| rng.percent(70))
                    .map(PublicPrefix)
                    .collect(),
            }
        });
        self.terms = terms.collect();
        let numbered: Vec<_> = (0..)
            .map(TenantId)
            .zip(self.terms.iter().cloned())
            .collect();
        self.scheduler
            .set_tenants(&numbered)
            .expect("the terms are possible");
        self.scheduler.check();
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
    pub(crate) fn run(mut self, seen: &mut Counts) -> u64 {
        for _ in 0..TURNS_A_WORLD {
            self.turn(seen);
        }
        self.scheduler.drain();
        let length = |client: &Client| client.request.prompt.len() + client.answer.len();
        let work: usize = self.clients.values().map(length).sum();
        for _ in 0..3 * work + 200 {
            self.now += 100;
            self.step(seen);
        }
        assert!(self.clients.is_empty(), "a drain ends");
        let refused = self.scheduler.submit(self.now, self.small_request());
        assert_eq!(refused, Err(Refusal::Draining));

        let end = self.scheduler.snapshot();
        let public: usize = self.public.iter().map(|p| p.len() / PAGE_TOKENS).sum();
        assert_eq!(end.private, 0, "nobody holds a page");
        assert!(end.pinned <= public, "only public pages are pinned");
        seen.evictions += end.evictions;
        seen.preemptions += end.preemptions;
        seen.redirects += end.redirects;
        seen.deferrals += end.deferrals;
        seen.copies += end.copies;
        seen.drafted += end.drafted;
        seen.accepted += end.accepted;
        let service =
            (0..self.tenants as u32).map(|id| self.scheduler.tenant(TenantId(id)).service);
        let (service, tenants) = (service.sum::<Micros>(), self.tenants);
        let difference = self.predicted.abs_diff(service);
        assert!(
            difference <= tenants + self.steps,
            "charges are what was predicted"
        );
        self.scheduler.reset_prefix_cache();
        self.scheduler.check();
        assert_eq!(
            self.scheduler.snapshot().tree,
            end.pinned,
            "only public pages stay"
        );
        self.trace
    }

    pub(crate) fn turn(&mut self, seen: &mut Counts) {
        self.now += self.rng.below(1000);
        if self.rng.percent(1) && self.rng.percent(50) {
            self.set_tenants();
            seen.reloads += 1;
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
        let before = self.scheduler.snapshot();
        let needed = request.prompt.len() + request.max_new_tokens as usize;
        let can_fit = needed <= self.longest_sequence(request.tenant);
        match self.scheduler.submit(self.now, request.clone()) {
            Ok(id) => {
                assert!(can_fit && before.queued < self.limits.max_queued as usize);
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
                assert_eq!(
                    self.scheduler.snapshot(),
                    before,
                    "a refusal leaves no trace"
                );
                seen.refusals += 1;
            }
        }
        self.scheduler.check();
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
        Request {
            prompt,
            max_new_tokens,
            min_new_tokens: self.rng.below(30) as u32,
            stop_tokens: vec![0; usize::from(self.rng.percent(30))],
            tenant,
            is_another_choice: self.rng.percent(10),
            first_token_within: self.rng.percent(4).then(|| self.rng.below(20_000)),
            ends_within: self.rng.percent(4).then(|| self.rng.below(60_000)),
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
        assert!(self.scheduler.cancel(id, client.reason));
        assert!(!self.scheduler.cancel(id, FinishReason::Error));
        self.settle(seen);
    }

    pub(crate) fn step(&mut self, seen: &mut Counts) {
        let deferrals = self.scheduler.snapshot().deferrals;
        let (now, policy) = (self.now, self.policy.clone());
        let Plan::Step(step) = self.scheduler.plan(now) else {
            self.settle(seen);
            assert!(self.clients.is_empty(), "idle, and somebody waits");
            return;
        };
        let batch = step.batch().clone();
        let predicted = step.predicted();
        check_batch(&batch, &self.limits, &policy);
        for row in batch.rows() {
            check_row(&step, row, &self.clients[&row.sequence]);
            seen.chunks += u64::from(row.logits == 0);
        }
        self.trace = trace(self.trace, &batch);
        seen.steps += 1;

        let fate = match self.rng.below(100) {
            0..4 => Fate::Dropped,
            4..6 => Fate::Failed,
            _ => Fate::Committed,
        };
        let breaks_off = || fate != Fate::Committed && self.rng.percent(30);
        let next = self.model.forward(&batch, &self.clients, seen, breaks_off);
        match fate {
            Fate::Committed => {
                let mut sampled = Vec::new();
                for (row, tokens) in next {
                    let fails_at = (self.rng.below(400) == 0 && row.logits > 0)
                        .then(|| self.rng.below(u64::from(row.logits)) as usize);
                    let known = row.len() - (row.logits as usize).saturating_sub(1);
                    let drafts = &batch.tokens(&row)[known..];
                    let client = alive(&mut self.clients, row.sequence);
                    let own = client.receive(&tokens, drafts, fails_at);
                    if own.contains(&Sampled::Failed) {
                        self.model.spoil(&batch, row.sequence);
                        seen.failed_rows += 1;
                    }
                    let reached = if row.logits == 0 {
                        row.end()
                    } else {
                        client.known() - 1
                    };
                    client.computed = Some(reached);
                    sampled.extend(own);
                }
                step.commit(now, &sampled);
                self.predicted += predicted;
                self.steps += 1;
            }
            Fate::Dropped => {
                drop(step);
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
        if self.scheduler.snapshot().deferrals > deferrals {
            let waiting = self.clients.values_mut().filter(|client| client.is_waiting);
            waiting.for_each(|client| client.may_be_passed = true);
        }
        self.settle(seen);
    }

    /// Within a tenant, those who come later may go past only so often, but while one waits for a prefix being computed.
    pub(crate) fn check_order(&mut self, id: SequenceId) {
        let admitted = &self.clients[&id];
        let (number, tenant) = (admitted.number, admitted.request.tenant);
        for client in self.clients.values_mut() {
            let is_passed = client.is_waiting && client.number < number;
            if is_passed && client.request.tenant == tenant {
                client.passed += 1;
                assert!(
                    client.passed <= 2 * PATIENCE || client.may_be_passed,
                    "passed for ever"
                );
            }
        }
    }

    /// Takes the events, and checks all that must hold between two calls.
    pub(crate) fn settle(&mut self, seen: &mut Counts) {
        self.scheduler.check();
        let events: Vec<Event> = self.scheduler.events().collect();
        for event in events {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    let prompt = &self.clients[&id].request.prompt;
                    assert!((cached_tokens as usize) < prompt.len(), "one is computed");
                    seen.prefix_hits += u64::from(cached_tokens > 0);
                    alive(&mut self.clients, id).is_waiting = false;
                    self.check_order(id);
                    self.trace = mix(self.trace ^ u64::from(cached_tokens));
                }
                Event::Preempted { id } => {
                    let client = alive(&mut self.clients, id);
                    client.is_waiting = true;
                    client.computed = None;
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
                    assert_eq!((reason, tenant), (client.reason, request.tenant));
                    assert_eq!(client.output, client.answer, "as alone");
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
        assert_eq!(pages, self.limits.pages as usize);
    }

    pub(crate) fn remember(&mut self, id: SequenceId, conversation: Vec<TokenId>) {
        if self.ended.len() == 4 {
            self.ended.remove(0);
        }
        self.ended.push((id, conversation));
    }
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

/// A row holds the truth, then drafts, and wants logits from its last known token on.
pub(crate) fn check_row(step: &Step<'_>, row: &Row, client: &Client) {
    let truth: Vec<TokenId> = (0..client.known()).map(|at| client.token(at)).collect();
    assert_eq!(step.history(row.sequence), truth);
    let prompt_len = client.request.prompt.len();
    assert_eq!(step.prompt_len(row.sequence), prompt_len);
    let tokens = step.batch().tokens(row);
    let known = row.len() - (row.logits as usize).saturating_sub(1);
    let end = row.start as usize + known;
    assert_eq!(tokens[..known], truth[row.start as usize..end]);
    assert_eq!(row.logits > 0, end == truth.len());
    let start = row.start as usize;
    assert_eq!(
        client.computed.unwrap_or(start),
        start,
        "{row:?} repeats or skips"
    );
    let left = client.request.max_new_tokens as usize - client.output.len();
    assert!((row.logits as usize) <= left, "{row:?} drafts too much");
}

/// A batch keeps to its budget, and writes no page that another row can see.
pub(crate) fn check_batch(batch: &Batch, limits: &Limits, policy: &Policy) {
    let rows = batch.rows();
    assert!(!rows.is_empty() && rows.len() <= limits.max_running as usize);
    let drafts = |row: &Row| (row.logits as usize).saturating_sub(1);
    let drafted: usize = rows.iter().map(drafts).sum();
    let decodes = rows
        .iter()
        .filter(|row| row.len() - drafts(row) == 1)
        .count();
    let tokens = match policy.budget {
        Budget::Tokens(tokens) => tokens.min(limits.step_tokens),
        Budget::Time { .. } | Budget::PrefillFirst => limits.step_tokens,
    };
    let most = (tokens as usize).max(decodes + PREFILL_FLOOR);
    assert!(batch.token_count() - drafted <= most);
    assert!(batch.token_count() <= limits.max_batch_tokens());
    let longest = rows.iter().map(drafts).max().unwrap_or(0);
    assert!(drafted <= MAX_DRAFTED_TOKENS && longest <= policy.max_draft as usize);
    let wanted: usize = rows.iter().map(|row| row.logits as usize).sum();
    assert_eq!(batch.logits_count(), wanted);
    let mut targets = BTreeSet::new();
    for copy in batch.copies() {
        assert!(targets.insert(copy.to), "{copy:?} overwrites another copy");
    }
    for row in rows {
        assert!(row.len() - drafts(row) <= limits.prefill_chunk as usize);
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
            assert_eq!(seen, None, "{row:?} writes what {other:?} sees");
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

pub(crate) fn random_policy(rng: &mut Rng) -> Policy {
    let time = |rng: &mut Rng| {
        let least = rng.between(100, 1000);
        Budget::Time {
            inter_token_target: rng.between(1000, 20_000),
            least,
            most: rng.between(least, 20_000),
        }
    };
    Policy {
        order: match rng.below(6) {
            0 => Order::FirstCome,
            1 => Order::LongestPrefix,
            2 => Order::FairShare { slack: 0 },
            _ => Order::FairShare {
                slack: rng.between(1, 20_000),
            },
        },
        budget: match rng.below(6) {
            0 => Budget::Tokens(rng.between(1, 96) as u32),
            1 => Budget::PrefillFirst,
            _ => time(rng),
        },
        growth: *rng.pick(&[
            Growth::Least,
            Growth::Least,
            Growth::Least,
            Growth::Expected,
            Growth::Most,
        ]),
        max_draft: *rng.pick(&[0, 2, 6]),
    }
}

pub(crate) fn random_cost(rng: &mut Rng) -> CostModel {
    CostModel {
        rows: CostModel::roofline(rng.between(1, 4_000_000), rng.between(1_000, 400_000)),
        kilo_decode_keys: rng.between(0, 400_000),
        kilo_chunk_keys: rng.between(0, 400_000),
        head: rng.between(0, 1_000_000),
        logit: rng.between(0, 100_000),
    }
}
