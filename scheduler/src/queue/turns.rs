//! The order in which the requests of one tenant wait: requests with a lower band of their own come
//! last, and the clients of the tenant take turns.
//!
//! This is start-time fair queueing (Goyal et al., SIGCOMM 1996) in predicted machine time. A
//! request gets a start tag: the finish tag of its client's last request, but at least the clock.
//! The finish tag of a request is its start tag plus its predicted time. The clock is the start tag
//! of the last request that started. So a client that floods its tenant delays only itself. As
//! between tenants, a request with a long cached prefix may start earlier, as long as its client is
//! not ahead by more than the slack of [`Order::FairShare`](crate::Order::FairShare).
//!
//! Invariant: the requests of one client of one band keep the order of their arrival.

use std::collections::BTreeMap;

use crate::{Band, Nanos, SubTenant};

/// The number of clients of one tenant and band whose finish tags are kept. Beyond this number, the
/// client that is least ahead is forgotten.
const MAX_CLIENTS: usize = 1024;

/// The place of a request among the requests of its tenant; the least is first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueTurn {
    /// The band of the request, if it is lower than the tenant's band.
    pub(crate) lowered: Option<Band>,
    start: u64,
}

impl QueueTurn {
    /// Returns whether a request with this turn may start while one with the turn `first` waits: it
    /// has no lower band, and its client is not more than `slack` ahead.
    pub(super) fn is_within(self, slack: Nanos, first: QueueTurn) -> bool {
        self.lowered <= first.lowered && self.start <= first.start.saturating_add(slack)
    }
}

/// The clocks and the clients of one tenant.
#[derive(Debug, Default)]
pub(super) struct Turns {
    own: BandTurns,          // Of the tenant's own band.
    lowered: [BandTurns; 3], // By band.
}

#[derive(Debug, Default)]
struct BandTurns {
    clock: u64,
    latest: u64, // The greatest finish tag so far.
    rest: u64,   // The finish tag of the requests without a client.
    finish: BTreeMap<SubTenant, u64>,
}

impl Turns {
    /// Gives a new request its turn.
    pub(super) fn take(
        &mut self,
        lowered: Option<Band>,
        client: Option<SubTenant>,
        time: Nanos,
    ) -> QueueTurn {
        let start = self.of(lowered).take(client, time);
        QueueTurn { lowered, start }
    }

    /// Returns whether the tenant has told clients apart since it was idle.
    pub(super) fn have_clients(&self) -> bool {
        let mut all = self.lowered.iter().chain([&self.own]);
        all.any(|turns| !turns.finish.is_empty())
    }

    /// Notes that a request starts for the first time.
    pub(super) fn begin(&mut self, turn: QueueTurn) {
        let turns = self.of(turn.lowered);
        turns.clock = turns.clock.max(turn.start);
    }

    /// Notes that the tenant is idle: no client is ahead of another.
    pub(super) fn level(&mut self) {
        for turns in self.lowered.iter_mut().chain([&mut self.own]) {
            turns.clock = turns.latest;
            turns.finish.clear();
        }
    }

    fn of(&mut self, lowered: Option<Band>) -> &mut BandTurns {
        match lowered {
            Some(band) => &mut self.lowered[band as usize],
            None => &mut self.own,
        }
    }
}

impl BandTurns {
    fn take(&mut self, client: Option<SubTenant>, time: Nanos) -> u64 {
        let finish = match client {
            Some(client) => self.finish.entry(client).or_default(),
            None => &mut self.rest,
        };
        let start = self.clock.max(*finish);
        *finish = start + time.max(1); // So that they take turns even if nothing is predicted.
        self.latest = self.latest.max(*finish);
        if self.finish.len() > MAX_CLIENTS {
            let least = self.finish.iter().min_by_key(|(_, finish)| **finish);
            let least = least.map(|(client, _)| *client);
            least.and_then(|client| self.finish.remove(&client));
        }
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<SubTenant> = Some(SubTenant(1));
    const B: Option<SubTenant> = Some(SubTenant(2));

    #[test]
    fn a_flood_of_one_client_comes_after_the_first_request_of_another() {
        let mut turns = Turns::default();
        let flood: Vec<QueueTurn> = (0..100).map(|_| turns.take(None, A, 10)).collect();
        assert!(flood.is_sorted());
        turns.begin(flood[0]);
        let first = turns.take(None, B, 10);
        assert!(first < flood[1], "{first:?}");
        // It saves up no time from before it came.
        turns.begin(flood[1]);
        let second = turns.take(None, B, 10);
        assert!(second >= flood[1] && second < flood[2], "{second:?}");
    }

    #[test]
    fn a_lower_band_comes_last_and_an_idle_tenant_owes_nothing() {
        let mut turns = Turns::default();
        let batch = turns.take(Some(Band::Batch), A, 10);
        let usual: Vec<QueueTurn> = (0..3).map(|_| turns.take(None, A, 10)).collect();
        assert!(usual.iter().all(|turn| *turn < batch));
        turns.level();
        let (a, b) = (turns.take(None, A, 10), turns.take(None, B, 10));
        assert_eq!(a, b);
        assert!(a > usual[2]);
    }

    #[test]
    fn requests_without_a_client_keep_their_order() {
        let mut turns = Turns::default();
        let times = [5, 0, 7, 1];
        let all: Vec<QueueTurn> = times.map(|time| turns.take(None, None, time)).into();
        assert!(all.is_sorted());
    }

    #[test]
    fn the_number_of_clients_is_bounded() {
        let mut turns = Turns::default();
        for client in 0..5000 {
            turns.take(None, Some(SubTenant(client)), client);
        }
        assert_eq!(turns.own.finish.len(), MAX_CLIENTS);
    }
}
