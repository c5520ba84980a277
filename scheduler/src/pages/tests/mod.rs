//! Tests of the page pool: single situations here, random worlds beside a slow reference in
//! `random_worlds`.

mod mirror;
mod random_worlds;
mod reference;

use super::*;

fn sequence() -> SequenceId {
    SequenceId::new(0, 0)
}

/// Takes and publishes a page of equal tokens for each token of `path`, each under the one before.
fn publish_path(
    pool: &mut PagePool,
    tenant: TenantId,
    public: &[PublicPrefix],
    path: &[TokenId],
) -> Vec<Page> {
    let mut table: Vec<Page> = Vec::new();
    for &token in path {
        let page = pool.take(sequence(), tenant).unwrap();
        let tokens = [token; PAGE_TOKENS];
        let parent = table.last().copied();
        let edge = pool
            .tree
            .edge_for(tenant, public, parent, &tokens, Behind::default());
        table.push(pool.publish(sequence(), page, &edge));
    }
    table
}

#[test]
fn a_released_path_is_evicted_from_its_end() {
    let mut pool = PagePool::new(3);
    let tenant = TenantId(0);
    let table = publish_path(&mut pool, tenant, &[], &[0, 1, 2]);
    assert_eq!(pool.take(sequence(), tenant), None, "all pages are in use");
    pool.release_table(&table);
    for &page in table.iter().rev() {
        assert_eq!(pool.take(sequence(), tenant), Some(page));
    }
    assert_eq!(pool.evictions, 3);
}

#[test]
fn a_tenant_at_its_cap_evicts_its_own_pages() {
    let mut pool = PagePool::new(8);
    let (capped, other) = (TenantId(0), TenantId(1));
    pool.set_tenant(other, PageQuota::default());
    let max = |max| PageQuota {
        max,
        ..PageQuota::default()
    };
    pool.set_tenant(capped, max(2));
    let table = publish_path(&mut pool, other, &[], &[7]);
    pool.release_table(&table);
    let table = publish_path(&mut pool, capped, &[], &[0, 1]);
    assert_eq!(
        pool.take(sequence(), capped),
        None,
        "the cap holds although pages are free"
    );
    pool.release_table(&table);
    assert_eq!(pool.available(capped), 2);
    assert_eq!(pool.take(sequence(), capped), Some(table[1]));
    assert_eq!((pool.held(capped), pool.in_use(capped)), (2, 1));
    pool.set_tenant(capped, max(1));
    assert_eq!(pool.take(sequence(), capped), None);
    assert_eq!(
        pool.held(capped),
        2,
        "nothing is evicted if no page can be given"
    );
    assert_eq!(pool.held(other), 1);
}

#[test]
fn a_tenant_over_its_share_evicts_its_own_pages() {
    let mut pool = PagePool::new(12);
    let (modest, thrasher) = (TenantId(0), TenantId(1));
    pool.set_tenant(thrasher, PageQuota::default());
    let kept = publish_path(&mut pool, modest, &[], &[0, 1, 2, 3]);
    pool.release_table(&kept);
    for token in 0..40 {
        let table = publish_path(&mut pool, thrasher, &[], &[token]);
        pool.release_table(&table);
    }
    let tokens = [0, 1, 2, 3].map(|token| [token; PAGE_TOKENS]).concat();
    assert!(
        pool.tree
            .find(modest, &[], 0, &tokens)
            .eq(kept.iter().copied())
    );
    assert_eq!(pool.held(thrasher), 8);
}

#[test]
fn public_pages_are_shared_and_never_evicted() {
    let mut pool = PagePool::new(8);
    let (first, second, other) = (TenantId(0), TenantId(1), TenantId(2));
    pool.set_tenant(other, PageQuota::default());
    let tokens = [0, 1, 2].map(|token| [token; PAGE_TOKENS]).concat();
    let public = [pool.declare_public(&tokens[..40])];
    assert_eq!(pool.reserved(), 2);
    for tenant in [first, second] {
        let table = publish_path(&mut pool, tenant, &public, &[0, 1, 2]);
        assert_eq!((pool.held(tenant), pool.in_use(tenant)), (1, 1));
        pool.release_table(&table);
        assert_eq!(pool.tree.find(tenant, &public, 0, &tokens).count(), 3);
        assert_eq!(pool.tree.find(tenant, &[], 0, &tokens).count(), 0);
    }
    let similar = pool.tree.similar(other, &public, None, &[0, 0, 9]);
    assert_eq!(similar.map(|(_, tokens)| tokens), Some(2));
    assert_eq!(pool.tree.similar(other, &[], None, &[0, 0, 9]), None);
    pool.forget_unpinned();
    assert_eq!(pool.tree.len(), 2);
    assert_eq!(pool.tree.find(other, &public, 0, &tokens).count(), 2);
}

#[test]
fn the_longest_tail_is_the_one_to_copy() {
    let mut pool = PagePool::new(4);
    let tenant = TenantId(0);
    let mut offer = |tokens: &[TokenId]| {
        let page = pool.take(sequence(), tenant).unwrap();
        pool.offer_tail(sequence(), page, None, tenant, tokens);
        pool.tree.len()
    };
    assert_eq!(offer(&[1, 2, 3]), 1);
    assert_eq!(offer(&[1, 2]), 1, "a longer tail covers it");
    assert_eq!(offer(&[1, 2, 3, 4]), 2);
    let (page, shared) = pool.tree.similar(tenant, &[], None, &[1, 2, 3, 5]).unwrap();
    assert_eq!((pool.tree.tokens(page).len(), shared), (4, 3));
    pool.pin(page);
    pool.forget_unpinned();
    assert!(pool.is_pinned(page));
    pool.unpin(page);
    pool.forget_unpinned();
    assert_eq!((pool.free.len(), pool.held(tenant)), (4, 0));
}

#[test]
fn only_the_most_recently_used_children_are_compared() {
    let mut pool = PagePool::new(9);
    let tenant = TenantId(0);
    let mut children = Vec::new();
    for token in 0..9 {
        let table = publish_path(&mut pool, tenant, &[], &[token]);
        pool.release_table(&table);
        children.extend(table);
    }
    assert_eq!(
        pool.tree.similar(tenant, &[], None, &[0]),
        None,
        "the ninth child is not compared"
    );
    let similar = pool.tree.similar(tenant, &[], None, &[1]);
    assert_eq!(
        similar,
        Some((children[1], 1)),
        "the eighth child is compared"
    );
    pool.pin(children[0]);
    pool.unpin(children[0]);
    let similar = pool.tree.similar(tenant, &[], None, &[0]);
    assert_eq!(
        similar,
        Some((children[0], 1)),
        "the child used last is compared"
    );
    assert_eq!(pool.tree.similar(tenant, &[], None, &[1]), None);
}

#[test]
fn a_guarantee_is_unmet_by_the_pages_not_in_use() {
    let mut pool = PagePool::new(8);
    let (tenant, other) = (TenantId(0), TenantId(1));
    let guaranteed = |guaranteed| PageQuota {
        guaranteed,
        ..PageQuota::default()
    };
    pool.set_tenant(other, guaranteed(3));
    let table = publish_path(&mut pool, other, &[], &[0, 1]);
    assert_eq!(pool.unmet_guarantees(tenant), 1);
    pool.release_table(&table);
    assert_eq!(
        pool.unmet_guarantees(tenant),
        3,
        "cached pages are not in use"
    );
    assert_eq!(pool.unmet_guarantees(other), 0);
    pool.set_tenant(other, guaranteed(0));
    assert_eq!(pool.unmet_guarantees(tenant), 0);
}
