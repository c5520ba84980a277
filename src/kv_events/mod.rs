//! Events of the prefix cache for routers, over ZeroMQ, in the format of vLLM.
//!
//! A router that knows which blocks of tokens a server has cached sends a prompt to the server that
//! has its beginning. A block is a whole page. A batch of events has three frames: the topic, the
//! number of the batch (8 bytes, the highest first), and MessagePack (`message.rs`). A second
//! socket repeats earlier batches: a client sends a number and gets all batches from there, then an
//! empty one.
//!
//! Events carry the tokens of prompts, and a client of the sockets needs no key. So events are off
//! by default. If they are on, only the events of public prefixes leave by default.

mod blocks;
mod history;
mod message;
mod replay;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use sterna_scheduler::CacheChange;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use zeromq::{PubSocket, RouterSocket, Socket, SocketSend, ZmqError, ZmqMessage};

pub use blocks::Scope;
use blocks::{BlockEvent, Blocks};
use history::History;
pub use message::EventFormat;
use replay::Replay;

/// What the events show, and where they are sent.
pub struct KvEventSettings {
    /// Where the events are published.
    pub events: SocketAddr,
    /// Where earlier events are repeated.
    pub replay: Option<SocketAddr>,
    /// The first frame of each batch.
    pub topic: String,
    /// How an event is written.
    pub format: EventFormat,
    /// Whose blocks the events show.
    pub scope: Scope,
}

/// The sockets of the events.
pub struct KvEvents {
    events: PubSocket,
    replay: Option<Replay>,
    endpoints: Vec<String>,
    topic: Bytes,
    format: EventFormat,
    blocks: Blocks,
    history: Arc<Mutex<History>>,
}

impl KvEvents {
    /// Listens as `settings` say. Call it inside the runtime.
    ///
    /// # Errors
    /// If an address is in use or does not belong to this machine.
    pub async fn listen(settings: KvEventSettings) -> Result<KvEvents, String> {
        let cannot = |flag, address, error: ZmqError| format!("--{flag} {address}: {error}");
        let mut publisher = PubSocket::new();
        let bound = publisher.bind(&format!("tcp://{}", settings.events)).await;
        let bound = bound.map_err(|error| cannot("kv-events", settings.events, error))?;
        tracing::info!(%bound, scope = ?settings.scope, "events of the prefix cache");
        let mut endpoints = vec![bound.to_string()];
        let history = Arc::new(Mutex::new(History::default()));
        let replay = match settings.replay {
            None => None,
            Some(address) => {
                let mut socket = RouterSocket::new();
                let bound = socket.bind(&format!("tcp://{address}")).await;
                let bound = bound.map_err(|error| cannot("kv-events-replay", address, error))?;
                tracing::info!(%bound, "earlier events of the prefix cache");
                endpoints.push(bound.to_string());
                let history = history.clone();
                Some(Replay { socket, history })
            }
        };
        Ok(KvEvents {
            events: publisher,
            replay,
            endpoints,
            topic: settings.topic.into(),
            format: settings.format,
            blocks: Blocks::new(settings.scope),
            history,
        })
    }

    /// Returns the addresses of the sockets, as ZeroMQ writes them: for the events and, if there is
    /// one, for repeated events.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Publishes changes until the engine has ended. Never waits for a client: a subscriber that
    /// reads too slowly misses batches, sees it from their numbers, and can ask for them again.
    pub async fn run(mut self, mut changes: UnboundedReceiver<Vec<CacheChange>>) {
        let mut tasks = JoinSet::new(); // Its end aborts the task.
        if let Some(replay) = self.replay.take() {
            tasks.spawn(replay.run());
        }
        while let Some(changes) = changes.recv().await {
            self.publish(&changes).await;
        }
    }

    async fn publish(&mut self, changes: &[CacheChange]) {
        let events = changes
            .iter()
            .filter_map(|change| self.blocks.follow(change));
        let events: Vec<BlockEvent> = events.collect();
        if events.is_empty() {
            return;
        }
        let batch = Bytes::from(message::encode(&events, self.format));
        let number = self.history.lock().add(batch.clone());
        let frames = [self.topic.clone(), frame(number), batch];
        self.send(frames).await;
    }

    async fn send(&mut self, frames: [Bytes; 3]) {
        if let Err(error) = self.events.send(multipart(frames)).await {
            tracing::debug!(%error, "a batch of cache events is lost");
        }
    }
}

fn frame(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn multipart(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().expect("there is a first frame"));
    frames.for_each(|frame| message.push_back(frame));
    message
}
