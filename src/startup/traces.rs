//! Starts the traces of requests, if a flag or a variable asks for them, and sends the last ones
//! after the server has drained.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::api::App;
use crate::config::TraceFlags;
use crate::traces::{self, TraceSettings, TraceSink};

/// The traces of a server.
pub(super) struct ServerTraces(Option<Arc<dyn TraceSink>>);

/// Records the requests to `app`. `server` is the address of the HTTP interface.
///
/// # Errors
/// If a flag or a variable is invalid.
pub(super) fn start(
    flags: &TraceFlags,
    server: SocketAddr,
    app: &App,
) -> Result<ServerTraces, String> {
    let traces = traces::start(&TraceSettings {
        endpoint: flags.otlp_endpoint.as_deref(),
        sample: flags.otlp_sample.map(f64::from),
        server,
    })?;
    if let Some(traces) = &traces {
        app.set_traces(Arc::clone(traces));
    }
    Ok(ServerTraces(traces))
}

impl ServerTraces {
    /// Sends the last traces, within a limit of time. A server that ends at once does not.
    pub(super) fn flush(&self) {
        if let Some(traces) = &self.0 {
            traces.flush();
        }
    }
}
