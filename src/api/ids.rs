//! Ids of requests and answers, and the times that answers show.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderName;

/// The header that has the id of a request.
pub(in crate::api) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Returns a unique id that starts with `prefix`.
pub(in crate::api) fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}

/// Returns a random number. Not for secrets.
///
/// The standard library's hash keys are random for each thread and differ from call to call.
pub(in crate::api) fn random_u64() -> u64 {
    RandomState::new().hash_one(0)
}

/// Returns the current time in Unix seconds.
pub(in crate::api) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
