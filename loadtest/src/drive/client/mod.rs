//! One chat client: sends a request, reads its stream, notes when each piece of text came.
//!
//! Always true: a request ends as exactly one of complete, left on purpose, or failed with a reason; a stream that is
//! merely cut off is never taken for a complete answer.

use std::fmt;
use std::time::{Duration, Instant};

use reqwest::RequestBuilder;
use serde::Deserialize;
use serde_json::{Value, json};

use super::conversation::PlannedRequest;
use super::sse::SseParser;

/// Where requests go and what they have in common.
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    model: String,
    options: Options,
}

/// What every request of a run has in common.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// Sampling temperature; 0 is greedy.
    pub(crate) temperature: f64,
    /// Go on past the end-of-sequence token.
    pub(crate) ignore_eos: bool,
    /// A request that takes longer has failed.
    pub(crate) timeout: Duration,
}

/// How one request ended.
pub(crate) struct Outcome {
    /// When its pieces came.
    pub(crate) timing: Timing,
    /// What became of it.
    pub(crate) end: End,
    /// The text that came.
    pub(crate) answer: String,
}

/// The ways a request can end.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    /// The whole answer arrived, with this usage.
    Complete(Usage),
    /// The workload made this client leave.
    Left,
    /// Anything else.
    Failed(Failure),
}

/// Moments of one request, counted from sending it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timing {
    /// Until the first piece of text.
    pub(crate) first_text: Option<Duration>,
    /// Between consecutive pieces of text.
    pub(crate) gaps: Vec<Duration>,
    /// Until the end of the stream.
    pub(crate) total: Duration,
}

/// The tokens of one request, as the server counts them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct Usage {
    /// Tokens of the prompt, template included.
    pub(crate) prompt_tokens: u64,
    /// Tokens of the answer.
    pub(crate) completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
struct PromptTokensDetails {
    #[serde(default)]
    cached_tokens: u64,
}

impl Usage {
    /// Tokens of the prompt that came from the prefix cache; 0 when the server does not say.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details
            .as_ref()
            .map_or(0, |details| details.cached_tokens)
    }
}

/// Why a request failed. Its text is the kind by which failures are counted.
#[derive(Debug, PartialEq)]
pub(crate) enum Failure {
    /// No connection, or it broke; with the transport's own words.
    Connection(String),
    /// The answer was not 200; with the error's code, or what there was of a body.
    Status(u16, String),
    /// An error came inside the stream; with its code or message.
    InStream(String),
    /// The stream ended without `[DONE]`.
    CutOff,
    /// The stream breaks the protocol; says how.
    Protocol(String),
    /// Not done within the time allowed.
    TimedOut,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Connection(words) => write!(f, "connection: {words}"),
            Failure::Status(status, code) => write!(f, "status {status}: {code}"),
            Failure::InStream(code) => write!(f, "error in the stream: {code}"),
            Failure::CutOff => write!(f, "stream ended without [DONE]"),
            Failure::Protocol(how) => write!(f, "protocol: {how}"),
            Failure::TimedOut => write!(f, "timed out"),
        }
    }
}

/// The parts of a chat completion chunk that matter here.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
}

impl Client {
    /// A client of the server at `url` (with or without `/v1`). Without a `model` it takes the first that is served.
    pub(crate) async fn connect(
        url: &str,
        model: Option<String>,
        key: Option<&str>,
        options: Options,
    ) -> Result<Client, Failure> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        // A proxy between tester and server would be what gets measured.
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .map_err(connection)?;
        let model = match model {
            Some(model) => model,
            None => first_model(&http, &base, key).await?,
        };
        Ok(Client {
            http,
            base,
            model,
            options,
        })
    }

    /// The server's metrics, in Prometheus's text format.
    pub(crate) async fn metrics(&self, key: Option<&str>) -> Result<String, Failure> {
        let bytes = get(&self.http, &format!("{}/metrics", self.base), key).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// How many tokens the prompt with this user message is.
    pub(crate) async fn prompt_tokens(
        &self,
        user: String,
        key: Option<String>,
    ) -> Result<u64, Failure> {
        let request = PlannedRequest {
            messages: vec![("user", user)],
            max_tokens: 1,
            sampling_seed: 0,
            disconnect: None,
            key,
        };
        match self.chat(&request).await.end {
            End::Complete(usage) => Ok(usage.prompt_tokens),
            End::Left => unreachable!("no client leaves a request that has no disconnection"),
            End::Failed(failure) => Err(failure),
        }
    }

    /// Sends `request` and reads its stream to the end, or until its client leaves.
    pub(crate) async fn chat(&self, request: &PlannedRequest) -> Outcome {
        let body = self.body(request);
        let mut timing = Timing::default();
        let mut answer = String::new();
        let sent = Instant::now();
        let (limit, at_limit) = match request.disconnect {
            Some(disconnect) if disconnect.after < self.options.timeout => {
                (disconnect.after, End::Left)
            }
            _ => (self.options.timeout, End::Failed(Failure::TimedOut)),
        };
        let pieces = request.disconnect.map(|disconnect| disconnect.pieces);
        let sending = self.post(&body, request.key.as_deref());
        let reading = read(sending, pieces, (&mut timing, &mut answer), sent);
        // Dropping the future that reads closes the connection.
        let end = match tokio::time::timeout(limit, reading).await {
            Ok(Ok(end)) => end,
            Ok(Err(failure)) => End::Failed(failure),
            Err(_) => at_limit,
        };
        if timing.total.is_zero() {
            timing.total = sent.elapsed();
        }
        Outcome {
            timing,
            end,
            answer,
        }
    }

    fn body(&self, request: &PlannedRequest) -> Value {
        let message = |(role, content): &(&str, String)| json!({"role": role, "content": content});
        let mut body = json!({
            "model": self.model,
            "messages": request.messages.iter().map(message).collect::<Vec<Value>>(),
            "max_tokens": request.max_tokens,
            "temperature": self.options.temperature,
            "seed": request.sampling_seed,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.options.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        body
    }

    fn post(&self, body: &Value, key: Option<&str>) -> RequestBuilder {
        let url = format!("{}/v1/chat/completions", self.base);
        let post = self.http.post(url).json(body);
        match key {
            Some(key) => post.bearer_auth(key),
            None => post,
        }
    }
}

/// Reads one stream; leaves after `pieces` pieces of text if that is given. The end of the stream is `[DONE]`, but the
/// body must also end there.
async fn read(
    sending: RequestBuilder,
    pieces: Option<u32>,
    (timing, answer): (&mut Timing, &mut String),
    sent: Instant,
) -> Result<End, Failure> {
    let mut response = sending.send().await.map_err(connection)?;
    if response.status() != reqwest::StatusCode::OK {
        let status = response.status().as_u16();
        let body = response.bytes().await.map_err(connection)?;
        return Err(Failure::Status(status, error_code(&body)));
    }
    let mut parser = SseParser::default();
    let mut stream = Stream::default();
    loop {
        if pieces.is_some_and(|pieces| stream.pieces >= pieces) {
            return Ok(End::Left);
        }
        let Some(bytes) = response.chunk().await.map_err(connection)? else {
            break;
        };
        let now = sent.elapsed();
        parser.push(&bytes);
        while let Some(event) = parser.next_event() {
            stream.event(&event, now, timing)?;
            answer.push_str(&stream.new_text);
        }
    }
    stream.end()
}

/// What has been read of one stream.
#[derive(Default)]
struct Stream {
    pieces: u32,
    new_text: String, // Of the latest event.
    last_text: Duration,
    finished: bool,
    usage: Option<Usage>,
    done: bool,
}

impl Stream {
    fn event(&mut self, event: &str, now: Duration, timing: &mut Timing) -> Result<(), Failure> {
        if self.done {
            return Err(Failure::Protocol("an event after [DONE]".into()));
        }
        self.new_text.clear();
        if event == "[DONE]" {
            self.done = true;
            timing.total = now;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(event)
            .map_err(|error| Failure::Protocol(format!("bad chunk: {error}")))?;
        if let Some(error) = chunk.error {
            return Err(Failure::InStream(code_of(&error)));
        }
        for choice in chunk.choices {
            if let Some(content) = choice.delta.content.filter(|content| !content.is_empty()) {
                self.text(now, timing);
                self.new_text.push_str(&content);
            }
            self.finished |= choice.finish_reason.is_some();
        }
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }

    fn text(&mut self, now: Duration, timing: &mut Timing) {
        match timing.first_text {
            None => timing.first_text = Some(now),
            Some(_) => timing.gaps.push(now - self.last_text),
        }
        self.last_text = now;
        self.pieces += 1;
    }

    fn end(self) -> Result<End, Failure> {
        if !self.done {
            return Err(Failure::CutOff);
        }
        if !self.finished {
            return Err(Failure::Protocol("no finish_reason".into()));
        }
        self.usage
            .map(End::Complete)
            .ok_or_else(|| Failure::Protocol("no usage".into()))
    }
}

async fn first_model(
    http: &reqwest::Client,
    base: &str,
    key: Option<&str>,
) -> Result<String, Failure> {
    let bytes = get(http, &format!("{base}/v1/models"), key).await?;
    let list: Value = serde_json::from_slice(&bytes)
        .map_err(|error| Failure::Protocol(format!("/v1/models: {error}")))?;
    let model = list["data"][0]["id"].as_str();
    model
        .map(str::to_owned)
        .ok_or_else(|| Failure::Protocol("/v1/models lists no model".into()))
}

/// The body of a 200 answer.
async fn get(http: &reqwest::Client, url: &str, key: Option<&str>) -> Result<Vec<u8>, Failure> {
    let asked = http.get(url);
    let asked = match key {
        Some(key) => asked.bearer_auth(key),
        None => asked,
    };
    let response = asked.send().await.map_err(connection)?;
    let status = response.status();
    let bytes = response.bytes().await.map_err(connection)?;
    if status != reqwest::StatusCode::OK {
        return Err(Failure::Status(status.as_u16(), error_code(&bytes)));
    }
    Ok(bytes.into())
}

/// The innermost cause says most ("connection refused"); the outer ones repeat the address.
fn connection(error: reqwest::Error) -> Failure {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    Failure::Connection(cause.to_string())
}

/// The code of an OpenAI-shaped error body, or the start of whatever came instead.
fn error_code(body: &[u8]) -> String {
    match serde_json::from_slice::<Value>(body) {
        Ok(value) if value.get("error").is_some() => code_of(&value["error"]),
        _ => String::from_utf8_lossy(body).chars().take(80).collect(),
    }
}

fn code_of(error: &Value) -> String {
    let text = ["code", "type", "message"]
        .iter()
        .find_map(|key| error[key].as_str());
    text.map_or_else(|| error.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests;
