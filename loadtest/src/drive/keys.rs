//! The file of the tenants' API keys.

/// The name and the API key of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TenantKey {
    /// The name that reports show.
    pub(super) name: String,
    /// The API key.
    pub(super) key: String,
}

/// Reads a file of `tenant=key` lines: the first line is the key of tenant 0, and so on.
pub(super) fn read_keys(path: &str) -> Result<Box<[TenantKey]>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| match line.split_once('=') {
            Some((name, key)) if !key.trim().is_empty() => Ok(TenantKey {
                name: name.trim().to_owned(),
                key: key.trim().to_owned(),
            }),
            _ => Err(format!("line {} is not of the form tenant=key", number + 1)),
        })
        .collect()
}
