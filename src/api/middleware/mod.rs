//! What happens to every request before its endpoint, and to every response after it.

pub(in crate::api) mod access;
pub(in crate::api) mod authentication;
pub(in crate::api) mod head_check;
pub(in crate::api) mod precedence;
pub(in crate::api) mod rate_headers;
pub(in crate::api) mod request_id;
pub(in crate::api) mod request_log;
pub(in crate::api) mod trace_context;
