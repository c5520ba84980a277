//! Who gets how much of the machine, and how soon: tenants, bands and prompts of different lengths, on a virtual clock.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Band, Budget, CostModel, Event, FinishReason, Limits, Micros, PAGE_TOKENS, Plan, Policy,
    PublicPrefix, Rate, Refusal, Request, Sampled, Scheduler, SequenceId, TenantId, TenantPolicy,
    TokenId,
};

const SECOND: Micros = 1_000_000;
const TARGET: Micros = 200_000;

/// About a model of two billion parameters on two cores.
const COST: CostModel = CostModel {
    rows: CostModel::roofline(40_000_000, 4_500_000),
    kilo_decode_keys: 600_000,
    kilo_chunk_keys: 500_000,
    head: 25_000_000,
    logit: 1_000_000,
};

/// A scheduler whose steps take as long as its cost model says.
struct Machine {
    scheduler: Scheduler,
    now: Micros,
    steps: u64,
    token: TokenId,
    requests: BTreeMap<SequenceId, Life>,
    ended: Vec<Life>,
}

/// What became of a request.
#[derive(Clone, Debug)]
struct Life {
    tenant: TenantId,
    submitted: Micros,
    submitted_at_step: u64,
    cached_tokens: u32,
    tokens: Vec<Micros>, // When each came.
    first_step: u64,     // In which the first came.
}

impl Machine {
    fn new(policies: &[TenantPolicy]) -> Machine {
        Machine::of_pages(4000, policies)
    }

    fn of_pages(pages: u32, policies: &[TenantPolicy]) -> Machine {
        let limits = Limits {
            pages,
            max_running: 64,
            max_queued: 10_000,
            max_queued_time: Micros::MAX,
            step_tokens: 512,
            prefill_chunk: 512,
            max_sequence_tokens: 8192,
        };
        let policy = Policy {
            budget: Budget::Time {
                inter_token_target: TARGET,
                least: 10_000,
                most: 250_000,
            },
            max_draft: 0,
            ..Policy::default()
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(COST);
        let tenants: Vec<_> = (0..).map(TenantId).zip(policies.iter().cloned()).collect();
        assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
        Machine {
            scheduler,
            now: 0,
            steps: 0,
            token: 0,
            requests: BTreeMap::new(),
            ended: Vec::new(),
        }
    }

    /// Asks for an answer of `output` tokens to a prompt that nobody else has.
    fn ask(&mut self, tenant: u32, prompt: usize, output: u32) -> SequenceId {
        self.token += 10_000;
        let prompt = (0..prompt as TokenId).map(|at| self.token + at).collect();
        self.ask_about(tenant, prompt, output)
    }

    fn ask_about(&mut self, tenant: u32, prompt: Vec<TokenId>, output: u32) -> SequenceId {
        let tenant = TenantId(tenant);
        let request = Request {
            prompt,
            max_new_tokens: output,
            tenant,
            ..Request::default()
        };
        let id = self
            .scheduler
            .submit(self.now, request)
            .expect("it is welcome");
        let life = Life {
            tenant,
            submitted: self.now,
            submitted_at_step: self.steps,
            cached_tokens: 0,
            tokens: Vec::new(),
            first_step: 0,
        };
        self.requests.insert(id, life);
        id
    }

    /// One step, if there is anything to do. Returns how long it took.
    fn step(&mut self) -> Micros {
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            self.now += 1000;
            return 0;
        };
        let took = COST.predict(step.shape()).div_ceil(1000);
        self.now += took;
        self.steps += 1;
        let mut sampled = Vec::new();
        for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
            self.token += 1;
            sampled.push(Sampled::Token(self.token));
            let life = self.requests.get_mut(&row.sequence).expect("it is alive");
            if life.tokens.is_empty() {
                life.first_step = self.steps;
            }
            life.tokens.push(self.now);
        }
        step.commit(self.now, &sampled);
        for event in self.scheduler.events() {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    self.requests
                        .get_mut(&id)
                        .expect("it is alive")
                        .cached_tokens = cached_tokens;
                }
                Event::Finished { id, .. } => {
                    self.ended
                        .push(self.requests.remove(&id).expect("it ends once"));
                }
                Event::Preempted { .. } => {}
            }
        }
        took
    }

    /// Runs for so long; each of `busy` always has requests waiting, of so many prompt and output tokens.
    fn keep_busy(&mut self, busy: &[(u32, usize, u32)], time: Micros) {
        let end = self.now + time;
        while self.now < end {
            for &(tenant, prompt, output) in busy {
                while self.scheduler.tenant(TenantId(tenant)).queued < 2 {
                    self.ask(tenant, prompt, output);
                }
            }
            self.step();
        }
    }

    fn service(&self, tenant: u32) -> Micros {
        self.scheduler.tenant(TenantId(tenant)).service
    }
}

fn weight(weight: u32) -> TenantPolicy {
    TenantPolicy {
        weight,
        ..TenantPolicy::default()
    }
}

fn band(band: Band) -> TenantPolicy {
    TenantPolicy {
        band,
        ..TenantPolicy::default()
    }
}

/// `part` of `whole` is within `error` percent points of `expected` percent.
fn assert_percent(part: Micros, whole: Micros, expected: u64, error: u64) {
    let percent = (100 * part + whole / 2) / whole;
    assert!(
        percent.abs_diff(expected) <= error,
        "{percent} % instead of {expected} %"
    );
}

#[test]
fn busy_tenants_get_their_weights_worth() {
    let mut machine = Machine::new(&[weight(1), weight(1), weight(2)]);
    // Of very different shapes: what counts is machine time.
    machine.keep_busy(&[(0, 60, 100), (1, 900, 20), (2, 300, 60)], 300 * SECOND);
    let service = [0, 1, 2].map(|tenant| machine.service(tenant));
    let all = service.iter().sum();
    assert_percent(service[0], all, 25, 1);
    assert_percent(service[1], all, 25, 1);
    assert_percent(service[2], all, 50, 1);
}

#[test]
fn the_lag_between_busy_tenants_is_bounded() {
    let mut machine = Machine::new(&[weight(1), weight(1)]);
    let mut worst = 0;
    for _ in 0..600 {
        machine.keep_busy(&[(0, 60, 150), (1, 700, 30)], SECOND / 2);
        worst = worst.max(machine.service(0).abs_diff(machine.service(1)));
    }
    // What one tenant may have running beside the slack: a prompt's chunk and its decodes' next steps.
    assert!(worst < 8 * SECOND, "{worst} µs apart");
    assert!(worst > 0);
}

/// The slack is of machine time: however large its weight, a tenant whose prompts are cached gets no further ahead.
#[test]
fn large_weights_widen_nobodys_slack() {
    let lag = |each: u32| {
        let mut machine = Machine::new(&[weight(each), weight(each)]);
        let system: Vec<TokenId> = (0..1024).collect();
        let mut worst = 0;
        for chat in 0..2000 {
            while machine.scheduler.tenant(TenantId(0)).queued < 2 {
                let question = [5000 + chat; 20];
                machine.ask_about(0, [&system[..], &question].concat(), 50);
            }
            machine.keep_busy(&[(1, 200, 50)], 1);
            worst = worst.max(machine.service(0).abs_diff(machine.service(1)));
        }
        worst
    };
    let (small, large) = (lag(1), lag(1000));
    assert!(large < small * 3 / 2, "{small} µs and {large} µs apart");
}

#[test]
fn time_away_is_not_saved_up() {
    let mut machine = Machine::new(&[weight(1), weight(1)]);
    machine.keep_busy(&[(0, 200, 50)], 100 * SECOND);
    let before = [0, 1].map(|tenant| machine.service(tenant));
    machine.keep_busy(&[(0, 200, 50), (1, 200, 50)], 60 * SECOND);
    let since = [0, 1].map(|tenant| machine.service(tenant) - before[tenant as usize]);
    assert_percent(since[1], since[0] + since[1], 50, 5);
}

#[test]
fn bands_share_as_they_should_and_leave_nothing_unused() {
    let policies = [
        band(Band::Interactive),
        band(Band::Standard),
        band(Band::Batch),
    ];
    let mut machine = Machine::new(&policies);
    let all = [(0, 200, 50), (1, 200, 50), (2, 200, 50)];
    machine.keep_busy(&all, 300 * SECOND);
    let service = [0, 1, 2].map(|tenant| machine.service(tenant));
    let sum = service.iter().sum();
    assert_percent(service[0], sum, 60, 6);
    assert_percent(service[1], sum, 30, 6);
    assert_percent(service[2], sum, 10, 6);
    machine.keep_busy(&all[2..], 60 * SECOND); // The others' last requests end.
    let before = machine.service(2);
    let start = machine.now;
    machine.keep_busy(&all[2..], 60 * SECOND);
    assert_percent(machine.service(2) - before, machine.now - start, 100, 4);
}

#[test]
fn a_short_prompt_behind_a_long_one_is_answered_within_three_steps() {
    for tenant in [0, 1] {
        let mut machine = Machine::new(&[weight(1), weight(1)]);
        machine.ask(0, 4096, 10);
        for _ in 0..5 {
            machine.step();
        }
        let short = machine.ask(tenant, 50, 10);
        for _ in 0..3 {
            machine.step();
        }
        let life = &machine.requests[&short];
        assert!(!life.tokens.is_empty(), "of tenant {tenant}: {life:?}");
    }
}

#[test]
fn long_prompts_do_not_hold_up_the_answers_of_others() {
    let mut machine = Machine::new(&[weight(1), weight(1)]);
    for _ in 0..4 {
        machine.ask(0, 50, 400);
    }
    for _ in 0..5 {
        machine.step();
    }
    machine.keep_busy(&[(1, 4096, 10)], 60 * SECOND);
    let chats = machine.requests.values().chain(&machine.ended);
    let chats = chats.filter(|life| life.tenant == TenantId(0));
    let gaps: Vec<Micros> = chats
        .flat_map(|life| life.tokens.windows(2).map(|pair| pair[1] - pair[0]))
        .collect();
    assert!(gaps.len() > 400, "they were answered: {}", gaps.len());
    let longest = gaps.iter().max().expect("there are gaps");
    assert!(*longest <= TARGET * 5 / 4, "a gap of {longest} µs");
}

/// A decode that waits for its tenant's pages is in no step, so no step need be short for it.
#[test]
fn who_waits_for_pages_hurries_nobody() {
    let capped = TenantPolicy {
        max_pages: 3,
        ..TenantPolicy::default()
    };
    let mut machine = Machine::new(&[weight(1), capped]);
    let answers = [machine.ask(1, 10, 30), machine.ask(1, 10, 30)];
    let decoded = |machine: &Machine| answers.map(|id| machine.requests[&id].tokens.len());
    while decoded(&machine) != [8, 7] {
        machine.step();
    }
    machine.ask(0, 4000, 1);
    for _ in 0..6 {
        let took = machine.step();
        assert!(took > TARGET * 3 / 4, "a step of {took} µs");
    }
    assert_eq!(decoded(&machine), [14, 7], "one has no page");
}

#[test]
fn long_prompts_get_on_beside_many_answers() {
    let mut machine = Machine::new(&[weight(1), weight(1)]);
    let long = machine.ask(1, 2000, 1);
    machine.keep_busy(&[(0, 50, 200)], 200 * SECOND);
    assert!(
        !machine.requests.contains_key(&long),
        "2,000 tokens in 200 s"
    );
}

#[test]
fn a_flood_of_another_tenant_hardly_delays_the_first_token() {
    let first_token = |flood: bool| {
        let mut machine = Machine::new(&[weight(1), weight(1)]);
        let mut slowest = 0;
        for _ in 0..20 {
            if flood {
                machine.keep_busy(&[(1, 300, 100)], 10 * SECOND);
                for _ in 0..20 {
                    machine.ask(1, 300, 100);
                }
            }
            let id = machine.ask(0, 200, 5);
            while machine.requests.contains_key(&id) {
                machine.step();
            }
            let life = machine
                .ended
                .iter()
                .rfind(|life| life.tenant == TenantId(0));
            let life = life.expect("it has ended");
            slowest = slowest.max(life.tokens[0] - life.submitted);
        }
        slowest
    };
    let (alone, flooded) = (first_token(false), first_token(true));
    assert!(
        flooded <= alone * 6 / 5 + 250_000,
        "{alone} µs alone, {flooded} µs in a flood"
    );
}

#[test]
fn who_shares_a_prompt_waits_until_it_is_computed_once() {
    let mut machine = Machine::new(&[weight(1)]);
    let system: Vec<TokenId> = (0..1024).collect();
    for chat in 0..16 {
        machine.ask_about(0, [&system[..], &[5000 + chat; 20]].concat(), 5);
    }
    while !machine.requests.is_empty() {
        machine.step();
    }
    let cached = machine
        .ended
        .iter()
        .filter(|life| life.cached_tokens == 1024);
    assert_eq!(cached.count(), 15);
}

#[test]
fn a_public_prefix_is_computed_once_for_all_who_may_use_it() {
    let mut machine = Machine::new(&[]);
    let system: Vec<TokenId> = (0..100).collect();
    let prefix = machine.scheduler.declare_public(&system);
    assert_eq!(prefix, PublicPrefix(0));
    let allowed = TenantPolicy {
        public: vec![prefix],
        ..TenantPolicy::default()
    };
    let policies = [allowed.clone(), allowed, TenantPolicy::default()];
    let tenants: Vec<_> = (0..).map(TenantId).zip(policies).collect();
    assert_eq!(machine.scheduler.set_tenants(&tenants), Ok(()));
    for tenant in 0..3 {
        machine.ask_about(tenant, [&system[..], &[5000 + tenant; 30]].concat(), 3);
    }
    while !machine.requests.is_empty() {
        machine.step();
    }
    let public = (100 / PAGE_TOKENS * PAGE_TOKENS) as u32;
    machine.ended.sort_by_key(|life| life.tenant);
    let cached: Vec<u32> = machine
        .ended
        .iter()
        .map(|life| life.cached_tokens)
        .collect();
    assert_eq!(cached, [0, public, 0]);
    machine.scheduler.reset_prefix_cache();
    assert_eq!(
        machine.scheduler.snapshot().tree,
        100 / PAGE_TOKENS,
        "it stays"
    );
    machine.scheduler.check();
}

#[test]
fn batch_answers_pause_while_others_need_the_time_and_never_for_long() {
    let policies = [weight(1), band(Band::Batch)];
    let mut machine = Machine::new(&policies);
    machine.keep_busy(&[(1, 30, 300)], 30 * SECOND);
    machine.keep_busy(&[(0, 8, 300), (1, 30, 300)], 60 * SECOND);
    let batch = machine.requests.values().chain(&machine.ended);
    let batch = batch.filter(|life| life.tenant == TenantId(1));
    let gaps = batch.flat_map(|life| life.tokens.windows(2).map(|pair| pair[1] - pair[0]));
    let longest = gaps.max().expect("there are gaps");
    assert!(longest > TARGET * 3 / 2, "nothing paused: {longest} µs");
    // Three steps, and the one in which it goes on.
    assert!(longest < 5 * 250_000, "a pause of {longest} µs");
}

#[test]
fn nobody_is_forgotten() {
    let mut machine = Machine::new(&[weight(1), weight(3), band(Band::Batch)]);
    for tenant in [0, 1, 2] {
        for length in [1, 15, 16, 17, 500, 3000] {
            machine.ask(tenant, length, 30);
        }
    }
    while !machine.requests.is_empty() {
        machine.step();
        let oldest = machine
            .requests
            .values()
            .map(|life| life.submitted_at_step)
            .min();
        assert!(oldest.is_none_or(|step| machine.steps < step + 3000));
    }
    assert_eq!(machine.ended.len(), 18);
    assert!(machine.ended.iter().all(|life| life.first_step > 0));
}

/// A small machine in which tenant 1 floods and tenant 2 now and then asks for much of the memory.
fn flooded_world(seed: u64) {
    let mut state = seed;
    let mut random = |bound: u64| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    };
    random(40);
    let pages = 24 + random(80) as u32;
    let limits = Limits {
        pages,
        max_running: 64,
        max_queued: 1000,
        max_queued_time: Micros::MAX,
        step_tokens: 16 + random(32) as u32,
        prefill_chunk: 16,
        max_sequence_tokens: pages * 16,
    };
    let mut scheduler = Scheduler::new(limits, Policy::default());
    scheduler.calibrate(CostModel {
        rows: CostModel::roofline(4_000_000, 450_000),
        kilo_decode_keys: 60_000,
        kilo_chunk_keys: 50_000,
        head: 2_500_000,
        logit: 100_000,
    });
    let tenants = [1, 2].map(|id| (TenantId(id), TenantPolicy::default()));
    assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
    let (mut now, mut token) = (0, 0);
    for step in 0..400 {
        let mut ask = |tenant: u32, prompt: u64, output: u32| {
            token += prompt as TokenId;
            let request = Request {
                prompt: (token - prompt as TokenId..token).collect(),
                max_new_tokens: output,
                tenant: TenantId(tenant),
                ..Request::default()
            };
            let _ = scheduler.submit(now, request); // Full queues are no matter here.
        };
        for _ in 0..4 * (1 - step % 2) {
            let output = if step < 60 { 2 } else { 16 + random(60) as u32 };
            ask(1, 10 + random(6), output);
        }
        if random(12) == 0 {
            let prompt = 16 * (1 + random(u64::from(pages) * 2 / 3));
            ask(2, prompt, 4);
        }
        if let Plan::Step(step) = scheduler.plan(now) {
            now += step.predicted().max(1);
            let mut sampled = Vec::new();
            for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
                token += 1;
                sampled.push(Sampled::Token(token));
                sampled.extend((1..row.logits).map(|_| Sampled::Void));
            }
            step.commit(now, &sampled);
        }
        scheduler.check();
        scheduler.events().for_each(drop);
    }
}

/// In these worlds the only prompt that others paused for found no memory, and nobody went on.
#[test]
fn a_guest_that_finds_no_memory_holds_nobody_up() {
    for seed in [1266, 1491, 4281] {
        flooded_world(seed);
    }
}

#[test]
fn a_change_of_band_brings_neither_debt_nor_credit() {
    let policies = [weight(1), weight(1), band(Band::Interactive)];
    let mut machine = Machine::new(&policies);
    machine.keep_busy(&[(0, 100, 50), (1, 100, 50)], 100 * SECOND);
    let moved = [(TenantId(0), band(Band::Interactive))];
    assert_eq!(machine.scheduler.set_tenants(&moved), Ok(()));
    let busy = [(0, 100, 50), (2, 100, 50)];
    machine.keep_busy(&busy, 10 * SECOND);
    let before = [0, 2].map(|tenant| machine.service(tenant));
    machine.keep_busy(&busy, 100 * SECOND);
    let after = [0, 2].map(|tenant| machine.service(tenant));
    let [moved, other] = [after[0] - before[0], after[1] - before[1]];
    assert_percent(moved, moved + other, 50, 4);
}

#[test]
fn another_choice_of_a_request_needs_no_rate_of_its_own() {
    let rated = TenantPolicy {
        requests: Some(Rate {
            per_minute: 60,
            burst: 1,
        }),
        tokens: Some(Rate {
            per_minute: 600,
            burst: 30,
        }),
        ..TenantPolicy::default()
    };
    let mut machine = Machine::new(&[rated]);
    let request = |is_another_choice| Request {
        prompt: (0..40).collect(),
        max_new_tokens: 4,
        is_another_choice,
        ..Request::default()
    };
    let scheduler = &mut machine.scheduler;
    let first = scheduler.submit(0, request(false)).expect("it conforms");
    let rates = scheduler.rates(0, TenantId(0));
    assert_eq!(rates.requests.map(|rate| rate.remaining), Some(0));
    assert_eq!(rates.tokens.map(|rate| rate.remaining), Some(0), "in debt");
    let other = scheduler
        .submit(0, request(true))
        .expect("its first was accepted");
    assert_eq!(scheduler.rates(0, TenantId(0)), rates);
    let refused = scheduler.submit(0, request(false));
    assert!(matches!(refused, Err(Refusal::RateLimited { .. })));
    for id in [other, first] {
        assert!(scheduler.cancel(id, FinishReason::Cancelled));
    }
    let rates = scheduler.rates(0, TenantId(0));
    assert_eq!(
        rates.tokens.map(|rate| rate.remaining),
        Some(30),
        "refunded"
    );
}

#[test]
fn a_large_request_is_passed_only_so_often() {
    let limits = Limits {
        pages: 10,
        max_running: 4,
        max_queued: 100,
        max_queued_time: Micros::MAX,
        step_tokens: 64,
        prefill_chunk: 64,
        max_sequence_tokens: 160,
    };
    let mut scheduler = Scheduler::new(limits, Policy::default());
    scheduler.calibrate(COST);
    let request = |first: TokenId, prompt: TokenId, output: u32| Request {
        prompt: (first..first + prompt).collect(),
        max_new_tokens: output,
        ..Request::default()
    };
    let (mut asked, mut ended_before) = (0, 0);
    let mut large = None;
    for step in 0..400 {
        if step == 20 {
            large = scheduler.submit(0, request(500_000, 150, 3)).ok();
            assert!(large.is_some(), "it could run alone");
        }
        while scheduler.tenant(TenantId(0)).queued < 6 {
            asked += 1; // Of unlike lengths, so that they never end all at once.
            assert!(
                scheduler
                    .submit(0, request(asked * 100, 9, 2 + asked % 5))
                    .is_ok()
            );
        }
        if let Plan::Step(step) = scheduler.plan(0) {
            let wanted = step.batch().logits_count();
            let mut sampled = Vec::with_capacity(wanted);
            for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
                sampled.push(Sampled::Token(900_000 + row.start));
                sampled.extend((1..row.logits).map(|_| Sampled::Void));
            }
            step.commit(0, &sampled);
        }
        for event in scheduler.events() {
            match event {
                Event::Finished { id, .. } if Some(id) == large => {
                    assert!(ended_before < 80, "{ended_before} others first");
                    return;
                }
                Event::Finished { .. } if large.is_some() => ended_before += 1,
                _ => {}
            }
        }
    }
    panic!("{ended_before} others ended, and it waits still");
}

/// Others who come for the first time are ahead of their turn, one after the other. They must not go past for ever.
#[test]
fn a_large_request_is_passed_by_newcomers_only_so_often() {
    let newcomer = weight(1);
    let policies: Vec<_> = (0..800).map(|_| newcomer.clone()).collect();
    let mut machine = Machine::of_pages(20, &policies);
    machine.keep_busy(&[(0, 30, 4)], 2 * SECOND);
    let large = machine.ask(0, 290, 3); // All pages but one.
    for tenant in 1..800 {
        machine.ask(tenant, 20, 4);
        machine.step();
        machine.step();
        if !machine.requests.contains_key(&large) {
            assert!(tenant < 300, "{tenant} others first");
            return;
        }
    }
    panic!("it waits still");
}

#[test]
fn a_prompt_that_many_share_waits_once() {
    let mut machine = Machine::new(&[weight(1)]);
    let system: Vec<TokenId> = (0..1024).collect();
    let mut waiting = Vec::new();
    for chat in 0..16 {
        machine.ask_about(0, [&system[..], &[5000 + chat; 20]].concat(), 5);
        waiting.push(machine.scheduler.snapshot().queued_time);
    }
    // The others have 20 tokens of their own, and five to answer.
    assert!(waiting[15] < waiting[0] * 3, "{waiting:?}");
}
