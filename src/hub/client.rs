//! The HTTP interface of the hub: the listing of a repository, and the content of its files.

use std::io::Read;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::{HeaderMap, Response, StatusCode, Uri, header};
use ureq::{Agent, Body, Error};

use super::cache::BRANCH;
use super::listing::{HubFile, HubListing, MAX_LISTING_BYTES};
use super::model_name::ModelName;
use super::settings::HubSettings;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// The time that a server may take for its next bytes.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 10;
/// The tries in a row that may bring nothing.
const MAX_FRUITLESS: u32 = 5;
/// The characters of a path that a URL has as they are.
const IN_PATH: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'/');
/// The header in which the hub says why it refuses, and the most of it that a message has.
const REASON: &str = "x-error-message";
const MAX_REASON: usize = 200;

/// Asks a hub for one repository.
pub(super) struct HubClient {
    agent: Agent,
    settings: HubSettings,
    endpoint: Uri,
    repository: String,
}

/// Why a request has brought nothing.
#[derive(Debug)]
pub(super) enum HubFailure {
    /// A reason that may pass: a broken connection, a server that is overloaded.
    Passing(String),
    /// A reason that another try would meet again.
    Lasting(String),
}

impl HubFailure {
    /// Returns the reason.
    pub(super) fn reason(self) -> String {
        match self {
            HubFailure::Passing(reason) | HubFailure::Lasting(reason) => reason,
        }
    }
}

/// The content of a file.
pub(super) struct FileContent {
    /// The offset of the body in the file.
    pub(super) first_byte: u64,
    pub(super) body: Box<dyn Read>,
}

impl HubClient {
    pub(super) fn new(settings: &HubSettings, name: &ModelName) -> HubClient {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // `ureq` would follow redirects, but `redirected` has rules of its own.
            .max_redirects(0)
            .proxy(settings.proxy.clone())
            .user_agent(concat!("sterna/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .timeout_per_write(Some(READ_TIMEOUT))
            .build();
        HubClient {
            agent: config.new_agent(),
            settings: settings.clone(),
            endpoint: settings
                .endpoint
                .parse()
                .expect("the settings were checked"),
            repository: name.repository(),
        }
    }

    /// Returns the files of the repository.
    ///
    /// # Errors
    /// If the hub has no such repository, refuses to show it, or answers something else than a
    /// listing.
    pub(super) fn listing(&self) -> Result<HubListing, HubFailure> {
        let (endpoint, repository) = (&self.settings.endpoint, &self.repository);
        let url = format!("{endpoint}/api/models/{repository}/revision/{BRANCH}?blobs=true");
        let mut fruitless = 0;
        let json = loop {
            match self.read_listing(&url) {
                Ok(json) => break json,
                Err(failed) => {
                    std::thread::sleep(self.pause_after(failed, false, &mut fruitless)?);
                }
            }
        };
        let listing = HubListing::parse(&json);
        listing.map_err(|error| {
            HubFailure::Lasting(format!(
                "{repository}: the listing of {endpoint}: {error}. Check HF_ENDPOINT: a proxy or \
                 a page for a login may answer in place of a hub"
            ))
        })
    }

    fn read_listing(&self, url: &str) -> Result<Vec<u8>, HubFailure> {
        let (answer, uri) = self.get(url, 0)?;
        if answer.status() != StatusCode::OK {
            return Err(self.refusal(&answer, &uri, &self.repository));
        }
        let mut body = answer.into_body();
        let bytes = body.with_config().limit(MAX_LISTING_BYTES).read_to_vec();
        bytes.map_err(|error| self.broken(&uri, error))
    }

    /// Returns the content of a file from the byte `first` on, or the whole content if the server
    /// sends no parts. `commit` is the one of the file.
    pub(super) fn content(
        &self,
        commit: &str,
        file: &HubFile,
        first: u64,
    ) -> Result<FileContent, HubFailure> {
        let (endpoint, repository) = (&self.settings.endpoint, &self.repository);
        let path = utf8_percent_encode(&file.path, &IN_PATH);
        let url = format!("{endpoint}/{repository}/resolve/{commit}/{path}");
        let (answer, uri) = self.get(&url, first)?;
        let first_byte = match answer.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if is_rest(answer.headers(), first, file.bytes) => first,
            StatusCode::PARTIAL_CONTENT => {
                let (path, host, all) = (&file.path, host(&uri), file.bytes);
                return Err(HubFailure::Lasting(format!(
                    "{path}: {host} sends another part than the bytes from {first} on of {all}"
                )));
            }
            _ => {
                let what = format!("{repository}/{}", file.path);
                return Err(self.refusal(&answer, &uri, &what));
            }
        };
        let body = answer
            .into_body()
            .into_with_config()
            .limit(u64::MAX)
            .reader();
        Ok(FileContent {
            first_byte,
            body: Box::new(body),
        })
    }

    /// Returns the pause before the next try. `fruitless` counts the tries in a row that brought
    /// nothing.
    ///
    /// # Errors
    /// If another try is useless.
    pub(super) fn pause_after(
        &self,
        failed: HubFailure,
        has_brought_bytes: bool,
        fruitless: &mut u32,
    ) -> Result<Duration, HubFailure> {
        let HubFailure::Passing(problem) = failed else {
            return Err(failed);
        };
        *fruitless = if has_brought_bytes { 0 } else { *fruitless + 1 };
        if *fruitless == MAX_FRUITLESS {
            return Err(HubFailure::Passing(format!(
                "{problem} (the last of {MAX_FRUITLESS} tries)"
            )));
        }
        tracing::warn!(problem, "trying again");
        Ok(self.settings.retry_pause * *fruitless)
    }

    /// Sends a GET request and follows its redirects. Returns the answer and where it came from.
    fn get(&self, url: &str, first: u64) -> Result<(Response<Body>, Uri), HubFailure> {
        let lasting = |problem: &str| HubFailure::Lasting(format!("{url}: {problem}"));
        let mut uri: Uri = url.parse().map_err(|_| lasting("it is no URL"))?;
        for _ in 0..=MAX_REDIRECTS {
            // Compressed bytes could not be resumed, and their number is not the listed one.
            let mut request = self
                .agent
                .get(uri.clone())
                .header("accept-encoding", "identity");
            if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_own(&uri)) {
                request = request.header(header::AUTHORIZATION, token.header());
            }
            if first > 0 {
                request = request.header(header::RANGE, format!("bytes={first}-"));
            }
            let answer = request.call().map_err(|error| self.broken(&uri, error))?;
            if !answer.status().is_redirection() {
                return Ok((answer, uri));
            }
            uri = redirected(&uri, answer.headers()).map_err(|problem| lasting(&problem))?;
        }
        Err(lasting(&format!(
            "it has more than {MAX_REDIRECTS} redirects"
        )))
    }

    /// Returns whether a URL is on the server that the token is for.
    fn is_own(&self, uri: &Uri) -> bool {
        let server = |uri: &Uri| {
            let scheme = uri.scheme_str().map(str::to_lowercase);
            let usual = if scheme.as_deref() == Some("https") {
                443
            } else {
                80
            };
            let host = uri.host().map(str::to_lowercase);
            (scheme, host, uri.port_u16().unwrap_or(usual))
        };
        server(uri) == server(&self.endpoint)
    }

    /// Returns what the status of an answer means. `what` is what was asked for.
    fn refusal(&self, answer: &Response<Body>, uri: &Uri, what: &str) -> HubFailure {
        let (status, host) = (answer.status(), host(uri));
        let reason = reason(answer.headers());
        let says = format!("{what}: {host} answers {status}{reason}");
        let (endpoint, repository) = (&self.settings.endpoint, &self.repository);
        let token = match self.settings.token {
            Some(_) => "the token in HF_TOKEN or in HF_HOME may not read it",
            None => "it needs a token, and HF_TOKEN is not set",
        };
        match status.as_u16() {
            // Links to other hosts expire; the next try gets a new one.
            401 | 403 if !self.is_own(uri) => HubFailure::Passing(says),
            401 => HubFailure::Lasting(format!(
                "{says}. There is no such model, or it is private or gated: {token}"
            )),
            403 => HubFailure::Lasting(format!(
                "{says}. The model is gated, or {token}. Accept its conditions at \
                 {endpoint}/{repository}, and set HF_TOKEN to a token of the account that did"
            )),
            404 if what == repository => HubFailure::Lasting(format!(
                "{says}. There is neither such a model nor such a directory here. Check the name, \
                 or give the path of a model"
            )),
            408 | 429 | 500.. => HubFailure::Passing(says),
            _ => HubFailure::Lasting(says),
        }
    }

    /// Returns what a request without an answer means.
    fn broken(&self, uri: &Uri, error: Error) -> HubFailure {
        let host = host(uri);
        let port = uri.port().map(|port| format!(":{port}"));
        let port = port.unwrap_or_default();
        let problem = format!("{}: {host}{port}: {error}", self.repository);
        match error {
            Error::Io(_) | Error::Timeout(_) | Error::Protocol(_) | Error::ConnectionFailed => {
                HubFailure::Passing(problem)
            }
            _ => HubFailure::Lasting(problem),
        }
    }
}

/// Returns where an answer redirects to.
///
/// # Errors
/// If that is nowhere, or leaves TLS.
fn redirected(from: &Uri, headers: &HeaderMap) -> Result<Uri, String> {
    let malformed = || "it redirects to something that is no URL".to_owned();
    let location = headers.get(header::LOCATION).ok_or_else(malformed)?;
    let location = location.to_str().map_err(|_| malformed())?;
    let scheme = from.scheme_str().unwrap_or_default();
    let to = match location {
        path if path.starts_with("//") => format!("{scheme}:{path}"),
        path if path.starts_with('/') => {
            let authority = from.authority().ok_or_else(malformed)?;
            format!("{scheme}://{authority}{path}")
        }
        url => url.to_owned(),
    };
    let to: Uri = to.parse().map_err(|_| malformed())?;
    match (scheme, to.scheme_str(), to.host()) {
        ("https", Some("http"), _) => Err("it redirects from https to http".to_owned()),
        (_, Some("http" | "https"), Some(_)) => Ok(to),
        _ => Err(malformed()),
    }
}

/// Returns whether an answer has the bytes of a file from `first` to the end.
fn is_rest(headers: &HeaderMap, first: u64, bytes: u64) -> bool {
    let expected = format!("bytes {first}-{}/{bytes}", bytes.saturating_sub(1));
    headers
        .get(header::CONTENT_RANGE)
        .is_some_and(|range| range == expected.as_str())
}

/// Returns the host of a URL. The rest may be a link that is good for whoever has it.
fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or("the server")
}

/// Returns why the hub refuses, in its own words.
fn reason(headers: &HeaderMap) -> String {
    let text = headers.get(REASON).and_then(|text| text.to_str().ok());
    let plain = |text: &str| {
        let visible = text.chars().filter(|c| !c.is_control());
        format!(" ({})", visible.take(MAX_REASON).collect::<String>())
    };
    text.map(plain).unwrap_or_default()
}
