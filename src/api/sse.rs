//! An answer as server-sent events.
//!
//! Invariants: every stream ends with `data: [DONE]`, also after an error; an error that is known before anything was sent is a plain
//! HTTP status instead. Nothing is produced ahead of the reader: a frame is made when the connection asks for it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use tokio::time::timeout;
use tracing::{Instrument, Span};

use super::choices::{Choices, Usage};
use super::error::ApiError;
use super::generation::{ChoiceOutput, Piece};
use super::params::Streaming;
use super::{ModelCard, random_id, unix_seconds};

/// How long a stream may be silent.
const KEEP_ALIVE: Duration = Duration::from_secs(12);
/// How long the status line waits for the first token, which may be an error instead.
const FIRST_OUTPUT: Duration = Duration::from_millis(250);

/// What all chunks of an answer, and the answer that is not streamed, have in common.
#[derive(Clone)]
pub(super) struct ResponseIdentity {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl ResponseIdentity {
    pub(super) fn new(prefix: &str, object: &'static str, model: &ModelCard) -> ResponseIdentity {
        ResponseIdentity {
            id: random_id(prefix),
            object,
            created: unix_seconds(),
            model: model.name.clone(),
        }
    }

    /// A JSON object of `choices` and `usage`, as OpenAI frames them.
    pub(super) fn around<C: Serialize>(
        &self,
        choices: C,
        usage: Option<Option<Usage>>,
        prompt: Option<&[u32]>,
    ) -> String {
        let envelope = Envelope {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            prompt_token_ids: prompt,
        };
        serde_json::to_string(&envelope).expect("it has string keys and finite numbers only")
    }
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// How an endpoint writes the choices of its chunks.
pub(super) trait ChunkFormat: Send + 'static {
    /// What comes before all text of choice `index`, if anything does.
    fn opening(&self, index: u32) -> Option<impl Serialize>;
    /// A piece of the text of choice `index`.
    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize;
    /// The end of choice `index`.
    fn ending(&self, index: u32, finish_reason: &'static str) -> impl Serialize;
    /// The prompt's tokens belong to the first chunk of all rather than to the first of each choice.
    const PROMPT_BESIDE_CHOICES: bool;
}

/// The response to a request whose answer is streamed.
///
/// # Errors
/// What goes wrong before the first token.
pub(super) async fn respond(
    mut choices: Choices,
    header: ResponseIdentity,
    chunks: impl ChunkFormat,
    streaming: Streaming,
) -> Result<Response, ApiError> {
    let accepted = timeout(KEEP_ALIVE, choices.accepted()).await;
    let in_time = accepted.is_ok();
    accepted.unwrap_or(Ok(()))?;
    let mut frames = SseFrames {
        choices,
        header,
        chunks,
        streaming,
        ready: VecDeque::new(),
        over: false,
    };
    frames.open();
    if in_time && let Ok(first) = timeout(FIRST_OUTPUT, frames.choices.next()).await {
        let (index, output) = first?;
        frames.put(index, output);
    }
    let span = Span::current(); // What goes wrong later belongs to the same request.
    let body = stream::unfold(frames, move |mut frames| {
        let next = async move {
            let frame = frames.next().await?;
            Some((Ok::<_, Infallible>(frame), frames))
        };
        next.instrument(span.clone())
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok((
        headers,
        [("x-accel-buffering", "no")],
        Body::from_stream(body),
    )
        .into_response())
}

/// The frames of one stream, made as they are asked for.
struct SseFrames<C> {
    choices: Choices,
    header: ResponseIdentity,
    chunks: C,
    streaming: Streaming,
    ready: VecDeque<Bytes>, // A few at most: the openings, and those of one output.
    over: bool,
}

impl<C: ChunkFormat> SseFrames<C> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if self.over {
                return None;
            }
            match timeout(KEEP_ALIVE, self.choices.next()).await {
                Ok(Ok((index, output))) => self.put(index, output),
                Ok(Err(error)) => {
                    self.data(&error.body().to_string());
                    self.done();
                }
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
            }
        }
    }

    fn open(&mut self) {
        for index in 0..self.choices.count() {
            let Some(choice) = self.chunks.opening(index) else {
                return;
            };
            let tells_prompt = C::PROMPT_BESIDE_CHOICES && index == 0;
            let prompt = self.choices.prompt().filter(|_| tells_prompt);
            let chunk = self.header.around([choice], self.usage(), prompt);
            self.data(&chunk);
        }
    }

    fn put(&mut self, index: u32, output: ChoiceOutput) {
        let usage = self.usage();
        let chunk = match output {
            ChoiceOutput::Piece(piece) => {
                let choice = self.chunks.piece(index, piece, &self.choices);
                self.header.around([choice], usage, None)
            }
            ChoiceOutput::End(ending) => {
                let choice = self.chunks.ending(index, ending.finish_reason);
                self.header.around([choice], usage, None)
            }
        };
        self.data(&chunk);
        if self.choices.over() {
            self.end();
        }
    }

    fn end(&mut self) {
        if self.streaming.include_usage {
            let usage = Some(Some(self.choices.usage()));
            let chunk = self.header.around([(); 0], usage, None);
            self.data(&chunk);
        }
        self.done();
    }

    /// The `usage` of a chunk with a choice: absent, null, or what it took so far.
    fn usage(&self) -> Option<Option<Usage>> {
        let Streaming {
            include_usage,
            continuous_usage,
        } = self.streaming;
        include_usage.then(|| continuous_usage.then(|| self.choices.usage()))
    }

    fn done(&mut self) {
        self.data("[DONE]");
        self.over = true;
    }

    fn data(&mut self, json: &str) {
        self.ready
            .push_back(Bytes::from(format!("data: {json}\n\n")));
    }
}
