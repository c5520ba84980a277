//! The engine through its handle: answers, refusals, early endings, faults, idle time, drain.
//!
//! The test model stores the tokens themselves in its pages and derives logits from all tokens that
//! it reads back. So a page that is shared or reused wrongly changes the answer.

mod answers;
mod early_endings;
mod faults;
mod model;
mod recalibration;
mod refusals;
mod reserved_memory;
mod running;
mod shutdown;
