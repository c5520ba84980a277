//! The shares of the machine that tenants and bands get.

use sterna_scheduler::{Band, TenantId, TokenId};

use crate::server::{SECOND, TARGET, VirtualServer, assert_percent, band, weight};

#[test]
fn busy_tenants_get_service_by_weight() {
    let mut server = VirtualServer::new(&[weight(1), weight(1), weight(2)]);
    // The requests differ much in shape: service is machine time.
    server.keep_busy(&[(0, 60, 100), (1, 900, 20), (2, 300, 60)], 300 * SECOND);
    let service = [0, 1, 2].map(|tenant| server.service(tenant));
    let all = service.iter().sum();
    assert_percent(service[0], all, 25, 1);
    assert_percent(service[1], all, 25, 1);
    assert_percent(service[2], all, 50, 1);
}

/// Both tenants ask for the same, except that drawing a token of the first one takes long.
#[test]
fn a_tenant_with_costly_sampling_gets_its_share_of_time_and_not_of_tokens() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    let draw_time = 30_000_000;
    server.draw_times.insert(TenantId(0), draw_time);
    let time = 300 * SECOND;
    // A step may admit more than two requests of the other tenant.
    server.keep_queued(&[(0, 60, 60), (1, 60, 60)], 16, time);
    let tokens = [0, 1].map(|tenant| {
        let timelines = server.requests.values().chain(&server.ended);
        let own = timelines.filter(|timeline| timeline.tenant == TenantId(tenant));
        own.map(|timeline| timeline.tokens.len() as u64)
            .sum::<u64>()
    });
    // What the steps take beside the sampling is shared by all tokens alike.
    let sampling = tokens[0] * draw_time / 1000;
    let each = (time - sampling) / (tokens[0] + tokens[1]);
    assert_percent(sampling + each * tokens[0], time, 50, 3);
    let service = [0, 1].map(|tenant| server.service(tenant));
    assert_percent(service[0], service[0] + service[1], 50, 1);
}

/// A step's budget leaves room for the sampling of its decodes from the first step on.
#[test]
fn costly_sampling_makes_prompts_wait_and_not_the_decodes_of_others() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    server.draw_times.insert(TenantId(1), 15_000_000);
    for tenant in [0, 1, 1, 1, 1, 1, 1] {
        server.submit(tenant, 20, 60);
    }
    server.submit(0, 4000, 1);
    while server.requests.len() > 1 {
        server.step();
    }
    let decodes = server.ended.iter().map(|timeline| &timeline.tokens);
    let gaps = decodes.flat_map(|tokens| tokens.windows(2).map(|pair| pair[1] - pair[0]));
    let longest = gaps.max().expect("there is a gap");
    assert!(longest <= TARGET * 11 / 10, "a gap of {longest} µs");
}

#[test]
fn the_difference_in_service_between_busy_tenants_is_bounded() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    let mut worst = 0;
    for _ in 0..600 {
        server.keep_busy(&[(0, 60, 150), (1, 700, 30)], SECOND / 2);
        worst = worst.max(server.service(0).abs_diff(server.service(1)));
    }
    // The slack, and the cost of what one tenant has running: a prompt's chunk and some decodes.
    assert!(worst < 8 * SECOND, "{worst} µs apart");
    assert!(worst > 0);
}

/// The slack is machine time: a tenant with cached prompts gets no further ahead with a larger
/// weight.
#[test]
fn a_large_weight_does_not_widen_the_slack() {
    let difference = |each: u32| {
        let mut server = VirtualServer::new(&[weight(each), weight(each)]);
        let system: Vec<TokenId> = (0..1024).collect();
        let mut worst = 0;
        for chat in 0..2000 {
            while server.scheduler.tenant(TenantId(0)).queued < 2 {
                let question = [5000 + chat; 20];
                server.submit_prompt(0, [&system[..], &question].concat(), 50);
            }
            server.keep_busy(&[(1, 200, 50)], 1);
            worst = worst.max(server.service(0).abs_diff(server.service(1)));
        }
        worst
    };
    let (small, large) = (difference(1), difference(1000));
    assert!(
        large < small * 3 / 2,
        "{small} µs with weight 1, {large} µs with weight 1000"
    );
}

#[test]
fn an_idle_tenant_saves_up_no_service() {
    let mut server = VirtualServer::new(&[weight(1), weight(1)]);
    server.keep_busy(&[(0, 200, 50)], 100 * SECOND);
    let before = [0, 1].map(|tenant| server.service(tenant));
    server.keep_busy(&[(0, 200, 50), (1, 200, 50)], 60 * SECOND);
    let since = [0, 1].map(|tenant| server.service(tenant) - before[tenant as usize]);
    assert_percent(since[1], since[0] + since[1], 50, 5);
}

#[test]
fn bands_get_their_shares_and_use_what_others_leave() {
    let policies = [
        band(Band::Interactive),
        band(Band::Standard),
        band(Band::Batch),
    ];
    let mut server = VirtualServer::new(&policies);
    let all = [(0, 200, 50), (1, 200, 50), (2, 200, 50)];
    server.keep_busy(&all, 300 * SECOND);
    let service = [0, 1, 2].map(|tenant| server.service(tenant));
    let sum = service.iter().sum();
    assert_percent(service[0], sum, 60, 6);
    assert_percent(service[1], sum, 30, 6);
    assert_percent(service[2], sum, 10, 6);
    server.keep_busy(&all[2..], 60 * SECOND); // The last requests of the other bands end.
    let before = server.service(2);
    let start = server.now;
    server.keep_busy(&all[2..], 60 * SECOND);
    assert_percent(server.service(2) - before, server.now - start, 100, 4);
}

#[test]
fn a_change_of_band_gives_neither_debt_nor_credit() {
    let policies = [weight(1), weight(1), band(Band::Interactive)];
    let mut server = VirtualServer::new(&policies);
    server.keep_busy(&[(0, 100, 50), (1, 100, 50)], 100 * SECOND);
    let moved = [(TenantId(0), band(Band::Interactive))];
    assert_eq!(server.scheduler.set_tenants(&moved), Ok(()));
    let busy = [(0, 100, 50), (2, 100, 50)];
    server.keep_busy(&busy, 10 * SECOND);
    let before = [0, 2].map(|tenant| server.service(tenant));
    server.keep_busy(&busy, 100 * SECOND);
    let after = [0, 2].map(|tenant| server.service(tenant));
    let [moved, other] = [after[0] - before[0], after[1] - before[1]];
    assert_percent(moved, moved + other, 50, 4);
}

#[test]
fn batch_decodes_pause_for_other_bands_but_not_for_long() {
    let policies = [weight(1), band(Band::Batch)];
    let mut server = VirtualServer::new(&policies);
    server.keep_busy(&[(1, 30, 300)], 30 * SECOND);
    server.keep_busy(&[(0, 8, 300), (1, 30, 300)], 60 * SECOND);
    let batch = server.requests.values().chain(&server.ended);
    let batch = batch.filter(|timeline| timeline.tenant == TenantId(1));
    let gaps = batch.flat_map(|timeline| timeline.tokens.windows(2).map(|pair| pair[1] - pair[0]));
    let longest = gaps.max().expect("there is a gap");
    assert!(
        longest > TARGET * 3 / 2,
        "no decode paused: the longest gap is {longest} µs"
    );
    // Three paused steps, and the step with the next token.
    assert!(longest < 5 * 250_000, "a gap of {longest} µs");
}
