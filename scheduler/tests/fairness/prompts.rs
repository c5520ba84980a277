//! Long and short prompts beside each other and beside decodes.

use sterna_scheduler::{
    Event, Limits, Micros, Plan, Policy, Request, Sampled, Scheduler, TenantId, TenantPolicy,
    TokenId,
};

use crate::server::{COST, SECOND, TARGET, VirtualServer, weight};

#[test]
fn a_short_prompt_behind_a_long_one_gets_its_first_token_in_three_steps() {
    for tenant in [0, 1] {
        let mut server = VirtualServer::new(&[weight(1), weight(1)]);
        server.submit(0, 4096, 10);
        for _ in 0..5 {
            server.step();
        }
        let short = server.submit(tenant, 50, 10);
        for _ in 0..3 {
            server.step();
        }
        let timeline = &server.requests[&short];
        assert!(!timeline.tokens.is_empty(), "tenant {tenant}: {timeline:?}");
    }
}

#[test]
fn long_prompts_do_not_delay_the_decodes_of_another_tenant() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    for _ in 0..4 {
        server.submit(0, 50, 400);
    }
    for _ in 0..5 {
        server.step();
    }
    server.keep_busy(&[(1, 4096, 10)], 60 * SECOND);
    let decodes = server.requests.values().chain(&server.ended);
    let decodes = decodes.filter(|timeline| timeline.tenant == TenantId(0));
    let gaps: Vec<Micros> = decodes
        .flat_map(|timeline| timeline.tokens.windows(2).map(|pair| pair[1] - pair[0]))
        .collect();
    assert!(gaps.len() > 400, "only {} tokens", gaps.len());
    let longest = gaps.iter().max().expect("there is a gap");
    assert!(*longest <= TARGET * 5 / 4, "a gap of {longest} µs");
}

/// A decode that waits for a page of its tenant is in no step, so it shortens no step.
#[test]
fn a_decode_without_a_page_does_not_shorten_steps() {
    let capped = TenantPolicy {
        max_pages: 3,
        ..TenantPolicy::default()
    };
    let mut server = VirtualServer::new(&[weight(1), capped]);
    let ids = [server.submit(1, 10, 30), server.submit(1, 10, 30)];
    let decoded = |server: &VirtualServer| ids.map(|id| server.requests[&id].tokens.len());
    while decoded(&server) != [8, 7] {
        server.step();
    }
    server.submit(0, 4000, 1);
    for _ in 0..6 {
        let duration = server.step();
        assert!(duration > TARGET * 3 / 4, "a step of {duration} µs");
    }
    assert_eq!(decoded(&server), [14, 7], "one decode has no page");
}

#[test]
fn a_long_prompt_progresses_beside_many_decodes() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    let long = server.submit(1, 2000, 1);
    server.keep_busy(&[(0, 50, 200)], 200 * SECOND);
    assert!(
        !server.requests.contains_key(&long),
        "200 s are enough for 2,000 tokens"
    );
}

#[test]
fn a_large_request_is_bypassed_only_so_often() {
    let limits = Limits {
        pages: 10,
        max_running: 4,
        max_queued: 100,
        max_queued_time: Micros::MAX,
        step_tokens: 64,
        prefill_chunk: 64,
        max_sequence_tokens: 160,
        states: None,
        diffusion: None,
    };
    let mut scheduler = Scheduler::new(limits, Policy::default());
    scheduler.calibrate(COST);
    let request = |first: TokenId, prompt: TokenId, output: u32| Request {
        prompt: (first..first + prompt).collect(),
        max_new_tokens: output,
        ..Request::default()
    };
    let (mut submitted, mut ended_before) = (0, 0);
    let mut large = None;
    for step in 0..400 {
        if step == 20 {
            large = scheduler.submit(0, request(500_000, 150, 3)).ok();
            assert!(large.is_some(), "it fits alone");
        }
        while scheduler.tenant(TenantId(0)).queued < 6 {
            submitted += 1; // Different output lengths, so that they do not all end at once.
            assert!(
                scheduler
                    .submit(0, request(submitted * 100, 9, 2 + submitted % 5))
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
                    assert!(ended_before < 80, "{ended_before} requests ended first");
                    return;
                }
                Event::Finished { .. } if large.is_some() => ended_before += 1,
                _ => {}
            }
        }
    }
    panic!("{ended_before} requests ended, and the large one is still waiting");
}

/// Each newcomer comes before the large request. They must not bypass it forever.
#[test]
fn a_large_request_is_bypassed_by_newcomers_only_so_often() {
    let newcomer = weight(1);
    let policies: Vec<_> = (0..800).map(|_| newcomer.clone()).collect();
    let mut server = VirtualServer::with_pages(20, &policies);
    server.keep_busy(&[(0, 30, 4)], 2 * SECOND);
    let large = server.submit(0, 290, 3); // All pages but one.
    for tenant in 1..800 {
        server.submit(tenant, 20, 4);
        server.step();
        server.step();
        if !server.requests.contains_key(&large) {
            assert!(tenant < 300, "{tenant} tenants came first");
            return;
        }
    }
    panic!("the large request is still waiting");
}
