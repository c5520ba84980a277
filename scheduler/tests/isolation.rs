//! What one tenant cannot take from another: its place in the queue, its pages and its rate.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Band, CostModel, Event, FinishReason, Limits, Micros, Plan, Policy, Rate, RateKind, Refusal,
    Request, SAMPLING_UNIT, Sampled, Scheduler, SequenceId, TenantId, TenantPolicy, TokenId,
};

const SECOND: Micros = 1_000_000;

const LIMITS: Limits = Limits {
    pages: 400,
    max_running: 8,
    max_queued: 16,
    max_queued_time: Micros::MAX,
    step_tokens: 256,
    prefill_chunk: 256,
    max_sequence_tokens: 4096,
    states: None,
    diffusion: None,
};

/// The approximate costs of a model of two billion parameters on two cores.
const COST: CostModel = CostModel {
    rows: CostModel::roofline(40_000_000, 4_500_000),
    kilo_decode_keys: 600_000,
    kilo_chunk_keys: 500_000,
    head: 25_000_000,
    logit: 1_000_000,
    sampling: SAMPLING_UNIT,
};

/// Returns a scheduler that answers every row with one token.
fn scheduler(limits: Limits) -> Scheduler {
    let policy = Policy {
        max_draft: 0,
        ..Policy::default()
    };
    let mut scheduler = Scheduler::new(limits, policy);
    scheduler.calibrate(COST);
    scheduler
}

/// A scheduler whose steps take as long as predicted, and the fate of each request.
struct Server {
    scheduler: Scheduler,
    now: Micros,
    token: TokenId,
    alive: BTreeMap<SequenceId, u32>, // With their tenants.
    preempted: Vec<u32>,              // The tenants of preempted requests.
    displaced: Vec<u32>,              // The tenants of displaced requests.
    admitted: u32,
}

impl Server {
    fn new(limits: Limits, tenants: &[(u32, TenantPolicy)]) -> Server {
        let mut scheduler = scheduler(limits);
        let numbered = tenants
            .iter()
            .map(|(id, policy)| (TenantId(*id), policy.clone()));
        assert_eq!(scheduler.set_tenants(&numbered.collect::<Vec<_>>()), Ok(()));
        Server {
            scheduler,
            now: 0,
            token: 0,
            alive: BTreeMap::new(),
            preempted: Vec::new(),
            displaced: Vec::new(),
            admitted: 0,
        }
    }

    /// Submits a request with a prompt that no other request has. Returns whether it is accepted.
    fn submit(&mut self, tenant: u32, prompt: usize, output: u32) -> bool {
        self.token += 10_000;
        let request = Request {
            prompt: (self.token..).take(prompt).collect(),
            max_new_tokens: output,
            tenant: TenantId(tenant),
            ..Request::default()
        };
        let answer = self.scheduler.submit(self.now, request);
        let full = Refusal::Overloaded {
            retry_after: self.scheduler.snapshot().queued_time,
        };
        assert!(answer.is_ok() || answer == Err(full), "{answer:?}");
        self.settle();
        answer.is_ok_and(|id| self.alive.insert(id, tenant).is_none())
    }

    /// Runs a step if there is one.
    fn step(&mut self) {
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            self.now += 1000;
            return;
        };
        self.now += COST.predict(step.shape()).div_ceil(1000);
        let wanted = step.batch().logits_count();
        self.token += 1;
        step.commit(self.now, &vec![Sampled::Token(self.token); wanted]);
        self.scheduler.check();
        self.settle();
    }

    fn settle(&mut self) {
        for event in self.scheduler.events() {
            match event {
                Event::Finished { id, .. } => {
                    assert!(self.alive.remove(&id).is_some(), "{id:?} ends twice");
                }
                Event::Preempted { id } => self.preempted.push(self.alive[&id]),
                Event::Displaced { id, tenant, .. } => {
                    assert_eq!(self.alive.remove(&id), Some(tenant.0), "{id:?} ends twice");
                    self.displaced.push(tenant.0);
                }
                Event::Admitted { .. } => self.admitted += 1,
            }
        }
    }

    fn cancel_all(&mut self, tenant: u32) {
        let own = self.alive.iter().filter(|&(_, &owner)| owner == tenant);
        for id in own.map(|(&id, _)| id).collect::<Vec<_>>() {
            assert!(self.scheduler.cancel(id, FinishReason::Cancelled));
        }
        self.settle();
    }

    fn of(&self, tenant: u32) -> usize {
        self.alive
            .values()
            .filter(|&&owner| owner == tenant)
            .count()
    }
}

#[test]
fn a_tenant_with_nothing_waiting_gets_a_place_beside_four_flooding_tenants() {
    let tenants: Vec<_> = (0..5).map(|id| (id, TenantPolicy::default())).collect();
    let mut server = Server::new(LIMITS, &tenants);
    let mut answered = 0;
    for round in 0..400 {
        for flooder in 1..=4 {
            while server.submit(flooder, 40, 30) {}
        }
        if server.of(0) == 0 {
            assert!(server.submit(0, 40, 10), "refused in round {round}");
            answered += 1;
        }
        server.step();
    }
    assert!(answered > 10, "{answered}");
    assert!(!server.displaced.contains(&0));
    // The flooding tenants share the queue at first and after each admission. They do not displace
    // each other in turns.
    let most = 17 + answered + server.admitted as usize;
    assert!(server.displaced.len() <= most, "{:?}", server.displaced);
}

/// There are more flooding tenants than places, so each has less than one place. The other one
/// comes first by its share.
#[test]
fn a_tenant_with_a_larger_share_gets_a_place_among_a_thousand_flooding_tenants() {
    let flooders = (1..=1000).map(|id| (id, TenantPolicy::default()));
    let weight = TenantPolicy {
        weight: 2,
        ..TenantPolicy::default()
    };
    let interactive = TenantPolicy {
        band: Band::Interactive,
        ..TenantPolicy::default()
    };
    let guaranteed = TenantPolicy {
        guaranteed_pages: 10,
        ..TenantPolicy::default()
    };
    for victim in [weight, interactive, guaranteed] {
        let limits = Limits {
            max_queued: 256,
            ..LIMITS
        };
        let tenants: Vec<_> = flooders.clone().chain([(1001, victim)]).collect();
        let mut server = Server::new(limits, &tenants);
        let rounds = 40;
        for _ in 0..rounds {
            for flooder in 1..=1000 {
                server.submit(flooder, 20, 4);
            }
            assert!(server.submit(1001, 20, 4));
            for flooder in 1..=1000 {
                server.submit(flooder, 20, 4);
            }
            server.step();
            assert!(!server.displaced.contains(&1001));
            server.cancel_all(1001);
        }
        let most = 3 * (rounds + server.admitted);
        assert!(
            server.displaced.len() <= most as usize,
            "{:?}",
            server.displaced
        );
    }
}

/// No tenant has a larger share. The one that was served least gets the place, whether a request
/// takes seconds or milliseconds.
#[test]
fn among_more_equal_tenants_than_places_the_one_served_least_gets_a_place() {
    let tenants: Vec<_> = (1..=41).map(|id| (id, TenantPolicy::default())).collect();
    for (prompt, output) in [(600, 10), (20, 4)] {
        let mut server = Server::new(LIMITS, &tenants);
        let flood = |server: &mut Server| {
            for flooder in 1..=40 {
                server.submit(flooder, prompt, output);
            }
        };
        let served = |server: &Server, id| server.scheduler.tenant(TenantId(id)).service;
        while (1..=40).any(|id| served(&server, id) == 0) {
            flood(&mut server);
            server.step();
        }
        for _ in 0..10 {
            assert!(server.submit(41, 20, 4), "it was never served");
            flood(&mut server);
            assert!(!server.displaced.contains(&41));
            server.cancel_all(41);
        }
    }
}

/// A client sends its next request when its last one has ended or was refused, beside tenants of
/// the same share that fill the queue. It gets as much as each of them.
#[test]
fn a_client_gets_its_share_beside_more_flooding_tenants_than_places() {
    let tenants: Vec<_> = (1..=41).map(|id| (id, TenantPolicy::default())).collect();
    let mut server = Server::new(LIMITS, &tenants);
    let (mut accepted, mut refused) = (0, 0);
    while server.now < 20_000_000 {
        for flooder in 1..=40 {
            for _ in server.of(flooder)..2 {
                server.submit(flooder, 20, 4);
            }
        }
        if server.of(41) == 0 {
            if server.submit(41, 20, 4) {
                accepted += 1;
            } else {
                refused += 1;
            }
        }
        server.step();
    }
    let service = |id| server.scheduler.tenant(TenantId(id)).service;
    let mean = (1..=40).map(service).sum::<u64>() / 40;
    let own = service(41);
    assert!(
        own >= mean * 3 / 4,
        "{own} of {mean} µs; {accepted} accepted, {refused} refused"
    );
}

#[test]
fn a_tenant_with_nothing_waiting_gets_a_place_in_a_queue_full_of_time() {
    let limits = Limits {
        max_queued: 1000,
        max_queued_time: 30 * SECOND,
        ..LIMITS
    };
    let tenants: Vec<_> = (0..3).map(|id| (id, TenantPolicy::default())).collect();
    let mut server = Server::new(limits, &tenants);
    while server.submit(1, 40, 30) {}
    let waiting = server.of(1);
    assert!(waiting > 3, "{waiting}");
    assert!(
        server.submit(0, 400, 300),
        "only the time of the others counts"
    );
    assert!(server.displaced.is_empty() && server.submit(2, 40, 30));
    assert_eq!(
        server.displaced,
        [1],
        "one request gives way to the first one"
    );
    while server.submit(2, 40, 30) {}
    assert!(
        server.of(1).abs_diff(server.of(2)) <= 2,
        "{:?}",
        server.alive
    );
}

#[test]
fn shares_of_a_full_queue_follow_the_weights() {
    let policy = |weight| TenantPolicy {
        weight,
        ..TenantPolicy::default()
    };
    let mut server = Server::new(LIMITS, &[(1, policy(1)), (2, policy(3))]);
    while server.submit(1, 10, 10) {}
    assert_eq!(server.of(1), 16);
    while server.submit(2, 10, 10) {}
    assert_eq!((server.of(1), server.of(2)), (4, 12));
    assert!(!server.submit(1, 10, 10));
    assert_eq!(server.displaced, [1; 12]);
}

#[test]
fn a_displaced_request_costs_its_tenant_nothing_and_its_handle_is_dead() {
    let rated = TenantPolicy {
        requests: Some(Rate {
            per_minute: 1,
            burst: 2,
        }),
        tokens: Some(Rate {
            per_minute: 1,
            burst: 1000,
        }),
        ..TenantPolicy::default()
    };
    let limits = Limits {
        max_queued: 2,
        ..LIMITS
    };
    let tenants = [(TenantId(1), rated), (TenantId(2), TenantPolicy::default())];
    let mut scheduler = scheduler(limits);
    assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
    let request = |tenant| Request {
        prompt: vec![1; 20],
        max_new_tokens: 30,
        tenant: TenantId(tenant),
        ..Request::default()
    };
    let first = scheduler.submit_choices(0, request(1), 3);
    let rates = scheduler.rates(0, TenantId(1));
    let newest = scheduler
        .submit_choices(0, request(1), 2)
        .expect("there is a place");
    let left = |scheduler: &Scheduler| scheduler.rates(0, TenantId(1));
    assert_eq!(
        left(&scheduler).tokens.map(|rate| rate.remaining),
        Some(1000 - 110 - 80)
    );
    let victim = scheduler.submit(0, request(2));
    assert!(first.is_ok() && victim.is_ok());
    assert_eq!(left(&scheduler), rates, "the newer request has left");
    let displaced: Vec<_> = scheduler.events().collect();
    let ids = displaced.iter().filter_map(|event| match event {
        Event::Displaced {
            id, retry_after, ..
        } if *retry_after > 0 => Some(*id),
        _ => None,
    });
    assert_eq!(
        ids.collect::<Vec<_>>(),
        newest,
        "all choices of it, and nothing else"
    );
    for id in newest {
        assert!(!scheduler.cancel(id, FinishReason::Cancelled));
    }
    scheduler.check();
}

#[test]
fn the_choices_of_a_request_take_one_place_and_are_refused_together() {
    let own = TenantPolicy {
        max_queued: 1,
        max_queued_time: 1,
        ..TenantPolicy::default()
    };
    let limits = Limits {
        max_queued: 1,
        max_queued_time: 1,
        max_running: 2,
        ..LIMITS
    };
    let mut scheduler = scheduler(limits);
    assert_eq!(scheduler.set_tenants(&[(TenantId(0), own)]), Ok(()));
    let request = Request {
        prompt: vec![1; 20],
        max_new_tokens: 3,
        ..Request::default()
    };
    let ids = scheduler
        .submit_choices(0, request.clone(), 8)
        .expect("the machine is idle");
    assert_eq!((ids.len(), scheduler.snapshot().queued), (8, 8));
    let refused = scheduler.submit_choices(0, request, 2);
    assert!(
        matches!(refused, Err(Refusal::TenantQueueFull { .. })),
        "{refused:?}"
    );
    assert_eq!(scheduler.snapshot().queued, 8);
    let mut ended = 0;
    while let Plan::Step(step) = scheduler.plan(0) {
        let wanted = step.batch().logits_count();
        step.commit(0, &vec![Sampled::Token(7); wanted]);
        let finished = |event: &Event| matches!(event, Event::Finished { .. });
        ended += scheduler.events().filter(finished).count();
    }
    assert_eq!(ended, 8);
}

/// Without the reservation, a tenant could start any number of long answers at once.
#[test]
fn a_token_rate_is_exceeded_by_at_most_one_request() {
    let (per_minute, burst) = (100, 100);
    let rated = TenantPolicy {
        tokens: Some(Rate { per_minute, burst }),
        ..TenantPolicy::default()
    };
    let mut scheduler = scheduler(LIMITS);
    assert_eq!(scheduler.set_tenants(&[(TenantId(0), rated)]), Ok(()));
    let request = |prompt| Request {
        prompt,
        max_new_tokens: 50,
        ..Request::default()
    };
    // A short prompt without output teaches the scheduler short answers.
    let mut now = 0;
    let mut run = |scheduler: &mut Scheduler| {
        while let Plan::Step(step) = scheduler.plan(now) {
            now += step.predicted();
            let wanted = step.batch().logits_count();
            step.commit(now, &vec![Sampled::Token(7); wanted]);
            scheduler.events().for_each(drop);
        }
        now
    };
    let mut tokens = 0;
    for prompt in 0..6 {
        match scheduler.submit_choices(0, request(vec![prompt; 10]), 8) {
            Ok(_) => tokens += 10 + 8 * 50,
            Err(Refusal::RateLimited { rate, .. }) => assert_eq!(rate, RateKind::Tokens),
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(tokens, 410, "one request");
    let now = run(&mut scheduler);
    let Err(Refusal::RateLimited { retry_after, .. }) = scheduler.submit(now, request(vec![9]))
    else {
        panic!("the rate is in debt");
    };
    // 410 tokens less the burst, at 100 a minute, and one token to spend.
    assert_eq!(now + retry_after, (410 - 99) * 600_000);
    let early = scheduler.submit(now + retry_after - 1, request(vec![9]));
    assert!(matches!(early, Err(Refusal::RateLimited { .. })));
    assert!(
        scheduler
            .submit(now + retry_after, request(vec![9]))
            .is_ok()
    );
}

/// A chat without `max_tokens` reserves the rest of the context. Its tenant still runs, and learns
/// when the reservation probably ends, not when the rate has earned all of it.
#[test]
fn a_tenant_with_a_small_token_rate_runs_requests_without_a_length_limit() {
    let (per_minute, burst) = (100, 100);
    let rated = TenantPolicy {
        tokens: Some(Rate { per_minute, burst }),
        ..TenantPolicy::default()
    };
    let limits = Limits {
        pages: 1000,
        max_sequence_tokens: 8192,
        ..LIMITS
    };
    let mut server = Server::new(limits, &[(0, rated)]);
    let request = Request {
        prompt: vec![1; 10],
        max_new_tokens: 8000,
        min_new_tokens: 90,
        stop_tokens: vec![100, 200, 300],
        ..Request::default()
    };
    for _ in 0..3 {
        let id = server.scheduler.submit(server.now, request.clone());
        server.alive.insert(id.expect("the rate is not used up"), 0);
        let refused = server.scheduler.submit(server.now, request.clone());
        let Err(Refusal::RateLimited { retry_after, .. }) = refused else {
            panic!("all tokens are reserved: {refused:?}");
        };
        // 8,010 tokens are earned in 80 minutes.
        assert!(retry_after <= 120 * SECOND, "{retry_after} µs");
        let retry_at = server.now + retry_after;
        while server.of(0) > 0 {
            server.step();
        }
        assert!(server.now <= retry_at);
        server.now = retry_at;
    }
}

/// Returns the costs of a machine that needs `times` the time of `COST`.
fn slower(times: u64) -> CostModel {
    CostModel {
        rows: COST.rows.map(|time| time * times),
        kilo_decode_keys: COST.kilo_decode_keys * times,
        kilo_chunk_keys: COST.kilo_chunk_keys * times,
        head: COST.head * times,
        logit: COST.logit * times,
        ..COST
    }
}

/// A server was calibrated while other work ran, which then ended. Before, it refused requests for
/// as long as they would have taken then.
#[test]
fn the_queue_forgets_a_disturbed_calibration() {
    for (of_server, of_tenant) in [(60 * SECOND, Micros::MAX), (Micros::MAX, 60 * SECOND)] {
        let limits = Limits {
            pages: 10_000,
            max_running: 4,
            max_queued: 1000,
            max_queued_time: of_server,
            max_sequence_tokens: 8192,
            ..LIMITS
        };
        let policy = TenantPolicy {
            max_queued: 1000,
            max_queued_time: of_tenant,
            ..TenantPolicy::default()
        };
        let submit = |server: &mut Server| {
            server.token += 10_000;
            let request = Request {
                prompt: (server.token..).take(128).collect(),
                max_new_tokens: 32,
                ..Request::default()
            };
            let id = server.scheduler.submit(server.now, request).ok();
            id.is_some_and(|id| server.alive.insert(id, 0).is_none())
        };
        // Returns the predicted times of a waiting request at first and later, and how many wait
        // when the queue is full.
        let run = |disturbed: Option<CostModel>| {
            let mut server = Server::new(limits.clone(), &[(0, policy.clone())]);
            if let Some(cost) = disturbed {
                server.scheduler.calibrate_unsure(cost);
            }
            for request in 0..16 {
                assert!(submit(&mut server), "request {request} of 16 at once");
            }
            let at_first = server.scheduler.snapshot().queued_time / 16;
            for _ in 0..100 {
                server.step();
            }
            let state = server.scheduler.snapshot();
            assert!(state.queued > 0, "some still wait");
            let later = state.queued_time / state.queued as u64;
            let more = (0..1000).take_while(|_| submit(&mut server)).count();
            (at_first, later, state.queued + more)
        };
        let (_, _, usual) = run(None);
        let (at_first, later, places) = run(Some(slower(8)));
        assert!(later * 5 < at_first, "{at_first} -> {later} µs");
        assert!(
            places.abs_diff(usual) * 4 < usual,
            "{usual} places undisturbed, {places} now"
        );
    }
}

#[test]
fn time_outside_of_steps_counts_as_service() {
    let limits = Limits {
        max_running: 1,
        ..LIMITS
    };
    let mut server = Server::new(
        limits,
        &[(0, TenantPolicy::default()), (1, TenantPolicy::default())],
    );
    let request = |tenant| Request {
        prompt: vec![7 + tenant; 20],
        max_new_tokens: 3,
        tenant: TenantId(tenant),
        ..Request::default()
    };
    server.scheduler.charge_time(TenantId(0), 1_000_000_000);
    assert_eq!(server.scheduler.tenant(TenantId(0)).service, SECOND);
    for tenant in [0, 0, 1, 1] {
        let id = server.scheduler.submit(server.now, request(tenant));
        server.alive.insert(id.expect("there is room"), tenant);
    }
    while server.of(1) > 0 {
        assert_eq!(server.of(0), 2, "the tenant whose texts were encoded waits");
        server.step();
    }
}

/// A tenant whose texts were read for an hour, while nobody else was there, comes a little later,
/// not an hour later. Nobody else pays.
#[test]
fn an_hour_outside_of_steps_delays_one_tenant_a_little() {
    let limits = Limits {
        max_running: 1,
        ..LIMITS
    };
    let batch = TenantPolicy {
        band: Band::Batch,
        ..TenantPolicy::default()
    };
    let request = |tenant| Request {
        prompt: vec![7 + tenant; 20],
        max_new_tokens: 3,
        tenant: TenantId(tenant),
        ..Request::default()
    };
    let standard = TenantPolicy::default();
    let mut server = Server::new(limits, &[(0, standard.clone()), (1, standard), (2, batch)]);
    server.scheduler.charge_time(TenantId(0), 3_600_000_000_000);
    let submit = |server: &mut Server, tenant| {
        let id = server.scheduler.submit(server.now, request(tenant));
        server.alive.insert(id.expect("there is room"), tenant);
    };
    for tenant in [2, 2, 2, 2, 1] {
        submit(&mut server, tenant);
    }
    while server.of(1) > 0 {
        server.step();
    }
    assert!(server.of(2) >= 3, "the band of the tenant has paid");
    let began = server.now;
    submit(&mut server, 0);
    while server.of(0) > 0 {
        while server.of(1) < 2 {
            submit(&mut server, 1);
        }
        server.step();
    }
    let waited = server.now - began;
    assert!(
        waited < 20 * SECOND,
        "the tenant has waited for {waited} µs"
    );
}

/// Before, each prompt of a request took a place, and a request of more prompts than places was
/// told to come back later, for ever.
#[test]
fn a_request_of_many_prompts_takes_one_place() {
    let limits = Limits {
        pages: 1000,
        max_queued: 8,
        max_queued_time: 1,
        ..LIMITS
    };
    let policy = TenantPolicy {
        max_queued: 4,
        max_queued_time: 1,
        requests: Some(Rate {
            per_minute: 1,
            burst: 1,
        }),
        ..TenantPolicy::default()
    };
    let mut server = Server::new(limits, &[(0, policy)]);
    let prompt = |token| Request {
        prompt: vec![token; 40],
        max_new_tokens: 3,
        ..Request::default()
    };
    let prompts: Vec<Request> = (0..70).map(prompt).collect();
    let ids = server.scheduler.submit_prompts(0, prompts, 2);
    let ids = ids.expect("the queue is empty");
    assert_eq!(ids.len(), 140);
    for id in ids {
        server.alive.insert(id, 0);
    }
    let refused = server.scheduler.submit(0, prompt(99));
    assert!(matches!(refused, Err(Refusal::RateLimited { .. })));
    while server.of(0) > 0 {
        server.step();
    }
}

/// A client that asked for 900 tokens may get them all. So another request is told when the rate
/// has earned them, not when answers of the usual length would leave room.
#[test]
fn the_retry_time_counts_the_whole_length_that_a_client_asked_for() {
    let (per_minute, burst) = (100, 100);
    let rated = TenantPolicy {
        tokens: Some(Rate { per_minute, burst }),
        ..TenantPolicy::default()
    };
    let limits = Limits {
        pages: 1000,
        max_sequence_tokens: 8192,
        ..LIMITS
    };
    let mut server = Server::new(limits, &[(0, rated)]);
    let request = Request {
        prompt: vec![1; 4],
        max_new_tokens: 900,
        is_length_given: true,
        stop_tokens: vec![100, 200, 300],
        ..Request::default()
    };
    let ids = server.scheduler.submit_choices(0, request.clone(), 8);
    for id in ids.expect("the rate is not used up") {
        server.alive.insert(id, 0);
    }
    let Err(Refusal::RateLimited { retry_after, .. }) = server.scheduler.submit(0, request.clone())
    else {
        panic!("all tokens are reserved");
    };
    // 7,204 tokens less the burst, at 100 a minute, and one token to spend.
    assert_eq!(retry_after, (7204 - 99) * 600_000);
}

#[test]
fn a_request_gets_back_the_reserved_tokens_that_it_did_not_use() {
    let rated = TenantPolicy {
        tokens: Some(Rate {
            per_minute: 60,
            burst: 1000,
        }),
        ..TenantPolicy::default()
    };
    let mut scheduler = scheduler(LIMITS);
    assert_eq!(scheduler.set_tenants(&[(TenantId(0), rated)]), Ok(()));
    let left = |scheduler: &Scheduler| {
        let rate = scheduler.rates(0, TenantId(0)).tokens;
        rate.map_or(0, |rate| rate.remaining)
    };
    let request = Request {
        prompt: (0..20).collect(),
        max_new_tokens: 500,
        stop_tokens: vec![7],
        min_new_tokens: 5,
        ..Request::default()
    };
    assert!(scheduler.submit_choices(0, request, 2).is_ok());
    assert_eq!(left(&scheduler), 0);
    while let Plan::Step(step) = scheduler.plan(0) {
        let wanted = step.batch().logits_count();
        step.commit(0, &vec![Sampled::Token(7); wanted]);
    }
    assert_eq!(
        left(&scheduler),
        1000 - 20 - 2 * 5,
        "a prompt and two answers"
    );
}

#[test]
fn a_guaranteed_tenant_is_never_preempted_for_another_tenant() {
    let limits = Limits {
        pages: 42,
        max_sequence_tokens: 42 * 16,
        ..LIMITS
    };
    let vip = TenantPolicy {
        guaranteed_pages: 30,
        ..TenantPolicy::default()
    };
    let mut server = Server::new(limits, &[(1, TenantPolicy::default()), (2, vip)]);
    assert!(server.submit(1, 16, 39 * 16 - 16));
    for _ in 0..5 {
        server.step();
    }
    // At most 30 pages, and its prompt fits beside what the other tenant has now.
    assert!(server.submit(2, 200, 30 * 16 - 200));
    for _ in 0..2000 {
        server.step();
    }
    assert!(!server.preempted.contains(&2), "{:?}", server.preempted);
}
