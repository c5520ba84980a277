//! The rules for ids of tenants and names of public prefixes.

const MAX_ID_BYTES: usize = 64;
/// Metrics use `other` for all tenants without a series of their own, and `default` for the clients
/// of a server without keys.
const RESERVED: [&str; 2] = ["other", "default"];

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
    match RESERVED.contains(&id) {
        true => Err(format!(
            "the id `{id}` is reserved for metrics; choose another one"
        )),
        false => Ok(()),
    }
}
