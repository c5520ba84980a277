//! A tenant as the HTTP interface sees it, and the rules for its id.

use std::time::Duration;

use crate::engine::{Rate, TenantId};

const MAX_ID_BYTES: usize = 64;
/// Metrics use `other` for all tenants without a series of their own, and `default` for the clients
/// of a server without keys.
const RESERVED: [&str; 2] = ["other", "default"];

/// The number of the only tenant of a server without keys.
pub(super) const ANYONE: TenantId = TenantId(0);

/// The time that a request may take, from its arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// The time to its first token.
    pub first_token: Option<Duration>,
    /// The time to its end.
    pub total: Option<Duration>,
}

/// The owner of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its id in the tenants file.
    pub id: String,
    /// Its number in the engine.
    pub number: TenantId,
    /// The deadlines of its requests.
    pub deadlines: Deadlines,
    /// The models that it may use, each by any of its names. `None` allows all models.
    pub models: Option<Vec<String>>,
    /// Whether it is a gateway whose word counts: for which client a request is, and how urgent.
    pub trusted: bool,
    /// Its rate of requests.
    pub requests: Option<Rate>,
    /// Its rate of tokens.
    pub tokens: Option<Rate>,
}

impl Tenant {
    /// Returns whether this is the tenant that every client is on a server without keys.
    pub fn is_anyone(&self) -> bool {
        self.number == ANYONE
    }

    /// Returns whether the tenant may use a model. `answers_to` tells whether a name is one of the
    /// model's names.
    pub fn may_use(&self, answers_to: impl Fn(&str) -> bool) -> bool {
        allows(self.models.as_deref(), answers_to)
    }
}

/// Returns whether a list of models, if there is one, contains a name of the model.
pub(super) fn allows(models: Option<&[String]>, answers_to: impl Fn(&str) -> bool) -> bool {
    models.is_none_or(|models| models.iter().any(|name| answers_to(name)))
}

/// Checks a name in the tenants file.
///
/// # Errors
/// If `id` is not a valid name. The error states the rule.
pub(super) fn check_id(id: &str) -> Result<(), String> {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=MAX_ID_BYTES).contains(&id.len()) && id.chars().all(is_valid) {
        return Ok(());
    }
    Err(format!(
        "a name must be 1 to {MAX_ID_BYTES} letters, digits, `.`, `_` or `-`"
    ))
}

/// Checks the id of a tenant.
///
/// # Errors
/// If `id` is not a valid name, or is reserved for metrics.
pub(super) fn check_tenant_id(id: &str) -> Result<(), String> {
    check_id(id)?;
    if RESERVED.contains(&id) {
        return Err(format!(
            "the id `{id}` is reserved for metrics; choose another one"
        ));
    }
    Ok(())
}
