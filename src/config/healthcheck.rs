//! The flags of `sterna healthcheck`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::Args;
use hyper::Uri;

/// The flags of `healthcheck`.
#[derive(Args, Clone, Debug)]
pub struct HealthcheckConfig {
    /// What to ask. If omitted, it is the path /ready of the server that --host and --port name.
    /// `/ready` fails while the server loads its model or drains; `/health` fails only if the
    /// engine stalls or has died.
    #[arg(long, value_name = "URL")]
    url: Option<Uri>,
    /// The --host of the server. If it listens on all addresses, the loopback address is asked.
    #[arg(long, env = "STERNA_HOST", default_value = "127.0.0.1")]
    host: String,
    /// The --port of the server.
    #[arg(long, env = "STERNA_PORT", default_value_t = 30000)]
    port: u16,
}

impl HealthcheckConfig {
    /// Returns what to ask.
    ///
    /// # Errors
    /// If the host cannot stand in a URL.
    pub fn url(&self) -> Result<Uri, String> {
        if let Some(url) = &self.url {
            return Ok(url.clone());
        }
        let port = self.port;
        let address = self.host.trim_matches(['[', ']']).parse();
        let host = match address.map(reachable) {
            Ok(IpAddr::V6(address)) => format!("[{address}]"),
            Ok(IpAddr::V4(address)) => address.to_string(),
            Err(_) => self.host.clone(), // A name.
        };
        let url = format!("http://{host}:{port}/ready");
        let parsed = url.parse();
        parsed.map_err(|_| format!("--host {host} is no address and no name of a server"))
    }
}

/// Returns the address at which a server that listens on `address` answers on its own machine.
fn reachable(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(host: &str) -> Result<Uri, String> {
        let (url, host, port) = (None, host.to_owned(), 8000);
        HealthcheckConfig { url, host, port }.url()
    }

    fn url(host: &str) -> String {
        read(host).unwrap().to_string()
    }

    #[test]
    fn a_server_on_all_addresses_is_asked_on_the_loopback_address() {
        assert_eq!(url("0.0.0.0"), "http://127.0.0.1:8000/ready");
        assert_eq!(url("::"), "http://[::1]:8000/ready");
        assert_eq!(url("[::1]"), "http://[::1]:8000/ready");
        assert_eq!(url("10.1.2.3"), "http://10.1.2.3:8000/ready");
        assert_eq!(url("localhost"), "http://localhost:8000/ready");
    }

    #[test]
    fn a_host_that_no_url_can_have_is_named() {
        assert!(read("my server").unwrap_err().contains("--host my server"));
    }
}
