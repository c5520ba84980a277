//! Starts the events of the prefix cache, if a flag asks for them.

use std::net::SocketAddr;

use tokio::runtime::Runtime;

use crate::api::Serving;
use crate::config::KvEventFlags;
use crate::kv_events::{KvEventSettings, KvEvents, Scope};
use crate::tenants::Roster;

/// Publishes the events of the engine's prefix cache until the engine has ended. `server` is the
/// address of the HTTP interface.
///
/// # Errors
/// If an address cannot be used, the default topic cannot hold the model's name, or no event would
/// ever leave because `roster` has no public prefixes.
pub(super) fn start(
    flags: &KvEventFlags,
    server: SocketAddr,
    roster: Option<&Roster>,
    serving: &Serving,
    runtime: &Runtime,
) -> Result<(), String> {
    let Some(address) = flags.kv_events else {
        return Ok(());
    };
    let has_public = roster.is_some_and(|roster| !roster.public().is_empty());
    if flags.kv_events_of == Scope::Public && !has_public {
        return Err(
            "--kv-events: no event would be sent, because there are no public prefixes. Declare \
             them in the tenants file, or show the blocks of all prompts with --kv-events-of all"
                .into(),
        );
    }
    for address in [Some(address), flags.kv_events_replay]
        .into_iter()
        .flatten()
    {
        if !address.ip().to_canonical().is_loopback() {
            tracing::warn!(%address, "clients of this address read tokens of prompts");
        }
    }
    let model = &serving.model.name;
    let topic = match &flags.kv_events_topic {
        Some(topic) => topic.clone(),
        None if model.contains('@') => {
            return Err(format!(
                "--kv-events: in the topic, '@' separates the model from the address, but the \
                 model is named {model}. Give a --kv-events-topic"
            ));
        }
        None => format!("kv@{server}@{model}"),
    };
    let listening = KvEvents::listen(KvEventSettings {
        events: address,
        replay: flags.kv_events_replay,
        topic,
        format: flags.kv_events_format,
        scope: flags.kv_events_of,
    });
    let events = runtime.block_on(listening)?;
    runtime.spawn(events.run(serving.engine.watch_cache()));
    Ok(())
}
