//! Where each router sends requests.

use sterna_scheduler::{Page, StoredPage, TenantId};

use super::*;

/// Returns a prompt of `shared` tokens of the text `family` and `own` tokens of the text `number`.
fn prompt(family: u32, shared: usize, number: u32, own: usize) -> Vec<u32> {
    [vec![family; shared], vec![1_000 + number; own]].concat()
}

fn send(router: &mut Router, session: u64, prompt: &[u32]) -> usize {
    let request = RoutedRequest {
        session,
        tenant: 0,
        prompt,
    };
    router.send(&request).unwrap()
}

/// Sends 40 requests of sessions 0 to 39. Returns their machines.
fn machines_of_sessions(router: &mut Router) -> Vec<usize> {
    (0..40).map(|session| send(router, session, &[])).collect()
}

#[test]
fn round_robin_takes_turns_and_skips_failed_machines() {
    let mut router = Router::new(RouterKind::RoundRobin, 3);
    router.failed(1);
    assert_eq!(machines_of_sessions(&mut router)[..4], [0, 2, 0, 2]);
    router.returned(1);
    assert_eq!(machines_of_sessions(&mut router)[..4], [0, 1, 2, 0]);
}

#[test]
fn the_least_loaded_machine_is_the_one_whose_requests_ended() {
    let mut router = Router::new(RouterKind::LeastLoaded, 3);
    let machines = machines_of_sessions(&mut router);
    assert_eq!(machines[..4], [0, 1, 2, 0]);
    router.ended(2, 2);
    router.ended(2, 5);
    assert_eq!(send(&mut router, 40, &[]), 2);
}

#[test]
fn a_session_keeps_its_machine_unless_that_fails() {
    let mut router = Router::new(RouterKind::ConsistentHash, 5);
    let before = machines_of_sessions(&mut router);
    assert_eq!(machines_of_sessions(&mut router), before);
    router.failed(before[0]);
    let after = machines_of_sessions(&mut router);
    for (before_it, after_it) in before.iter().zip(&after) {
        assert_eq!(before_it != after_it, *before_it == before[0]);
    }
    router.returned(before[0]);
    assert_eq!(machines_of_sessions(&mut router), before);
    let used = (0..5).filter(|machine| before.contains(machine)).count();
    assert!(used >= 4, "{before:?}");
}

#[test]
fn a_prompt_follows_its_beginning_and_others_spread() {
    let mut router = Router::new(RouterKind::CacheAware, 3);
    let mut send_one = |family, number: u32| {
        let prompt = prompt(family, 50, number, 50);
        send(&mut router, u64::from(number), &prompt)
    };
    let first = [send_one(1, 0), send_one(2, 1), send_one(3, 2)];
    assert_eq!(first, [0, 1, 2], "the least text");
    assert_eq!([send_one(3, 3), send_one(1, 4), send_one(2, 5)], [2, 0, 1]);
    // Exactly the threshold is not enough.
    assert_eq!(send(&mut router, 6, &prompt(3, 30, 6, 70)), 0);
}

#[test]
fn an_uneven_load_counts_more_than_a_match() {
    let mut router = Router::new(RouterKind::CacheAware, 2);
    let same = prompt(1, 100, 0, 0);
    let machines: Vec<usize> = (0..80)
        .map(|session| send(&mut router, session, &same))
        .collect();
    // Machine 0 has 65 requests then, which is 64 more than machine 1 may lack.
    assert!(machines[..65].iter().all(|machine| *machine == 0));
    assert_eq!(machines[65], 1);
}

#[test]
fn the_tree_forgets_a_failed_machine() {
    let mut router = Router::new(RouterKind::CacheAware, 2);
    let same = prompt(1, 100, 0, 0);
    assert_eq!(send(&mut router, 0, &same), 0);
    router.failed(0);
    assert_eq!(send(&mut router, 1, &same), 1);
    router.returned(0);
    assert_eq!(send(&mut router, 2, &same), 1);
}

#[test]
fn a_prompt_goes_where_its_blocks_are_unless_that_machine_is_busy() {
    let mut router = Router::new(RouterKind::KvEvents, 2);
    let text = prompt(7, 32, 1, 16);
    let page = |page, parent: Option<u32>| {
        CacheChange::Stored(StoredPage {
            page: Page::new(page),
            parent: parent.map(Page::new),
            tenant: Some(TenantId(3)),
            tokens: [7; PAGE_TOKENS],
        })
    };
    router.cache_changed(1, &[page(4, None), page(2, Some(4))]);
    assert_eq!(send(&mut router, 0, &text), 1, "two of three blocks");
    assert_eq!(send(&mut router, 1, &text), 1, "one block in flight");
    assert_eq!(send(&mut router, 2, &text), 0, "two blocks in flight");
    for (session, machine) in [(0, 1), (1, 1), (2, 0)] {
        router.ended(machine, session);
    }
    router.cache_changed(1, &[CacheChange::Removed(Page::new(2))]);
    assert_eq!(send(&mut router, 3, &text), 1, "one block");
    router.ended(1, 3);
    router.failed(1);
    router.returned(1);
    assert_eq!(send(&mut router, 4, &text), 0, "the cache is lost");
}
