//! Who gives way in a full ledger.

use sterna_scheduler::{Ledger, NoRoom, Share, quarter};

const ALICE: &str = "alice";
const BOB: &str = "bob";
const CAROL: &str = "carol";

fn weight(weight: u64) -> Share {
    Share {
        weight,
        ..Share::EQUAL
    }
}

/// Returns a ledger of ten units, some of which are taken.
fn ledger(taken: &[(&'static str, Share, usize)]) -> Ledger<&'static str> {
    let mut ledger = Ledger::new(10);
    for &(owner, share, count) in taken {
        assert_eq!(ledger.room_for(owner, share, count), Ok(None));
        ledger.take(owner, share, count);
    }
    ledger
}

#[test]
fn alone_an_owner_takes_all_and_gives_way_to_the_first_that_comes() {
    let mut full = ledger(&[(ALICE, Share::EQUAL, 10)]);
    assert_eq!(full.room_for(ALICE, Share::EQUAL, 1), Err(NoRoom::OfAll));
    for taken in 0..5 {
        let room = full.room_for(BOB, Share::EQUAL, 1);
        assert_eq!(room, Ok(Some(ALICE)), "{taken}");
        full.give_back(ALICE, 1);
        full.take(BOB, Share::EQUAL, 1);
    }
    for owner in [ALICE, BOB] {
        let room = full.room_for(owner, Share::EQUAL, 1);
        assert_eq!(room, Err(NoRoom::OfAll), "five each");
    }
    assert_eq!(full.room_for(CAROL, Share::EQUAL, 1), Ok(Some(BOB)));
}

#[test]
fn a_quota_holds_even_if_all_is_free() {
    let quota = Share::with_quota(quarter(10));
    let own = ledger(&[(ALICE, quota, 3)]);
    assert_eq!(own.room_for(ALICE, quota, 1), Err(NoRoom::OfOwner));
    assert_eq!(own.room_for(BOB, quota, 3), Ok(None));
}

#[test]
fn by_weight_an_owner_keeps_more() {
    let heavy = weight(4);
    let mut full = ledger(&[(ALICE, heavy, 8), (BOB, Share::EQUAL, 2)]);
    assert_eq!(full.room_for(BOB, Share::EQUAL, 1), Err(NoRoom::OfAll));
    assert_eq!(full.room_for(ALICE, heavy, 1), Err(NoRoom::OfAll));
    full.give_back(ALICE, 4);
    full.take(BOB, Share::EQUAL, 4);
    assert_eq!(full.room_for(ALICE, heavy, 4), Ok(Some(BOB)));
    assert_eq!(full.room_for(ALICE, heavy, 7), Err(NoRoom::OfAll));
}

#[test]
fn many_units_fit_if_all_who_are_above_give_way_together() {
    let four = [(ALICE, Share::EQUAL, 5), (BOB, Share::EQUAL, 5)];
    let mut full = ledger(&four);
    assert_eq!(full.room_for(CAROL, Share::EQUAL, 4), Err(NoRoom::OfAll));
    for owner in [BOB, ALICE, BOB] {
        assert_eq!(full.room_for(CAROL, Share::EQUAL, 3), Ok(Some(owner)));
        full.give_back(owner, 1);
    }
    assert_eq!(full.room_for(CAROL, Share::EQUAL, 3), Ok(None));
}

#[test]
fn with_more_owners_than_units_each_keeps_its_only_one() {
    let mut full = Ledger::new(3);
    for owner in 0..3 {
        full.take(owner, Share::EQUAL, 1);
    }
    assert_eq!(full.room_for(3, weight(1000), 1), Err(NoRoom::OfAll));
    full.give_back(1, 1);
    full.take(0, weight(1000), 1);
    assert_eq!(full.room_for(3, Share::EQUAL, 1), Ok(Some(0)));
}

#[test]
fn a_quarter_of_something_is_never_nothing() {
    assert_eq!([0, 1, 4, 5, 256].map(quarter), [0, 1, 1, 2, 64]);
}
