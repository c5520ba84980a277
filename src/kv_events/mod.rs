//! Events of the prefix cache for routers, over ZeroMQ, in the format of vLLM.
//!
//! A router that knows which blocks of tokens a server has cached sends a prompt to the server that
//! has its beginning. A block is a whole page. A batch of events has three frames: the topic, the
//! number of the batch (8 bytes, the highest first), and MessagePack (`message.rs`). A second
//! socket repeats earlier batches: a client sends a number and gets all batches from there, then an
//! empty one.
//!
//! Events carry the tokens of prompts, and whoever reaches the sockets reads them without a key. So
//! they are off by default, and then only those of public prefixes leave.

mod blocks;
mod history;
mod message;

use std::net::SocketAddr;

use bytes::Bytes;
use sterna_scheduler::CacheChange;
use tokio::sync::mpsc::UnboundedReceiver;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

pub use blocks::Scope;
use blocks::{BlockEvent, Blocks};
use history::History;
pub use message::EventFormat;

/// The number after the last repeated batch.
const END: u64 = u64::MAX;

/// What is told to whom.
pub struct KvEventSettings {
    /// Where the events are published.
    pub events: SocketAddr,
    /// Where earlier events are repeated.
    pub replay: Option<SocketAddr>,
    /// The first frame of each batch.
    pub topic: String,
    /// How an event is written.
    pub format: EventFormat,
    /// Whose blocks are told.
    pub scope: Scope,
}

/// The sockets of the events.
pub struct KvEvents {
    events: PubSocket,
    replay: Option<RouterSocket>,
    endpoints: Vec<String>,
    topic: Bytes,
    format: EventFormat,
    blocks: Blocks,
    history: History,
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
        let replay = match settings.replay {
            None => None,
            Some(address) => {
                let mut router = RouterSocket::new();
                let bound = router.bind(&format!("tcp://{address}")).await;
                let bound = bound.map_err(|error| cannot("kv-events-replay", address, error))?;
                tracing::info!(%bound, "earlier events of the prefix cache");
                endpoints.push(bound.to_string());
                Some(router)
            }
        };
        Ok(KvEvents {
            events: publisher,
            replay,
            endpoints,
            topic: settings.topic.into(),
            format: settings.format,
            blocks: Blocks::new(settings.scope),
            history: History::default(),
        })
    }

    /// Returns the addresses of the sockets, as ZeroMQ writes them: of the events, and of those
    /// that are repeated.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Publishes changes until the engine has ended. Never waits for a subscriber: one that reads
    /// too slowly misses batches, sees it from their numbers, and can ask for them again.
    pub async fn run(mut self, mut changes: UnboundedReceiver<Vec<CacheChange>>) {
        loop {
            let replay = async {
                match &mut self.replay {
                    Some(replay) => replay.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changes = changes.recv() => match changes {
                    Some(changes) => self.publish(&changes).await,
                    None => return,
                },
                Ok(request) = replay => self.repeat(request).await,
            }
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
        let number = self.history.add(batch.clone());
        let frames = [self.topic.clone(), frame(number), batch];
        self.send(frames).await;
    }

    async fn send(&mut self, frames: [Bytes; 3]) {
        if let Err(error) = self.events.send(multipart(frames)).await {
            tracing::debug!(%error, "a batch of cache events is lost");
        }
    }

    /// Answers a client that asks for the batches from a number on.
    async fn repeat(&mut self, request: ZmqMessage) {
        let Some(replay) = &mut self.replay else {
            return;
        };
        // The last frame is the number. Those before it say whom to answer.
        let mut envelope = request.into_vec();
        let number = envelope.pop();
        let number = number.and_then(|frame| <[u8; 8]>::try_from(frame.as_ref()).ok());
        let Some(number) = number.map(u64::from_be_bytes) else {
            tracing::debug!("a request for earlier cache events has no number of 8 bytes");
            return;
        };
        let batches = self.history.since(number);
        let batches = batches.map(|(number, batch)| (number, batch.clone()));
        for (number, batch) in batches.chain([(END, Bytes::new())]) {
            let frames = envelope.iter().cloned().chain([frame(number), batch]);
            if let Err(error) = replay.send(multipart(frames)).await {
                tracing::debug!(%error, "a client that asked for cache events has left");
                return;
            }
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
