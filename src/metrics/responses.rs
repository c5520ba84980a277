//! The responses by route and status.
//!
//! Invariant: a route is the path of an endpoint as the API names it, never the path that a client
//! sent. So clients cannot make series.

use std::collections::HashMap;

use metrics::{Counter, counter};

use super::registry::Registry;

const NAME: &str = "sterna_http_responses_total";
const HELP: &str = "HTTP responses, by the path of the endpoint and by status. A path without an \
                    endpoint is 'unknown'.";
const UNKNOWN: &str = "unknown";

/// The counters of all routes that have answered.
#[derive(Default)]
pub(super) struct ResponseSeries {
    counters: HashMap<(String, u16), Counter>,
}

impl ResponseSeries {
    /// Registers the first series. The recorder must be in place.
    pub(super) fn register(to: &mut Registry) -> ResponseSeries {
        to.define_counter(NAME, HELP);
        let mut series = ResponseSeries::default();
        series.of(None, 404);
        series
    }

    /// Returns the counter of a route and a status. The recorder must be in place.
    pub(super) fn of(&mut self, route: Option<&str>, status: u16) -> &Counter {
        let route = route.unwrap_or(UNKNOWN).to_owned();
        let counter = || counter!(NAME, "route" => route.clone(), "status" => status.to_string());
        let key = (route.clone(), status);
        self.counters.entry(key).or_insert_with(counter)
    }
}
