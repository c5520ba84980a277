//! What a gateway in front of the server says of a request: which client it comes from, and how
//! urgent it is. Only tenants that the tenants file calls `trusted` are believed.
//!
//! The headers come from llm-d's endpoint picker and from SMG.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use axum::http::{HeaderMap, HeaderValue};

use crate::api::error::ApiError;
use crate::engine::{Band, SubTenant};

/// The headers that name the client; the first one that a request has counts.
const CLIENT: [&str; 2] = [
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
];
const OBJECTIVE: &str = "x-llm-d-inference-objective";
const PRIORITY: &str = "x-smg-priority";

const MAX_CLIENT_BYTES: usize = 256;

/// The bands by the names of objectives. llm-d's other objectives have the tenant's band.
const OBJECTIVES: [(&str, Band); 3] = [
    ("interactive", Band::Interactive),
    ("standard", Band::Standard),
    ("batch", Band::Batch),
];
/// The bands by the names of SMG's priorities.
const PRIORITIES: [(&str, Band); 4] = [
    ("system", Band::Interactive),
    ("interactive", Band::Interactive),
    ("default", Band::Standard),
    ("bulk", Band::Batch),
];

/// The place of a request among the requests of its tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::api) struct Precedence {
    /// The client of the tenant that the request comes from.
    pub(in crate::api) sub_tenant: Option<SubTenant>,
    /// The priority that the gateway gives the request. The scheduler never exceeds the tenant's.
    pub(in crate::api) band: Option<Band>,
}

impl Precedence {
    /// Reads the headers of a trusted tenant's request.
    ///
    /// # Errors
    /// If the name of the client has more than 256 bytes, or the priority is none of SMG's.
    pub(super) fn read(headers: &HeaderMap) -> Result<Precedence, ApiError> {
        let named = CLIENT
            .iter()
            .find_map(|name| Some((*name, headers.get(*name)?)));
        let sub_tenant = match named {
            Some((name, client)) if client.len() > MAX_CLIENT_BYTES => {
                let why = format!("the header {name} has more than {MAX_CLIENT_BYTES} bytes");
                return Err(ApiError::invalid_value(name, why));
            }
            Some((_, client)) if !client.is_empty() => Some(number_of(client)),
            _ => None,
        };
        let objective = headers
            .get(OBJECTIVE)
            .and_then(|value| find(value, &OBJECTIVES));
        let priority = match headers.get(PRIORITY) {
            None => None,
            Some(value) => Some(find(value, &PRIORITIES).ok_or_else(|| {
                let names = "bulk, default, interactive or system";
                ApiError::invalid_value(PRIORITY, format!("the header {PRIORITY} must be {names}"))
            })?),
        };
        Ok(Precedence {
            sub_tenant,
            band: objective.max(priority), // The lower priority of the two.
        })
    }
}

/// Returns the number of a client. The hash has a random key, so nobody can choose a name that has
/// the number of another client.
fn number_of(client: &HeaderValue) -> SubTenant {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    SubTenant(HASHER.hash_one(client.as_bytes()))
}

fn find(value: &HeaderValue, bands: &[(&str, Band)]) -> Option<Band> {
    let value = value.as_bytes();
    let mut bands = bands.iter();
    let found = bands.find(|(name, _)| value.eq_ignore_ascii_case(name.as_bytes()));
    found.map(|(_, band)| *band)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &[(&'static str, &str)]) -> Result<Precedence, ApiError> {
        let fields = fields.iter().map(|(name, value)| {
            let value = HeaderValue::from_str(value).unwrap();
            (name.parse().unwrap(), value)
        });
        Precedence::read(&fields.collect())
    }

    #[test]
    fn clients_are_told_apart_by_either_header() {
        let client = |fields: &[(&'static str, &str)]| read(fields).unwrap().sub_tenant;
        assert_eq!(client(&[]), None);
        assert_eq!(client(&[(CLIENT[0], "")]), None);
        assert_eq!(client(&[(CLIENT[0], "ann")]), client(&[(CLIENT[1], "ann")]));
        assert_ne!(client(&[(CLIENT[0], "ann")]), client(&[(CLIENT[0], "bob")]));
        let both = [(CLIENT[0], "ann"), (CLIENT[1], "bob")];
        assert_eq!(client(&both), client(&both[..1]));
        assert!(read(&[(CLIENT[0], &"x".repeat(257))]).is_err());
    }

    #[test]
    fn the_lower_of_objective_and_priority_counts() {
        let band = |fields: &[(&'static str, &str)]| read(fields).unwrap().band;
        assert_eq!(band(&[(OBJECTIVE, "food-review")]), None);
        assert_eq!(band(&[(OBJECTIVE, "Batch")]), Some(Band::Batch));
        assert_eq!(band(&[(PRIORITY, "default")]), Some(Band::Standard));
        let both = [(OBJECTIVE, "interactive"), (PRIORITY, "bulk")];
        assert_eq!(band(&both), Some(Band::Batch));
        assert!(read(&[(PRIORITY, "urgent")]).is_err());
    }
}
