//! The chat client: sends requests and times the pieces of their streamed answers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::facts::ServerAnswers;
use super::http::HttpClient;
use super::outcome::{ChatOutcome, Failure};
use super::sse::SseParser;
use super::stream::AnswerStream;

/// A client of one server and model.
pub(super) struct ChatClient {
    http: HttpClient,
    model: String,
    key: Option<String>,
    options: ChatOptions,
    pieces: AtomicU64,
}

/// What all requests of a run have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChatOptions {
    /// The sampling temperature. 0 is greedy.
    pub(super) temperature: f64,
    /// Whether answers continue after the end-of-sequence token.
    pub(super) ignore_eos: bool,
    /// The time after which a request has failed, counted from sending it.
    pub(super) timeout: Duration,
    /// The pause of a slow client before each read.
    pub(super) slow_pause: Duration,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ChatRequest {
    /// Roles and texts. The user's new message is the last one.
    pub(super) messages: Vec<(&'static str, String)>,
    /// The maximum number of output tokens.
    pub(super) max_tokens: u32,
    /// The seed of the server's sampler.
    pub(super) sampling_seed: u64,
    /// When the client disconnects. `None`: it reads the whole answer.
    pub(super) disconnect: Option<Disconnect>,
    /// Whether the client pauses before each read.
    pub(super) is_slow: bool,
    /// The tenant's API key.
    pub(super) key: Option<String>,
}

/// The client disconnects at the earlier of two moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Disconnect {
    /// The time after sending the request.
    pub(super) after: Duration,
    /// The number of pieces of text that the client reads.
    pub(super) pieces: u32,
}

impl ChatClient {
    /// Creates a client of the server at `url`, with or without `/v1`. If `model` is omitted, the
    /// client uses the first model that the server lists. Requests outside a session have the API
    /// key `key`.
    pub(super) async fn connect(
        url: &str,
        model: Option<String>,
        key: Option<String>,
        options: ChatOptions,
    ) -> Result<ChatClient, Failure> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let mut client = ChatClient {
            http: HttpClient::new(base)?,
            model: String::new(),
            key,
            options,
            pieces: AtomicU64::new(0),
        };
        client.model = match model {
            Some(model) => model,
            None => client.first_model().await?,
        };
        Ok(client)
    }

    /// Returns the server's metrics in Prometheus's text format.
    pub(super) async fn metrics(&self) -> Result<String, Failure> {
        let answer = self.http.get("/metrics", self.key.as_ref()).await?;
        let bytes = answer.rest().await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the model that requests name.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// Returns what the server tells about itself. What it does not tell is missing.
    pub(super) async fn answers(&self) -> ServerAnswers {
        ServerAnswers {
            version: self.json("/version").await,
            info: self.json("/server_info").await,
            metrics: self.metrics().await.ok(),
        }
    }

    async fn json(&self, path: &str) -> Option<Value> {
        let answer = self.http.get(path, self.key.as_ref()).await.ok()?;
        serde_json::from_slice(&answer.rest().await.ok()?).ok()
    }

    /// Returns the length of the prompt with this user message, as the server counts it.
    pub(super) async fn prompt_tokens(&self, user: String) -> Result<u64, Failure> {
        let request = ChatRequest {
            messages: vec![("user", user)],
            max_tokens: 1,
            sampling_seed: 0,
            disconnect: None,
            is_slow: false,
            key: self.key.clone(),
        };
        match self.chat(&request, Instant::now()).await {
            ChatOutcome::Complete(answer) => Ok(answer.usage.prompt_tokens),
            ChatOutcome::Disconnected => unreachable!("the request has no disconnect"),
            ChatOutcome::Failed(failure) => Err(failure),
        }
    }

    /// Returns the number of pieces of text that have arrived so far, of all requests.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }

    /// Sends `request` and reads its stream until it ends or the client disconnects. The latencies
    /// of the outcome count from `intended`, the moment when the request should have started.
    pub(super) async fn chat(&self, request: &ChatRequest, intended: Instant) -> ChatOutcome {
        let (limit, at_limit) = match request.disconnect {
            Some(disconnect) if disconnect.after < self.options.timeout => {
                (disconnect.after, ChatOutcome::Disconnected)
            }
            _ => (self.options.timeout, ChatOutcome::Failed(Failure::TimedOut)),
        };
        let pieces = request.disconnect.map(|disconnect| disconnect.pieces);
        let reading = self.read(request, intended, pieces);
        // At the limit the future is dropped, which closes the connection.
        match tokio::time::timeout(limit, reading).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(failure)) => ChatOutcome::Failed(failure),
            Err(_) => at_limit,
        }
    }

    /// Sends a request and reads its stream. Disconnects after `pieces` pieces of text, if given.
    /// After `[DONE]` the body must end too.
    async fn read(
        &self,
        request: &ChatRequest,
        intended: Instant,
        pieces: Option<u32>,
    ) -> Result<ChatOutcome, Failure> {
        let (key, body) = (request.key.as_ref(), self.body(request));
        let mut answer = self.http.post("/v1/chat/completions", key, &body).await?;
        let mut parser = SseParser::default();
        let mut stream = AnswerStream::default();
        loop {
            if pieces.is_some_and(|pieces| stream.pieces() >= pieces) {
                return Ok(ChatOutcome::Disconnected);
            }
            if request.is_slow {
                tokio::time::sleep(self.options.slow_pause).await;
            }
            let Some(bytes) = answer.piece().await? else {
                return stream.end().map(ChatOutcome::Complete);
            };
            let now = intended.elapsed();
            let before = stream.pieces();
            parser.push(&bytes);
            while let Some(event) = parser.next_event() {
                stream.event(&event, now)?;
            }
            let arrived = u64::from(stream.pieces() - before);
            self.pieces.fetch_add(arrived, Ordering::Relaxed);
        }
    }

    fn body(&self, request: &ChatRequest) -> Value {
        let message = |(role, content): &(&str, String)| json!({"role": role, "content": content});
        let mut body = json!({
            "model": self.model,
            "messages": request.messages.iter().map(message).collect::<Vec<Value>>(),
            "max_tokens": request.max_tokens,
            "temperature": self.options.temperature,
            "seed": request.sampling_seed,
            "stream": true,
            // The usage so far says how many tokens a piece has.
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        });
        if self.options.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        body
    }

    async fn first_model(&self) -> Result<String, Failure> {
        let answer = self.http.get("/v1/models", self.key.as_ref()).await?;
        let list: Value = serde_json::from_slice(&answer.rest().await?)
            .map_err(|error| Failure::Protocol(format!("/v1/models: {error}")))?;
        let model = list["data"][0]["id"].as_str();
        let model = model.ok_or_else(|| Failure::Protocol("/v1/models lists no model".into()))?;
        Ok(model.to_owned())
    }
}

#[cfg(test)]
mod tests;
