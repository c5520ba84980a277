//! The requests that run or wait, by the ids under which the operator can end them.
//!
//! Invariant: a request is in the table from its submission until its answer has been sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::{FinishReason, RequestEnder};

/// The requests that run or wait.
#[derive(Clone, Default)]
pub(in crate::api) struct RunningRequests {
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    next: u64,
    requests: HashMap<u64, RunningRequest>,
}

#[derive(Default)]
struct RunningRequest {
    ids: Vec<String>,
    enders: Vec<RequestEnder>, // One for each choice.
}

impl RunningRequests {
    /// Adds a request under one id. Several requests may have the same.
    pub(in crate::api) fn register(&self, id: &str) -> Registration {
        let mut table = self.lock();
        let number = table.next;
        table.next += 1;
        let request = RunningRequest {
            ids: vec![id.to_owned()],
            enders: Vec::new(),
        };
        table.requests.insert(number, request);
        Registration {
            running: self.clone(),
            number,
        }
    }

    /// Ends all requests with this id. Returns their number.
    pub(in crate::api) fn abort(&self, id: &str) -> usize {
        let table = self.lock();
        let submitted = table.requests.values().filter(|one| !one.enders.is_empty());
        let named = submitted.filter(|one| one.ids.iter().any(|own| own == id));
        let end = |ender: &RequestEnder| ender.finish(FinishReason::Cancelled);
        named
            .map(|request| request.enders.iter().for_each(end))
            .count()
    }

    /// Locks the table. A thread that panicked with the lock left it valid.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place in the table. Dropping it removes the request.
pub(in crate::api) struct Registration {
    running: RunningRequests,
    number: u64,
}

impl Registration {
    /// Adds an id.
    pub(super) fn add_id(&self, id: &str) {
        self.change(|request| request.ids.push(id.to_owned()));
    }

    /// Adds what ends the choices of the request.
    pub(in crate::api) fn add_enders(&self, enders: impl Iterator<Item = RequestEnder>) {
        self.change(|request| request.enders.extend(enders));
    }

    fn change(&self, change: impl FnOnce(&mut RunningRequest)) {
        let mut table = self.running.lock();
        let request = table.requests.get_mut(&self.number);
        change(request.expect("in the table until it is dropped"));
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.running.lock().requests.remove(&self.number);
    }
}
