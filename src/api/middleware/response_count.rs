//! Counts the responses by their endpoint and status.

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::api::app::App;

/// Records each response in the metrics. While the model loads there are none.
pub(in crate::api) async fn count(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    if let Ok(serving) = app.serving() {
        let route = route.as_ref().map(MatchedPath::as_str);
        serving.metrics.responded(route, response.status().as_u16());
    }
    response
}
