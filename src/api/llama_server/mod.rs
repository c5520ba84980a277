//! The endpoints of llama-server, in its shapes.

pub(in crate::api) mod completion;
pub(in crate::api) mod props;
