//! Installs the tenants at the start and at each SIGHUP.
//!
//! Invariant: the engine knows a tenant before the HTTP interface accepts its keys.
//!
//! Invariant: a file with a fault changes nothing.

use std::error::Error;
use std::time::Duration;

use sterna_scheduler::{Limits, PAGE_TOKENS, quarter};
use tokio::signal::unix::Signal;
use tokio::task::spawn_blocking;

use crate::api::{App, ModelCard};
use crate::config::ServeConfig;
use crate::engine::{EngineHandle, TenantsRefused, TokenId};
use crate::metrics::Metrics;
use crate::tenants::{
    Deadlines, Defaults, FileError, PublicText, Roster, Tenants, anyone_and_admin,
};
use crate::text::{ChatTemplate, Message, TemplateArguments, Tokenizer};

/// Public prefixes may use this fraction of the pages.
const PUBLIC_DIVISOR: usize = 2;

/// Reads the tenants of `--tenants`, if the flag is given.
///
/// `is_loopback` says that only this machine can reach the server.
///
/// # Errors
/// If the file has a fault, or if other machines could use the server without a key.
pub(super) fn roster(
    config: &ServeConfig,
    is_loopback: bool,
) -> Result<Option<Roster>, Box<dyn Error>> {
    let host = &config.network.host;
    match &config.access.tenants {
        Some(path) => Ok(Some(Roster::open(path, defaults(config))?)),
        None if is_loopback => Ok(None),
        None if config.access.insecure => {
            tracing::warn!(%host, "every client that reaches this address can use the server");
            Ok(None)
        }
        None => Err(format!(
            "--host {host}: every client that reaches this address could use the server. Require \
             keys with --tenants FILE (sterna keygen ID makes them), or allow it with --insecure"
        )
        .into()),
    }
}

/// Returns a server that is still loading, with the keys of `roster` and at most `connections`
/// connections.
///
/// # Errors
/// If the file of the admin key has a fault.
pub(super) fn app(
    config: &ServeConfig,
    roster: Option<&Roster>,
    connections: u32,
) -> Result<App, FileError> {
    let deadlines = deadlines(config);
    let tenants = match (roster, &config.access.admin_key_file) {
        (Some(roster), _) => roster.tenants(),
        (None, Some(path)) => anyone_and_admin(deadlines, path)?,
        (None, None) => Tenants::anyone(deadlines),
    };
    let metrics_open = config.access.metrics_open;
    Ok(App::for_tenants(
        tenants,
        metrics_open,
        connections as usize,
    ))
}

fn deadlines(config: &ServeConfig) -> Deadlines {
    Deadlines {
        first_token: config.queue.first_token_seconds.map(Duration::from_secs),
        total: Some(Duration::from_secs(config.queue.request_seconds)),
    }
}

fn defaults(config: &ServeConfig) -> Defaults {
    let max_queued_millis = config.queue.max_queued_seconds as usize * 1000;
    Defaults {
        deadlines: deadlines(config),
        max_queued: quarter(config.queue.max_queued as usize) as u32,
        max_queued_time: Duration::from_millis(quarter(max_queued_millis) as u64),
    }
}

/// Returns the tokens of each public prefix: every conversation with this system message begins
/// with them.
///
/// # Errors
/// If a prefix cannot be rendered or is too short, if all of them take too many pages, or if a
/// token of the model attends to all of its block.
pub(super) fn public_prefixes(
    texts: &[PublicText],
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
    limits: &Limits,
) -> Result<Vec<Vec<TokenId>>, Box<dyn Error>> {
    let pages = limits.pages;
    if let Some(PublicText { name, .. }) = texts.first()
        && limits.diffusion.is_some_and(|rules| !rules.is_causal)
    {
        return Err(format!(
            "public prefix `{name}`: a token of this model attends to all of its block \
             (committed_attention: block-causal), so the end of the prefix would depend on a \
             tenant's own tokens. Remove it"
        )
        .into());
    }
    let mut prefixes = Vec::new();
    let mut whole_pages = 0;
    for PublicText { name, system } in texts {
        let template = template
            .ok_or_else(|| format!("public prefix `{name}`: the model has no chat template"))?;
        let conversation = |question: &str| {
            let message = |role: &str, content: &str| Message {
                role: role.to_owned(),
                content: content.to_owned(),
                ..Message::default()
            };
            let messages = [message("system", system), message("user", question)];
            let prompt = template.prompt(tokenizer, &messages, &TemplateArguments::default());
            let prompt = prompt.map(|prompt| prompt.tokens);
            prompt.map_err(|error| format!("public prefix `{name}`: {error}"))
        };
        let (one, other) = (conversation("0")?, conversation("A")?);
        let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        if shared < PAGE_TOKENS {
            return Err(format!(
                "public prefix `{name}`: it has only {shared} tokens, but sharing needs at least \
                 a page of {PAGE_TOKENS}. Make it longer or remove it"
            )
            .into());
        }
        whole_pages += shared / PAGE_TOKENS;
        prefixes.push(one[..shared].to_vec());
    }
    let limit = pages as usize / PUBLIC_DIVISOR;
    if whole_pages > limit {
        return Err(format!(
            "the public prefixes need {whole_pages} of the {pages} KV pages, but may use at most \
             {limit}. Shorten them or raise --kv-memory"
        )
        .into());
    }
    Ok(prefixes)
}

/// The tenants, and everything that must know them.
pub(super) struct Reload {
    pub(super) roster: Roster,
    pub(super) model: ModelCard,
    pub(super) engine: EngineHandle,
    pub(super) metrics: Metrics,
    pub(super) app: App,
}

impl Reload {
    /// Reads the file again at each SIGHUP.
    pub(super) async fn at_each(mut self, mut hangups: Signal) {
        while hangups.recv().await.is_some() {
            match self.reread().await {
                Ok(()) => tracing::info!("SIGHUP: the new tenants file is in use"),
                Err(why) => tracing::error!(why, "SIGHUP: the old tenants stay in use"),
            }
        }
    }

    async fn reread(&mut self) -> Result<(), String> {
        let old = self.roster.clone();
        let read = spawn_blocking(move || old.reread()).await;
        let new = read
            .map_err(|_| "reading the tenants file panicked; the message is above")?
            .map_err(|error| error.to_string())?;
        self.install_limits(&new).await?;
        self.roster = new;
        self.app.set_tenants(self.roster.tenants());
        Ok(())
    }

    /// Gives the engine the limits of `roster`. The app gets the keys later, or it has them already
    /// but serves no requests yet. After an error nothing has changed.
    ///
    /// # Errors
    /// If no tenant may use the model, or if the engine rejects the limits.
    pub(super) async fn install_limits(&self, roster: &Roster) -> Result<(), String> {
        let excluded = roster
            .excluded_from(&self.model.name, |name| self.model.answers_to(name))
            .map_err(|error| error.to_string())?;
        match self.engine.set_tenants(roster.policies()).await {
            Ok(()) => {
                self.metrics.set_tenants(&roster.names(), roster.policies());
                // Either tenants of other servers, or a typing error in `models`.
                if let Some(first) = excluded.first() {
                    let (count, model) = (excluded.len(), &self.model.name);
                    tracing::warn!(count, first, model, "some tenants may not use the model");
                }
                Ok(())
            }
            Err(TenantsRefused::Impossible(error)) => Err(roster.explain(error).to_string()),
            Err(TenantsRefused::Gone) => Err("the engine has ended".into()),
        }
    }
}
