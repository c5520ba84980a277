//! Seeded worlds, thousands of steps: does anything ever go wrong?
//!
//! The trick is in the fake model: its KV pages hold the tokens themselves, each with a hash of everything before it. Every
//! step reads each sequence's whole history back through its page table, compares it with the truth, and answers with a
//! hash of what it read. A page that is shared wrongly, evicted in use or written by two shows at once.
//!
//! `STERNA_SIM_STEPS` sets the number of steps; `STERNA_SEED` the first world's seed, each next world adding one. A world
//! that fails prints its own.

use std::collections::{BTreeMap, BTreeSet};

use sterna_scheduler::{
    Batch, Event, FinishReason, Limits, Micros, PAGE_TOKENS, Plan, Policy, Refusal, Request, Row,
    Sampled, Scheduler, SequenceId, Step, TenantId, TokenId,
};

const STEPS: u64 = 300_000;
const TURNS_A_WORLD: u64 = 400;

/// Lengths of outputs: of any kind, or so long that memory runs out after the admission.
const LENGTHS: [[u32; 6]; 2] = [[1, 2, 15, 16, 17, 60], [1, 80, 120, 160, 200, 240]];

#[test]
fn nothing_ever_goes_wrong() {
    let steps = from_env("STERNA_SIM_STEPS", STEPS);
    let first = from_env("STERNA_SEED", 1);
    let mut seen = Counts::default();
    let mut worlds = 0;
    while seen.steps < steps {
        World::new(first + worlds).run(&mut seen);
        worlds += 1;
    }
    eprintln!("STERNA_SEED={first}: {worlds} worlds, {seen:?}");
    seen.assert_enough();
}

#[test]
fn equal_seeds_give_equal_traces() {
    let first = from_env("STERNA_SEED", 1);
    let mut traces = BTreeSet::new();
    for seed in first..first + 10 {
        let trace = World::new(seed).run(&mut Counts::default());
        assert_eq!(trace, World::new(seed).run(&mut Counts::default()));
        traces.insert(trace);
    }
    assert_eq!(traces.len(), 10, "other seeds give other traces");
}

fn from_env(name: &str, default: u64) -> u64 {
    let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{name} is {text}"));
    std::env::var(name).map_or(default, number)
}

/// What the worlds have exercised.
#[derive(Debug, Default)]
struct Counts {
    steps: u64,
    dropped_steps: u64,
    failed_steps: u64,
    failed_rows: u64,
    cancels: u64,
    cancels_while_waiting: u64,
    refusals: u64,
    resets: u64,
    finished: u64,
    chunks: u64,
    prefix_hits: u64,
    evictions: u64,
    preemptions: u64,
    redirects: u64,
    deferrals: u64,
}

impl Counts {
    /// A run that did not meet the difficult cases has shown nothing about them.
    fn assert_enough(&self) {
        let often = [
            ("dropped steps", self.dropped_steps),
            ("cancels", self.cancels),
            ("chunks", self.chunks),
            ("prefix hits", self.prefix_hits),
            ("evictions", self.evictions),
            ("preemptions", self.preemptions),
            ("redirects to an equal page", self.redirects),
            ("deferrals behind a prefill", self.deferrals),
        ];
        for (what, count) in often {
            assert!(count >= self.steps / 300, "only {count} {what}");
        }
        let sometimes = [
            ("failed steps", self.failed_steps),
            ("failed rows", self.failed_rows),
            ("cancels while waiting", self.cancels_while_waiting),
            ("refusals", self.refusals),
            ("resets", self.resets),
        ];
        for (what, count) in sometimes {
            assert!(count >= self.steps / 1000, "only {count} {what}");
        }
    }
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a real key and value depend on: the token and everything before it.
fn chain(before: u64, token: TokenId) -> u64 {
    mix(before.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// The fake model's next token.
fn next_token(chain: u64, alphabet: u64) -> TokenId {
    (mix(chain) % alphabet) as TokenId
}

/// One token's place in the fake KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    tenant: TenantId,
    position: usize,
    token: TokenId,
    chain: u64,
}

/// The fake model: its memory, and what it answers.
struct Model {
    cells: Vec<Option<Cell>>,
    alphabet: u64,
}

impl Model {
    fn cell(&mut self, batch: &Batch, row: &Row, position: usize) -> &mut Option<Cell> {
        let page = batch.pages(row)[position / PAGE_TOKENS];
        &mut self.cells[page.index() * PAGE_TOKENS + position % PAGE_TOKENS]
    }

    /// Reads a row's history back, and returns the chain that it ends with.
    fn read(&mut self, batch: &Batch, row: &Row, client: &Client) -> u64 {
        let mut before = 0;
        for position in 0..row.start as usize {
            let token = client.token(position);
            before = chain(before, token);
            let expected = Cell {
                tenant: client.request.tenant,
                position,
                token,
                chain: before,
            };
            let found = *self.cell(batch, row, position);
            assert_eq!(found, Some(expected), "content mismatch in {row:?}");
        }
        before
    }

    /// Computes a row after its history, and returns the token that follows.
    fn write(&mut self, batch: &Batch, row: &Row, client: &Client, mut before: u64) -> TokenId {
        for (offset, &token) in batch.tokens(row).iter().enumerate() {
            before = chain(before, token);
            let position = row.start as usize + offset;
            *self.cell(batch, row, position) = Some(Cell {
                tenant: client.request.tenant,
                position,
                token,
                chain: before,
            });
        }
        next_token(before, self.alphabet)
    }

    /// The row went wrong: what it has written is worth nothing.
    fn spoil(&mut self, batch: &Batch, id: SequenceId) {
        let mut rows = batch.rows().iter();
        let row = rows.find(|row| row.sequence == id).expect("it has a row");
        for position in row.start as usize..row.end() {
            *self.cell(batch, row, position) = None;
        }
    }

    /// Reads every row's history, then writes the rows that are not `skipped`. Returns what follows those that want it.
    fn forward(
        &mut self,
        batch: &Batch,
        clients: &BTreeMap<SequenceId, Client>,
        mut skipped: impl FnMut() -> bool,
    ) -> Vec<(SequenceId, TokenId)> {
        let rows = batch.rows().iter();
        let read = |row: &Row| self.read(batch, row, &clients[&row.sequence]);
        let chains: Vec<u64> = rows.clone().map(read).collect();
        let mut next = Vec::new();
        for (row, before) in rows.zip(chains) {
            if !skipped() {
                let token = self.write(batch, row, &clients[&row.sequence], before);
                next.extend((row.logits > 0).then_some((row.sequence, token)));
            }
        }
        next
    }
}

/// Somebody who waits for an answer.
struct Client {
    number: u64, // In the order of submission.
    request: Request,
    output: Vec<TokenId>,
    answer: Vec<TokenId>, // What the same request gets alone.
    reason: FinishReason, // How it should end, as far as is known now.
    is_waiting: bool,
}

impl Client {
    fn new(number: u64, request: Request, alphabet: u64) -> Client {
        let mut before = request.prompt.iter().fold(0, |b, &token| chain(b, token));
        let mut answer = Vec::new();
        let reason = loop {
            let token = next_token(before, alphabet);
            before = chain(before, token);
            answer.push(token);
            let may_stop = answer.len() >= request.min_new_tokens as usize;
            if may_stop && request.stop_tokens.contains(&token) {
                break FinishReason::Stop;
            }
            if answer.len() == request.max_new_tokens as usize {
                break FinishReason::Length;
            }
        };
        Client {
            number,
            request,
            output: Vec::new(),
            answer,
            reason,
            is_waiting: true,
        }
    }

    fn known(&self) -> usize {
        self.request.prompt.len() + self.output.len()
    }

    fn token(&self, position: usize) -> TokenId {
        let prompt = &self.request.prompt;
        match position.checked_sub(prompt.len()) {
            None => prompt[position],
            Some(position) => self.output[position],
        }
    }

    /// Takes a token as it leaves the model; or the news that there is none.
    fn receive(&mut self, token: TokenId, is_failed: bool) -> Sampled {
        if is_failed {
            self.fail();
            return Sampled::Failed;
        }
        assert_eq!(token, self.answer[self.output.len()], "as alone");
        self.output.push(token);
        Sampled::Token(token)
    }

    fn fail(&mut self) {
        self.reason = FinishReason::Error;
        self.answer.truncate(self.output.len());
    }
}

fn alive(clients: &mut BTreeMap<SequenceId, Client>, id: SequenceId) -> &mut Client {
    clients.get_mut(&id).expect("the request has not ended")
}

/// What becomes of a step.
#[derive(PartialEq, Eq)]
enum Fate {
    Committed,
    Dropped,
    Failed,
}

struct World {
    seed: u64,
    rng: Rng,
    limits: Limits,
    scheduler: Scheduler,
    model: Model,
    clients: BTreeMap<SequenceId, Client>,
    blocks: Vec<Vec<TokenId>>, // What prompts are made of, so that many begin alike.
    ended: Vec<(SequenceId, Vec<TokenId>)>, // With their conversations, which may go on.
    tenants: u64,
    load: u64,         // Chance in percent that a turn brings a request.
    lengths: [u32; 6], // Of outputs.
    longest: u64,      // Blocks in a prompt.
    latest: Option<Request>,
    submitted: u64,
    now: Micros,
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
    fn new(seed: u64) -> World {
        let mut rng = Rng(mix(seed));
        let pages = *rng.pick(&[4, 8, 12, 12, 16, 16, 24, 64]);
        let limits = Limits {
            pages,
            max_running: *rng.pick(&[1, 4, 8, 12]),
            max_queued: rng.between(1, 12) as u32,
            max_queued_time: u64::MAX,
            step_tokens: rng.between(1, 96) as u32,
            prefill_chunk: rng.between(16, 64) as u32,
            max_sequence_tokens: rng.between(16 * u64::from(pages) / 2, 16 * u64::from(pages) + 8)
                as u32,
        };
        let alphabet = rng.between(2, 3);
        let block = |rng: &mut Rng| {
            let tokens = (0..PAGE_TOKENS).map(|_| rng.below(alphabet) as TokenId);
            tokens.collect()
        };
        World {
            seed,
            scheduler: Scheduler::new(limits.clone(), Policy::default()),
            model: Model {
                cells: vec![None; pages as usize * PAGE_TOKENS],
                alphabet,
            },
            limits,
            clients: BTreeMap::new(),
            blocks: (0..3).map(|_| block(&mut rng)).collect(),
            ended: Vec::new(),
            tenants: rng.between(2, 3),
            load: rng.between(20, 60),
            lengths: *rng.pick(&LENGTHS),
            longest: *rng.pick(&[1, 4]),
            latest: None,
            submitted: 0,
            now: 0,
            trace: 0,
            rng,
        }
    }

    /// Lives, drains, and returns a hash of everything that happened.
    fn run(mut self, seen: &mut Counts) -> u64 {
        for _ in 0..TURNS_A_WORLD {
            self.turn(seen);
        }
        self.scheduler.drain();
        let length = |client: &Client| client.request.prompt.len() + client.answer.len();
        let work: usize = self.clients.values().map(length).sum();
        for _ in 0..2 * work + 100 {
            self.step(seen);
        }
        assert!(self.clients.is_empty(), "a drain ends");
        assert!(self.scheduler.is_idle());
        let refused = self.scheduler.submit(self.now, self.small_request());
        assert_eq!(refused, Err(Refusal::Draining));

        let end = self.scheduler.snapshot();
        assert_eq!((end.private, end.pinned), (0, 0), "nobody holds a page");
        seen.evictions += end.evictions;
        seen.preemptions += end.preemptions;
        seen.redirects += end.redirects;
        seen.deferrals += end.deferrals;
        self.scheduler.reset_prefix_cache();
        self.scheduler.check();
        assert_eq!(self.scheduler.snapshot().free, self.limits.pages as usize);
        self.trace
    }

    fn turn(&mut self, seen: &mut Counts) {
        self.now += self.rng.below(1000);
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

    fn submit(&mut self, seen: &mut Counts) {
        let again = self.latest.clone().filter(|_| self.rng.percent(40));
        let request = again.unwrap_or_else(|| self.request());
        self.latest = Some(request.clone());
        let before = self.scheduler.snapshot();
        let needed = request.prompt.len() as u64 + u64::from(request.max_new_tokens);
        let can_fit = needed <= self.limits.longest_sequence();
        match self.scheduler.submit(self.now, request.clone()) {
            Ok(id) => {
                assert!(can_fit && before.queued < self.limits.max_queued as usize);
                let client = Client::new(self.submitted, request, self.model.alphabet);
                let stranger = self.clients.insert(id, client);
                assert!(stranger.is_none(), "a handle is not given twice");
                self.submitted += 1;
            }
            Err(refusal) => {
                assert_eq!(can_fit, matches!(refusal, Refusal::Overloaded { .. }));
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

    fn small_request(&self) -> Request {
        Request {
            prompt: vec![0],
            max_new_tokens: 1,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            tenant: TenantId(0),
            ..Request::default()
        }
    }

    fn request(&mut self) -> Request {
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
        let room = self.limits.longest_sequence() as usize;
        let mut max_new_tokens = *self.rng.pick(&self.lengths);
        if self.rng.percent(95) {
            prompt.truncate(room - 1);
            max_new_tokens = max_new_tokens.min((room - prompt.len()) as u32);
        }
        Request {
            prompt,
            max_new_tokens,
            min_new_tokens: self.rng.below(30) as u32,
            stop_tokens: vec![0; usize::from(self.rng.percent(30))],
            tenant: TenantId(self.rng.below(self.tenants) as u32),
            ..Request::default()
        }
    }

    /// Somebody goes away: a client in any state, or one who is long gone.
    fn cancel(&mut self, seen: &mut Counts) {
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

    fn step(&mut self, seen: &mut Counts) {
        let deferrals = self.scheduler.snapshot().deferrals;
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            assert!(self.clients.is_empty(), "idle, and somebody waits");
            return;
        };
        let batch = step.batch().clone();
        check_batch(&batch, &self.limits);
        for row in batch.rows() {
            check_row(&step, row, &self.clients[&row.sequence]);
            seen.chunks += u64::from(!(row.logits > 0));
        }
        self.trace = trace(self.trace, &batch);
        seen.steps += 1;

        let fate = match self.rng.below(100) {
            0..4 => Fate::Dropped,
            4..6 => Fate::Failed,
            _ => Fate::Committed,
        };
        let breaks_off = || fate != Fate::Committed && self.rng.percent(30);
        let tokens = self.model.forward(&batch, &self.clients, breaks_off);
        match fate {
            Fate::Committed => {
                let receive = |(id, token)| {
                    let is_failed = self.rng.below(400) == 0;
                    if is_failed {
                        self.model.spoil(&batch, id);
                        seen.failed_rows += 1;
                    }
                    alive(&mut self.clients, id).receive(token, is_failed)
                };
                let sampled: Vec<Sampled> = tokens.into_iter().map(receive).collect();
                step.commit(self.now, &sampled);
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
        let may_overtake = self.scheduler.snapshot().deferrals > deferrals;
        self.check_order(&batch, may_overtake);
        self.settle(seen);
    }

    /// Nobody is admitted before an earlier arrival, except while that one waits for a prefix being computed. The earliest
    /// of all that run is in every step.
    fn check_order(&mut self, batch: &Batch, may_overtake: bool) {
        let mut admitted = None;
        for row in batch.rows() {
            let client = alive(&mut self.clients, row.sequence);
            if std::mem::take(&mut client.is_waiting) {
                admitted = admitted.max(Some(client.number));
            }
        }
        let waiting = self.clients.values().filter(|c| c.is_waiting);
        let first_waiting = waiting.map(|c| c.number).min();
        if let (Some(admitted), Some(waiting)) = (admitted, first_waiting) {
            assert!(may_overtake || admitted < waiting, "overtaken");
        }
        let running = self.clients.iter().filter(|(_, c)| !c.is_waiting);
        if let Some((leader, _)) = running.min_by_key(|(_, c)| c.number) {
            let mut rows = batch.rows().iter();
            assert!(rows.any(|row| row.sequence == *leader), "the leader rests");
        }
    }

    /// Takes the events, and checks all that must hold between two calls.
    fn settle(&mut self, seen: &mut Counts) {
        self.scheduler.check();
        let events: Vec<Event> = self.scheduler.events().collect();
        for event in events {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    let prompt = &self.clients[&id].request.prompt;
                    assert!((cached_tokens as usize) < prompt.len(), "one is computed");
                    seen.prefix_hits += u64::from(cached_tokens > 0);
                    self.trace = mix(self.trace ^ u64::from(cached_tokens));
                }
                Event::Preempted { id } => {
                    alive(&mut self.clients, id).is_waiting = true;
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
                    let client = self.clients.remove(&id).expect("a request ends once");
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

    fn remember(&mut self, id: SequenceId, conversation: Vec<TokenId>) {
        if self.ended.len() == 4 {
            self.ended.remove(0);
        }
        self.ended.push((id, conversation));
    }
}

/// Continues the hash of everything that happened.
fn trace(mut trace: u64, batch: &Batch) -> u64 {
    for row in batch.rows() {
        trace = mix(trace ^ u64::from(row.start)).wrapping_add(row.len() as u64);
        for page in batch.pages(row) {
            trace = mix(trace ^ page.index() as u64);
        }
    }
    trace
}

/// A row holds the truth, and wants logits at its end alone.
fn check_row(step: &Step<'_>, row: &Row, client: &Client) {
    let truth: Vec<TokenId> = (0..client.known()).map(|at| client.token(at)).collect();
    assert_eq!(step.history(row.sequence), truth);
    let prompt_len = client.request.prompt.len();
    assert_eq!(step.prompt_len(row.sequence), prompt_len);
    let tokens = step.batch().tokens(row);
    assert_eq!(tokens, &truth[row.start as usize..row.end()]);
    let is_last = row.end() == truth.len();
    assert_eq!((row.logits > 0), is_last);
    assert!(is_last || row.end().is_multiple_of(PAGE_TOKENS), "{row:?}");
}

/// A batch keeps to its budget, and writes no page that another row can see.
fn check_batch(batch: &Batch, limits: &Limits) {
    let rows = batch.rows();
    assert!(!rows.is_empty() && rows.len() <= limits.max_running as usize);
    let decodes = rows.iter().filter(|row| row.len() == 1).count();
    let most = (limits.step_tokens as usize).max(decodes + PAGE_TOKENS);
    assert!(batch.token_count() <= most.min(limits.max_batch_tokens()));
    let wanted = rows.iter().filter(|row| row.logits > 0).count();
    assert_eq!(batch.logits_count(), wanted);
    for row in rows {
        assert!(row.len() <= limits.prefill_chunk as usize);
        let written = &batch.pages(row)[row.start as usize / PAGE_TOKENS..];
        for other in rows.iter().filter(|other| *other != row) {
            assert_ne!(other.sequence, row.sequence, "a sequence has one row");
            let seen = batch
                .pages(other)
                .iter()
                .find(|page| written.contains(page));
            assert_eq!(seen, None, "{row:?} writes what {other:?} sees");
        }
    }
}
