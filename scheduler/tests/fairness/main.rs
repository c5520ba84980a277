//! The service that tenants, bands and prompts of different lengths get, on a virtual clock.

mod floods;
mod prompts;
mod server;
mod shared_prompts;
mod shares;
