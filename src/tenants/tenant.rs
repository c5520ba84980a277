//! A tenant as the HTTP interface sees it.

use std::time::Duration;

use crate::engine::{Rate, TenantId};

/// The number of the only tenant of a server without keys.
const ANYONE: TenantId = TenantId(0);

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
    /// Its rate of requests.
    pub requests: Option<Rate>,
    /// Its rate of tokens.
    pub tokens: Option<Rate>,
}

impl Tenant {
    /// Returns the tenant that every client is on a server without keys.
    pub(super) fn anyone(deadlines: Deadlines) -> Tenant {
        Tenant {
            id: "default".into(),
            number: ANYONE,
            deadlines,
            models: None,
            requests: None,
            tokens: None,
        }
    }

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
