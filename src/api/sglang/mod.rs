//! The endpoints of SGLang, in its shapes.

pub(in crate::api) mod generate;
pub(in crate::api) mod loads;
pub(in crate::api) mod server_info;
