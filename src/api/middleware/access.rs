//! Which hosts and origins the server answers to. This protects a server without API keys from the
//! web pages that its users visit.
//!
//! A page of another site can make a browser send requests here. The browser names the page's own
//! host if that host's DNS entry has been changed to this server's address (DNS rebinding), and it
//! then lets the page read the answers. So the server rejects hosts that it does not know.

use std::net::IpAddr;
use std::str::FromStr;

use axum::extract::Request;
use axum::http::uri::{Authority, Uri};
use axum::http::{HeaderValue, header};

/// The hosts and origins that the server answers to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The names of this server in the `host` header. `None` allows all hosts.
    pub hosts: Option<AllowedHosts>,
    /// The sites whose pages may use this server.
    pub origins: AllowedOrigins,
}

impl Access {
    /// Checks the host that `request` names in its URI and in its `host` header. A request that
    /// names none is HTTP/1.0, which no browser sends.
    ///
    /// # Errors
    /// The host, if it is not allowed.
    pub(super) fn check_host(&self, request: &Request) -> Result<(), String> {
        let Some(allowed) = &self.hosts else {
            return Ok(());
        };
        let of_uri = request.uri().authority().map(Authority::as_str);
        let of_header = request.headers().get(header::HOST);
        let of_header = of_header.map(|host| host.to_str().unwrap_or_default());
        for host in of_uri.into_iter().chain(of_header) {
            let name = host.parse::<HostName>();
            if !name.is_ok_and(|name| allowed.allows(&name)) {
                return Err(host.to_owned());
            }
        }
        Ok(())
    }
}

/// The hosts that a server answers to, beside the loopback names and addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    /// Names and addresses.
    pub hosts: Vec<HostName>,
    /// Whether every address is allowed. A page cannot change what an address stands for.
    pub any_address: bool,
}

/// A host without its port, in lowercase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostName {
    /// A name.
    Name(String),
    /// An address.
    Address(IpAddr),
}

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<HostName, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(HostName::Address(address.to_canonical()));
        }
        let authority = text.parse::<Authority>();
        let authority = authority.ok().filter(|_| !text.contains('@'));
        let host = authority.as_ref().map(Authority::host).unwrap_or_default();
        let host = host.strip_suffix('.').unwrap_or(host);
        if host.is_empty() {
            return Err(format!("`{text}` is not a host name"));
        }
        let address = host.trim_start_matches('[').trim_end_matches(']');
        Ok(match address.parse::<IpAddr>() {
            Ok(address) => HostName::Address(address.to_canonical()),
            Err(_) => HostName::Name(host.to_ascii_lowercase()),
        })
    }
}

impl AllowedHosts {
    /// Returns whether the server answers to `host`.
    pub fn allows(&self, host: &HostName) -> bool {
        let is_always_allowed = match host {
            HostName::Name(name) => name == "localhost",
            HostName::Address(address) => self.any_address || address.is_loopback(),
        };
        is_always_allowed || self.hosts.contains(host)
    }
}

/// The origins whose pages may read the server's responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// These, as browsers write them: `https://example.com`.
    Listed(Vec<String>),
    /// All origins.
    Any,
}

impl Default for AllowedOrigins {
    fn default() -> AllowedOrigins {
        AllowedOrigins::Listed(Vec::new())
    }
}

impl AllowedOrigins {
    /// Returns what tells a browser that pages of `origin` may read the response.
    pub(super) fn permission(&self, origin: Option<&HeaderValue>) -> Option<HeaderValue> {
        match self {
            AllowedOrigins::Any => Some(HeaderValue::from_static("*")),
            AllowedOrigins::Listed(origins) => origin
                .filter(|origin| {
                    origins
                        .iter()
                        .any(|allowed| allowed.as_bytes() == origin.as_bytes())
                })
                .cloned(),
        }
    }
}

/// Reads an origin such as `https://example.com:8443`.
///
/// # Errors
/// If `text` is not written as browsers write an origin.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let uri = text.parse::<Uri>().ok();
    let written = uri.and_then(|uri| Some(format!("{}://{}", uri.scheme()?, uri.authority()?)));
    match written {
        Some(written) if written == text && text == text.to_ascii_lowercase() => Ok(written),
        _ => Err(format!(
            "`{text}` is not an origin; write it as https://example.com or http://localhost:8080"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> HostName {
        text.parse().unwrap()
    }

    #[test]
    fn hosts_are_compared_without_port_and_case() {
        let allowed = AllowedHosts {
            hosts: vec![
                host("Example.com:8443"),
                host("192.0.2.1"),
                host("[2001:db8::1]:80"),
            ],
            any_address: false,
        };
        for name in [
            "localhost",
            "LOCALHOST:30000",
            "localhost.",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:30000",
            "[::ffff:127.0.0.1]",
            "example.com",
            "EXAMPLE.COM:1",
            "192.0.2.1:80",
            "[2001:db8::1]",
        ] {
            assert!(allowed.allows(&host(name)), "{name}");
        }
        for name in [
            "evil.example",
            "localhost.evil.example",
            "example.com.evil",
            "127.0.0.1.evil.example",
            "192.0.2.2",
            "0.0.0.0",
            "[2001:db8::2]",
            "a.localhost",
        ] {
            assert!(!allowed.allows(&host(name)), "{name}");
        }
        for text in [
            "",
            ":80",
            "user@localhost",
            "a b",
            "localhost/x",
            "http://localhost",
        ] {
            assert!(text.parse::<HostName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn origins_are_read_as_browsers_write_them() {
        for text in ["https://example.com", "http://localhost:8080", "app://x"] {
            assert_eq!(parse_origin(text).as_deref(), Ok(text));
        }
        for text in [
            "",
            "*",
            "null",
            "example.com",
            "https://example.com/",
            "HTTPS://example.com",
        ] {
            assert!(parse_origin(text).is_err(), "{text:?}");
        }
    }
}
