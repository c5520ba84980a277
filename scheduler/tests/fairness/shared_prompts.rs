//! Prompts that several requests share are computed and charged once.

use sterna_scheduler::{
    FinishReason, PAGE_TOKENS, PublicPrefix, Rate, Refusal, Request, TenantId, TenantPolicy,
    TokenId,
};

use crate::server::{SECOND, VirtualServer, weight};

#[test]
fn a_shared_prompt_is_computed_once() {
    let mut server = VirtualServer::new(&[weight(1)]);
    let system: Vec<TokenId> = (0..1024).collect();
    for chat in 0..16 {
        server.submit_prompt(0, [&system[..], &[5000 + chat; 20]].concat(), 5);
    }
    while !server.requests.is_empty() {
        server.step();
    }
    let cached = server
        .ended
        .iter()
        .filter(|timeline| timeline.cached_tokens == 1024);
    assert_eq!(cached.count(), 15);
}

#[test]
fn a_public_prefix_is_computed_once_for_all_tenants_that_may_use_it() {
    let mut server = VirtualServer::new(&[]);
    let system: Vec<TokenId> = (0..100).collect();
    let prefix = server.scheduler.declare_public(&system);
    assert_eq!(prefix, PublicPrefix(0));
    let allowed = TenantPolicy {
        public: vec![prefix],
        ..TenantPolicy::default()
    };
    let policies = [allowed.clone(), allowed, TenantPolicy::default()];
    let tenants: Vec<_> = (0..).map(TenantId).zip(policies).collect();
    assert_eq!(server.scheduler.set_tenants(&tenants), Ok(()));
    for tenant in 0..3 {
        server.submit_prompt(tenant, [&system[..], &[5000 + tenant; 30]].concat(), 3);
    }
    while !server.requests.is_empty() {
        server.step();
    }
    let public = (100 / PAGE_TOKENS * PAGE_TOKENS) as u32;
    server.ended.sort_by_key(|timeline| timeline.tenant);
    let cached: Vec<u32> = server
        .ended
        .iter()
        .map(|timeline| timeline.cached_tokens)
        .collect();
    assert_eq!(cached, [0, public, 0]);
    server.scheduler.reset_prefix_cache();
    assert_eq!(
        server.scheduler.snapshot().tree,
        100 / PAGE_TOKENS,
        "a reset keeps the public pages"
    );
    server.scheduler.check();
}

#[test]
fn several_choices_are_charged_as_one_request_and_one_prompt() {
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
    let mut server = VirtualServer::new(&[rated]);
    let request = Request {
        prompt: (0..40).collect(),
        max_new_tokens: 4,
        ..Request::default()
    };
    let scheduler = &mut server.scheduler;
    let choices = scheduler
        .submit_choices(0, request.clone(), 2)
        .expect("the rate allows it");
    let rates = scheduler.rates(0, TenantId(0));
    assert_eq!(rates.requests.map(|rate| rate.remaining), Some(0));
    assert_eq!(
        rates.tokens.map(|rate| (rate.remaining, rate.reset)),
        Some((0, (40 + 2 * 4) * SECOND / 10)),
        "one prompt and two answers are reserved"
    );
    let refused = scheduler.submit(0, request);
    assert!(matches!(refused, Err(Refusal::RateLimited { .. })));
    for id in choices {
        assert!(scheduler.cancel(id, FinishReason::Cancelled));
    }
    let rates = scheduler.rates(0, TenantId(0));
    assert_eq!(
        rates.tokens.map(|rate| rate.remaining),
        Some(30),
        "a cancel refunds the tokens"
    );
}

#[test]
fn a_shared_prompt_counts_once_in_the_queued_time() {
    let mut server = VirtualServer::new(&[weight(1)]);
    let system: Vec<TokenId> = (0..1024).collect();
    let mut queued_times = Vec::new();
    for chat in 0..16 {
        server.submit_prompt(0, [&system[..], &[5000 + chat; 20]].concat(), 5);
        queued_times.push(server.scheduler.snapshot().queued_time);
    }
    // Each of the other requests adds only 20 prompt tokens and five output tokens.
    assert!(queued_times[15] < queued_times[0] * 3, "{queued_times:?}");
}
