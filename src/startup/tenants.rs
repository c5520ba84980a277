//! Tenants at the start and on SIGHUP.
//!
//! Invariants: the engine knows a tenant before its keys open the door; a file with a fault leaves everything as it was.

use std::error::Error;
use std::time::Duration;

use sterna_scheduler::PAGE_TOKENS;
use tokio::signal::unix::Signal;
use tokio::task::spawn_blocking;

use crate::api::{App, ModelCard};
use crate::config::ServeConfig;
use crate::engine::{EngineHandle, TenantsRefused, TokenId};
use crate::metrics::Metrics;
use crate::tenants::{Deadlines, Defaults, PublicText, Roster, Tenants};
use crate::text::{ChatTemplate, Message, Tokenizer};

/// A tenant's part of the queue, unless its table says otherwise: one cannot fill it alone.
const QUEUE_PART: u32 = 4;
/// Public prefixes may take this part of all pages.
const PUBLIC_PART: usize = 2;

/// The tenants of `--tenants`, if it is given.
///
/// # Errors
/// When something is wrong with the file, or anybody could use the server from outside.
pub(super) fn roster(config: &ServeConfig) -> Result<Option<Roster>, Box<dyn Error>> {
    match &config.tenants {
        Some(path) => Ok(Some(Roster::open(path, defaults(config))?)),
        None if config.host.to_canonical().is_loopback() => Ok(None),
        None if config.insecure => {
            tracing::warn!(host = %config.host, "whoever reaches this address can use the server");
            Ok(None)
        }
        None => Err(format!(
            "--host {}: whoever reaches this address could use the server. Give keys with --tenants FILE (sterna keygen ID makes \
             them), or say --insecure",
            config.host
        )
        .into()),
    }
}

/// The server that still loads, with its door guarded.
pub(super) fn app(config: &ServeConfig, roster: Option<&Roster>) -> App {
    let anyone = || Tenants::anyone(deadlines(config));
    let tenants = roster.map_or_else(anyone, Roster::tenants);
    App::for_tenants(
        tenants,
        config.metrics_open,
        config.max_connections as usize,
    )
}

fn deadlines(config: &ServeConfig) -> Deadlines {
    Deadlines {
        first_token: config.first_token_seconds.map(Duration::from_secs),
        total: Some(Duration::from_secs(config.request_seconds)),
    }
}

fn defaults(config: &ServeConfig) -> Defaults {
    Defaults {
        deadlines: deadlines(config),
        max_queued: config.max_queued.div_ceil(QUEUE_PART),
        max_queued_time: Duration::from_secs(config.max_queued_seconds) / QUEUE_PART,
    }
}

/// What conversations with these system messages begin with, whatever comes after.
///
/// # Errors
/// When they can't be had; the text names the one.
pub(super) fn public_prefixes(
    texts: &[PublicText],
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
    pages: u32,
) -> Result<Vec<Vec<TokenId>>, Box<dyn Error>> {
    let mut prefixes = Vec::new();
    let mut whole_pages = 0;
    for PublicText { name, system } in texts {
        let template = template
            .ok_or_else(|| format!("public prefix `{name}`: the model has no chat template"))?;
        let conversation = |words: &str| {
            let message = |role: &str, content: &str| Message {
                role: role.to_owned(),
                content: content.to_owned(),
            };
            let messages = [message("system", system), message("user", words)];
            let prompt = template.prompt(tokenizer, &messages);
            prompt.map_err(|error| format!("public prefix `{name}`: {error}"))
        };
        let (one, other) = (conversation("0")?, conversation("A")?);
        let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        if shared < PAGE_TOKENS {
            return Err(format!(
                "public prefix `{name}`: its {shared} tokens are less than a page, which has {PAGE_TOKENS}"
            )
            .into());
        }
        whole_pages += shared / PAGE_TOKENS;
        prefixes.push(one[..shared].to_vec());
    }
    if whole_pages > pages as usize / PUBLIC_PART {
        return Err(format!(
            "the public prefixes would take {whole_pages} of the {pages} pages, and half of them is the most"
        )
        .into());
    }
    Ok(prefixes)
}

/// Tells the engine what each tenant may have.
///
/// # Errors
/// When it can't be had. Nothing has changed then.
pub(super) async fn install(
    roster: &Roster,
    model: &ModelCard,
    engine: &EngineHandle,
    metrics: &Metrics,
) -> Result<(), String> {
    let names = |name: &str| model.answers_to(name);
    let shut_out = roster
        .shut_out(&model.name, names)
        .map_err(|error| error.to_string())?;
    match engine.set_tenants(roster.policies()).await {
        Ok(()) => {
            metrics.set_tenants(&roster.names());
            tell_shut_out(&shut_out, &model.name);
            Ok(())
        }
        Err(TenantsRefused::Impossible(error)) => Err(roster.explain(error).to_string()),
        Err(TenantsRefused::Gone) => Err("the engine has ended".into()),
    }
}

/// A slip in a `models` looks just like a tenant of other servers.
fn tell_shut_out(tenants: &[&str], model: &str) {
    if let Some(first) = tenants.first() {
        let count = tenants.len();
        tracing::warn!(
            count,
            first,
            model,
            "tenants may not use this server's model"
        );
    }
}

/// Who learns of the tenants when their file is read again.
pub(super) struct Reloading {
    pub(super) roster: Roster,
    pub(super) model: ModelCard,
    pub(super) engine: EngineHandle,
    pub(super) metrics: Metrics,
    pub(super) app: App,
}

impl Reloading {
    /// Reads the file again at each SIGHUP.
    pub(super) async fn at(mut self, mut hangups: Signal) {
        while hangups.recv().await.is_some() {
            match self.reread().await {
                Ok(()) => tracing::info!("the tenants file was read again"),
                Err(why) => tracing::error!(why, "the tenants stay as they were"),
            }
        }
    }

    async fn reread(&mut self) -> Result<(), String> {
        let known = self.roster.clone();
        let read = spawn_blocking(move || known.reread()).await;
        let fresh = read
            .map_err(|_| "reading the file failed after a bug")?
            .map_err(|error| error.to_string())?;
        install(&fresh, &self.model, &self.engine, &self.metrics).await?;
        self.roster = fresh;
        self.app.set_tenants(self.roster.tenants());
        Ok(())
    }
}
