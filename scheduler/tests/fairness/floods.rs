//! What a tenant sees while another one floods.

use sterna_random::Random;
use sterna_scheduler::{
    Band, CostModel, Limits, Micros, Plan, Policy, Request, SAMPLING_UNIT, Sampled, Scheduler,
    SequenceId, SubTenant, TenantId, TenantPolicy, TokenId,
};

use crate::server::{RequestTimeline, SECOND, TARGET, VirtualServer, band, weight};

#[test]
fn a_flood_of_another_tenant_hardly_delays_the_first_token() {
    let first_token = |flood: bool| {
        let mut server = VirtualServer::new(&[weight(1), weight(1)]);
        let mut slowest = 0;
        for _ in 0..20 {
            if flood {
                server.keep_busy(&[(1, 300, 100)], 10 * SECOND);
                for _ in 0..20 {
                    server.submit(1, 300, 100);
                }
            }
            let id = server.submit(0, 200, 5);
            while server.requests.contains_key(&id) {
                server.step();
            }
            let timeline = server
                .ended
                .iter()
                .rfind(|timeline| timeline.tenant == TenantId(0));
            let timeline = timeline.expect("the request has ended");
            slowest = slowest.max(timeline.tokens[0] - timeline.submitted);
        }
        slowest
    };
    let (alone, flooded) = (first_token(false), first_token(true));
    assert!(
        flooded <= alone * 6 / 5 + 250_000,
        "{alone} µs alone, {flooded} µs in a flood"
    );
}

/// Many short requests of one tenant arrive at once, and one of another tenant right after them.
/// The target leaves time for few decodes.
#[test]
fn a_burst_of_another_tenant_hardly_delays_the_first_token() {
    let first_token = |burst: u32| {
        let mut server = VirtualServer::with_strict_target(100_000, &[weight(1), weight(1)]);
        for _ in 0..burst {
            server.submit(1, 24, 24);
        }
        server.step();
        let id = server.submit(0, 24, 24);
        while server.requests.contains_key(&id) && server.requests[&id].tokens.is_empty() {
            server.step();
        }
        let timeline = &server.requests[&id];
        timeline.tokens[0] - timeline.submitted
    };
    let (alone, burst) = (first_token(1), first_token(64));
    assert!(
        burst <= 2 * alone,
        "{alone} µs alone, {burst} µs after a burst"
    );
}

/// The step with a short prompt is not filled with the prompts of a tenant that floods.
#[test]
fn the_step_of_a_short_prompt_ends_soon() {
    let last_step = |flood: u32| {
        let mut server = VirtualServer::new(&[weight(1), weight(1)]);
        server.submit(1, 24, 24);
        server.keep_queued(&[(1, 200, 24)], flood, 5 * SECOND);
        let id = server.submit(0, 24, 24);
        let mut duration = 0;
        while server.requests[&id].tokens.is_empty() {
            duration = server.step();
        }
        duration
    };
    let (alone, flooded) = (last_step(0), last_step(20));
    assert!(
        flooded <= alone * 5 / 4,
        "{alone} µs alone, {flooded} µs in a flood"
    );
}

/// Two clients of one tenant send their next request when their last one has ended, beside 2 or 64
/// clients of another. The target is 1.5 times the usual longest gap beside 2. This is the attack
/// `neighbour` of `benches/attack`, without the disturbances of a machine.
#[test]
fn sixty_four_clients_delay_two_of_another_tenant_no_more_than_two_do() {
    let mut calm = ClosedLoops::run(TARGET, 2);
    let target = percentile(&mut calm.gaps, 50) * 3 / 2;
    let [calm, flooded] = [2, 64].map(|others| {
        let mut seen = ClosedLoops::run(target, others);
        [
            percentile(&mut seen.first, 99),
            percentile(&mut seen.gaps, 99),
        ]
    });
    for (what, calm, flooded) in [
        ("first token", calm[0], flooded[0]),
        ("longest gap", calm[1], flooded[1]),
    ] {
        assert!(2 * flooded <= 3 * calm, "{what}: {calm} -> {flooded} µs");
    }
}

/// What two clients of the first tenant saw.
#[derive(Default)]
struct ClosedLoops {
    first: Vec<Micros>, // From submission to the first token.
    gaps: Vec<Micros>,  // The longest of each answer.
}

impl ClosedLoops {
    /// Runs twelve rounds of six seconds beside `others` clients of the second tenant.
    fn run(target: Micros, others: usize) -> ClosedLoops {
        let mut server = VirtualServer::with_strict_target(target, &[weight(1), weight(1)]);
        for _ in 0..12 {
            let end = server.now + 6 * SECOND;
            while server.now < end || !server.requests.is_empty() {
                for (tenant, clients) in [(1, others), (0, 2)] {
                    let of_tenant = |timeline: &&RequestTimeline| timeline.tenant.0 == tenant;
                    let open = server.requests.values().filter(of_tenant).count();
                    let missing = clients - open;
                    for _ in 0..if server.now < end { missing } else { 0 } {
                        server.submit(tenant, 24, 24);
                    }
                }
                server.step();
            }
        }
        let mut seen = ClosedLoops::default();
        for timeline in server.ended.iter().filter(|ended| ended.tenant.0 == 0) {
            seen.first.push(timeline.tokens[0] - timeline.submitted);
            let gaps = timeline.tokens.windows(2).map(|two| two[1] - two[0]);
            seen.gaps.extend(gaps.max());
        }
        seen
    }
}

fn percentile(times: &mut [Micros], percent: usize) -> Micros {
    times.sort_unstable();
    times[times.len() * percent / 100]
}

/// One tenant has eight prompts in computation and none waiting, and then another tenant has one.
/// The two take turns, although the first is ahead by less than the slack.
#[test]
fn tenants_take_turns_in_prefill() {
    let mut server = VirtualServer::with_strict_target(100_000, &[weight(1), weight(1)]);
    let many: Vec<SequenceId> = (0..8).map(|_| server.submit(1, 16, 24)).collect();
    let one = server.submit(0, 16, 24);
    let has_token = |server: &VirtualServer, id: &SequenceId| {
        let timeline = server.requests.get(id);
        timeline.is_none_or(|timeline| !timeline.tokens.is_empty())
    };
    while !has_token(&server, &one) {
        server.step();
    }
    let earlier = many.iter().filter(|id| has_token(&server, id)).count();
    assert!(earlier <= 1, "{earlier} of 8 prompts were computed first");
}

#[test]
fn every_request_of_every_tenant_ends() {
    let mut server = VirtualServer::new(&[weight(1), weight(3), band(Band::Batch)]);
    for tenant in [0, 1, 2] {
        for length in [1, 15, 16, 17, 500, 3000] {
            server.submit(tenant, length, 30);
        }
    }
    while !server.requests.is_empty() {
        server.step();
        let oldest = server
            .requests
            .values()
            .map(|timeline| timeline.submitted_at_step)
            .min();
        assert!(oldest.is_none_or(|step| server.steps < step + 3000));
    }
    assert_eq!(server.ended.len(), 18);
    assert!(server.ended.iter().all(|timeline| timeline.first_step > 0));
}

/// Runs a scheduler with few pages. Tenant 1 floods it, and tenant 2 sometimes submits a prompt
/// that needs much of the memory.
fn run_flooded_world(seed: u64) {
    let mut random = Random::new(seed);
    random.below(40);
    let pages = 24 + random.below(80) as u32;
    let limits = Limits {
        pages,
        max_running: 64,
        max_queued: 1000,
        max_queued_time: Micros::MAX,
        step_tokens: 16 + random.below(32) as u32,
        prefill_chunk: 16,
        max_sequence_tokens: pages * 16,
        states: None,
        diffusion: None,
    };
    let mut scheduler = Scheduler::new(limits, Policy::default());
    scheduler.calibrate(CostModel {
        rows: CostModel::roofline(4_000_000, 450_000),
        kilo_decode_keys: 60_000,
        kilo_chunk_keys: 50_000,
        head: 2_500_000,
        logit: 100_000,
        sampling: SAMPLING_UNIT,
    });
    let tenants = [1, 2].map(|id| (TenantId(id), TenantPolicy::default()));
    assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
    let (mut now, mut token) = (0, 0);
    for step in 0..400 {
        let mut submit = |tenant: u32, prompt: u64, output: u32| {
            token += prompt as TokenId;
            let request = Request {
                prompt: (token - prompt as TokenId..token).collect(),
                max_new_tokens: output,
                tenant: TenantId(tenant),
                ..Request::default()
            };
            let _ = scheduler.submit(now, request); // A full queue does not matter here.
        };
        for _ in 0..4 * (1 - step % 2) {
            let output = if step < 60 {
                2
            } else {
                16 + random.below(60) as u32
            };
            submit(1, 10 + random.below(6), output);
        }
        if random.below(12) == 0 {
            let prompt = 16 * (1 + random.below(u64::from(pages) * 2 / 3));
            submit(2, prompt, 4);
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

/// With these seeds a prompt for which decodes pause finds no memory. A plan once was empty then.
#[test]
fn decodes_go_on_when_the_prompt_they_pause_for_finds_no_memory() {
    for seed in [1266, 1491, 4281] {
        run_flooded_world(seed);
    }
}

/// One client of a tenant floods it. Another client of the same tenant waits for what runs already,
/// not for the flood.
#[test]
fn a_flood_of_one_client_hardly_delays_another_of_its_tenant() {
    let first_token = |flood: u32, client: Option<u64>| {
        let mut server = VirtualServer::new(&[weight(1)]);
        server.client = Some(SubTenant(1));
        for _ in 0..flood {
            server.submit(0, 300, 100);
        }
        for _ in 0..40 {
            server.step();
        }
        server.client = client.map(SubTenant);
        let id = server.submit(0, 200, 5);
        while server.requests[&id].tokens.is_empty() {
            server.step();
        }
        let timeline = &server.requests[&id];
        timeline.tokens[0] - timeline.submitted
    };
    let alone = first_token(0, Some(2));
    let told_apart = first_token(200, Some(2));
    let as_one = first_token(200, Some(1));
    assert!(
        told_apart <= alone + 12 * SECOND,
        "{alone} µs alone, {told_apart} µs"
    );
    assert!(
        as_one > 20 * told_apart,
        "{as_one} µs as one client, {told_apart} µs as two"
    );
}
