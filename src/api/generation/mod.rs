//! How a request is answered, whatever the shape of the answer: from the request that has been
//! read, through the engine, to pieces of text or a whole answer.

pub(in crate::api) mod answer_parts;
pub(in crate::api) mod choice;
pub(in crate::api) mod choices;
pub(in crate::api) mod logprobs;
pub(in crate::api) mod prompt_logprobs;
pub(in crate::api) mod request;
pub(in crate::api) mod running;
pub(in crate::api) mod writer;
