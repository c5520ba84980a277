//! Which requests the server accepts before it looks at their path or key.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::connection::HeadFault;
use super::error::ApiError;

/// Rejects a request whose head is not valid.
pub(super) async fn check(request: Request, next: Next) -> Response {
    match request.extensions().get::<HeadFault>() {
        Some(HeadFault(fault)) => ApiError::malformed_request(fault).into_response(),
        None => next.run(request).await,
    }
}
