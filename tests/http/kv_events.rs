//! Events of the prefix cache, as a reader of the format sees them.

use std::collections::HashMap;

use serde_json::{Value, json};
use sterna::kv_events::{EventFormat, KvEventSettings, KvEvents, Scope};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::harness::*;

const TOPIC: &str = "kv@127.0.0.1:30000@actor";
const BLOCK: usize = 16;
const FIELDS: [&str; 9] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
];

/// A batch: its number and its bytes.
type Batch = (u64, Vec<u8>);

/// Starts the events of a server. Returns the endpoints.
async fn start(server: &Server, format: EventFormat) -> Vec<String> {
    let any = "127.0.0.1:0".parse().unwrap();
    let events = KvEvents::listen(KvEventSettings {
        events: any,
        replay: Some(any),
        topic: TOPIC.to_owned(),
        format,
        scope: Scope::All,
    });
    let events = events.await.unwrap();
    let endpoints = events.endpoints().to_vec();
    tokio::spawn(events.run(server.engine.watch_cache()));
    endpoints
}

fn number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("8 bytes"))
}

/// Asks for the batches from a number on, as clients with an empty first frame do and as others do.
async fn replay(endpoint: &str, from: u64, has_envelope: bool) -> Vec<Batch> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint).await.unwrap();
    let mut request = ZmqMessage::from(from.to_be_bytes().to_vec());
    if has_envelope {
        request.push_front(Default::default());
    }
    socket.send(request).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let answer = timeout(PATIENCE, socket.recv()).await.unwrap().unwrap();
        let mut frames = answer.into_vec();
        if has_envelope {
            assert!(frames.remove(0).is_empty());
        }
        let [seq, batch] = &frames[..] else {
            panic!("{} frames", frames.len());
        };
        if batch.is_empty() {
            assert_eq!(number(seq), u64::MAX);
            return batches;
        }
        batches.push((number(seq), batch.to_vec()));
    }
}

/// The blocks that a reader knows: the parent and the tokens of each hash.
#[derive(Default)]
struct Reader(HashMap<u64, (Option<u64>, Vec<u64>)>);

impl Reader {
    fn read(&mut self, batch: &[u8]) {
        let batch: Value = rmp_serde::from_slice(batch).unwrap();
        assert!(batch[0].as_f64().unwrap() > 1.7e9, "seconds since 1970");
        for event in batch[1].as_array().unwrap() {
            // A map has the fields of an array under their names.
            let event = match event {
                Value::Object(fields) => FIELDS.map(|name| fields.get(name).cloned()),
                array => std::array::from_fn(|index| array.get(index).cloned()),
            };
            let event = event.map(Option::unwrap_or_default);
            let hash = event[1][0].as_u64().unwrap();
            match event[0].as_str().unwrap() {
                "BlockStored" => {
                    let parent = event[2].as_u64();
                    let tokens = event[3].as_array().unwrap().iter();
                    let tokens: Vec<u64> = tokens.map(|token| token.as_u64().unwrap()).collect();
                    assert_eq!((tokens.len(), event[4].as_u64()), (BLOCK, Some(16)));
                    assert_eq!(event[6], "CPU");
                    assert!(parent.is_none_or(|parent| self.0.contains_key(&parent)));
                    let before = self.0.insert(hash, (parent, tokens));
                    assert_eq!(before, None, "stored once");
                }
                "BlockRemoved" => {
                    assert!(self.0.remove(&hash).is_some(), "removed once");
                }
                other => panic!("{other}"),
            }
        }
    }

    /// Returns how many first tokens of a prompt are in known blocks.
    fn cached(&self, prompt: &[u64]) -> usize {
        let mut parent = None;
        let mut cached = 0;
        for block in prompt.chunks_exact(BLOCK) {
            let is_next = |known: &&(Option<u64>, Vec<u64>)| known.0 == parent && known.1 == block;
            let Some((hash, _)) = self.0.iter().find(|(_, known)| is_next(known)) else {
                break;
            };
            parent = Some(*hash);
            cached += BLOCK;
        }
        cached
    }
}

fn prompt(token: u64, len: usize) -> Vec<u64> {
    vec![token; len]
}

async fn complete(server: &Server, prompt: &[u64]) {
    let body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0});
    server.complete(body).await.ok();
}

/// Sends prompts that are not cached yet, so that there are events.
async fn complete_forever(server: &Server) {
    for token in 0.. {
        complete(server, &prompt(token % 290, 40 + token as usize / 290)).await;
    }
}

async fn subscribe(endpoint: &str) -> SubSocket {
    let mut subscriber = SubSocket::new();
    subscriber.connect(endpoint).await.unwrap();
    subscriber.subscribe("kv@").await.unwrap();
    subscriber
}

/// Asks for all batches until what they tell is `enough`. The events of a request may come a moment
/// after its answer.
async fn told(endpoint: &str, enough: impl Fn(&Reader) -> bool) -> Vec<Batch> {
    let asking = async {
        loop {
            let batches = replay(endpoint, 0, true).await;
            let mut reader = Reader::default();
            batches.iter().for_each(|(_, batch)| reader.read(batch));
            if enough(&reader) {
                return batches;
            }
        }
    };
    timeout(PATIENCE, asking).await.expect("enough events")
}

#[tokio::test]
async fn a_reader_of_arrays_knows_what_is_cached() {
    a_reader_knows_what_is_cached(EventFormat::Arrays).await;
}

#[tokio::test]
async fn a_reader_of_maps_knows_what_is_cached() {
    a_reader_knows_what_is_cached(EventFormat::Maps).await;
}

async fn a_reader_knows_what_is_cached(format: EventFormat) {
    let server = Server::new();
    let (first, second) = (prompt(5, 50), prompt(6, 100));
    // What is cached before somebody watches is told too.
    complete(&server, &first).await;
    let endpoints = start(&server, format).await;
    complete(&server, &second).await;
    let batches = told(&endpoints[1], |reader| {
        reader.cached(&first) == 48 && reader.cached(&second) == 96
    });
    let batches = batches.await;
    let numbers: Vec<u64> = batches.iter().map(|(number, _)| *number).collect();
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64));
    // A client may ask for the last one only, and without an empty frame.
    let last = batches.len() as u64 - 1;
    assert_eq!(
        replay(&endpoints[1], last, false).await,
        batches[last as usize..]
    );
    // A reset removes all blocks.
    server.engine.reset_prefix_cache().await.unwrap();
    told(&endpoints[1], |reader| reader.0.is_empty()).await;
}

#[tokio::test]
async fn subscribers_hear_the_batches_that_are_repeated() {
    let server = Server::new();
    let endpoints = start(&server, EventFormat::Arrays).await;
    let mut subscriber = subscribe(&endpoints[0]).await;
    // The subscription reaches the server at some moment, so there are events until then.
    let heard = tokio::select! {
        heard = timeout(PATIENCE, subscriber.recv()) => heard.unwrap().unwrap().into_vec(),
        () = complete_forever(&server) => unreachable!(),
    };
    assert_eq!(heard.len(), 3);
    assert_eq!(heard[0], TOPIC);
    let repeated = replay(&endpoints[1], number(&heard[1]), true).await;
    assert_eq!(repeated[0], (number(&heard[1]), heard[2].to_vec()));
    // A request without a number is ignored.
    let mut socket = DealerSocket::new();
    socket.connect(&endpoints[1]).await.unwrap();
    socket.send(ZmqMessage::from("x")).await.unwrap();
    assert!(!replay(&endpoints[1], 0, true).await.is_empty());
}

/// The answers to a client fill the queue to it, of 100,000 messages.
#[tokio::test]
async fn a_client_that_never_reads_delays_no_event() {
    let server = Server::new();
    let endpoints = start(&server, EventFormat::Arrays).await;
    complete(&server, &prompt(5, 200)).await;
    let mut silent = DealerSocket::new();
    silent.connect(&endpoints[1]).await.unwrap();
    for _ in 0..60_000 {
        let request = ZmqMessage::from(0_u64.to_be_bytes().to_vec());
        silent.send(request).await.unwrap();
    }
    let mut subscriber = subscribe(&endpoints[0]).await;
    let heard = async {
        for _ in 0..500 {
            subscriber.recv().await.unwrap();
        }
    };
    let heard = timeout(PATIENCE, heard);
    tokio::select! {
        heard = heard => heard.expect("the events go on"),
        () = complete_forever(&server) => unreachable!(),
    }
}
