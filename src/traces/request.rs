//! What a trace says of a request: plain data, without text of the client.

use std::time::Instant;

/// The trace that the sender of a request has begun (<https://www.w3.org/TR/trace-context/>).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace, in 32 hexadecimal digits.
    pub trace_id: String,
    /// The span of the sender, in 16 hexadecimal digits.
    pub parent_id: String,
    /// Whether the sender records the trace.
    pub is_sampled: bool,
}

/// What a request asks of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenAiOperation {
    /// The answer to messages.
    Chat,
    /// The continuation of a text.
    TextCompletion,
    /// The embeddings of texts.
    Embeddings,
}

impl GenAiOperation {
    /// Returns the operation's name in the semantic conventions.
    pub fn name(self) -> &'static str {
        match self {
            GenAiOperation::Chat => "chat",
            GenAiOperation::TextCompletion => "text_completion",
            GenAiOperation::Embeddings => "embeddings",
        }
    }
}

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct RequestTrace {
    /// The trace of the sender.
    pub context: Option<TraceContext>,
    /// What the request asks of the model.
    pub operation: GenAiOperation,
    /// The path of the endpoint, as the API names it.
    pub endpoint: String,
    /// The name of the served model, once it is loaded.
    pub model: Option<String>,
    /// The tenant that the request is charged to.
    pub tenant: String,
    /// The request's `x-request-id`.
    pub request_id: String,
    /// The answer, if the request was read.
    pub answer: Option<TracedAnswer>,
    /// The tokens, if the request was submitted.
    pub counts: Option<TokenCounts>,
    /// Why the choices ended, each reason once.
    pub ends: Vec<&'static str>,
    /// When the request did what.
    pub phases: RequestPhases,
    /// The HTTP status, if a response began.
    pub status: Option<u16>,
    /// The code of the error that ended the request, or how the connection ended.
    pub error: Option<String>,
}

/// The answer that a request asks for.
#[derive(Clone, Debug)]
pub struct TracedAnswer {
    /// The id of the answer.
    pub id: Option<String>,
    /// How the answer is generated.
    pub parameters: RequestParameters,
}

/// How an answer is generated.
#[derive(Clone, Copy, Debug)]
pub struct RequestParameters {
    /// The maximum output length, if the client gave it.
    pub max_tokens: Option<u64>,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// The number of choices.
    pub choices: u32,
    /// Whether the answer is a stream.
    pub is_stream: bool,
}

/// The tokens of a request, of all its prompts and choices.
#[derive(Clone, Copy, Debug)]
pub struct TokenCounts {
    /// The tokens of the prompts.
    pub prompt: u32,
    /// The tokens of the prompts that came from the prefix cache.
    pub cached: u32,
    /// The tokens of the answers.
    pub output: u32,
}

/// The moments of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestPhases {
    /// When the first byte of the request arrived.
    pub arrived: Instant,
    /// The compilation of the grammar, if the answer follows one.
    pub grammar: Option<GrammarPhase>,
    /// When the engine's handle took the request.
    pub submitted: Option<Instant>,
    /// When the scheduler admitted the first choice.
    pub admitted: Option<Instant>,
    /// When the first token was drawn.
    pub first_token: Option<Instant>,
    /// When the last choice or the last embedding ended, if none failed.
    pub last_token: Option<Instant>,
    /// When the response had been sent, or the client had left.
    pub ended: Instant,
}

/// The compilation of a grammar.
#[derive(Clone, Copy, Debug)]
pub struct GrammarPhase {
    /// When the compilation began.
    pub began: Instant,
    /// When it ended, and whether it failed.
    pub ended: Option<(Instant, bool)>,
}

/// A part of a request's time: a span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracePhase {
    /// The name of the span.
    pub name: &'static str,
    /// When the phase began.
    pub began: Instant,
    /// When the phase ended.
    pub ended: Instant,
    /// Whether the phase failed, or the request ended during the phase.
    pub has_failed: bool,
}

impl RequestPhases {
    /// Returns the phases that have begun, in the order of time. A phase ends where the next one
    /// begins; one without an end lasts as long as the request.
    pub fn list(&self, operation: GenAiOperation) -> Vec<TracePhase> {
        let phase = |name, began: Instant, ended: Option<Instant>| TracePhase {
            name,
            began,
            ended: ended.unwrap_or(self.ended).max(began),
            has_failed: ended.is_none(),
        };
        let grammar = self.grammar.map(|grammar| {
            let ended = grammar.ended.map(|(at, _)| at);
            let has_failed = grammar.ended.is_none_or(|(_, has_failed)| has_failed);
            TracePhase {
                has_failed,
                ..phase("grammar", grammar.began, ended)
            }
        });
        // Admissions count from the beginning of a turn, which may take later submissions too.
        let admitted = self
            .admitted
            .max(self.submitted.filter(|_| self.admitted.is_some()));
        let queue = self.submitted.map(|began| phase("queue", began, admitted));
        let (prefilled, decoding) = match operation {
            GenAiOperation::Embeddings => (self.last_token, None),
            _ => (self.first_token, self.first_token),
        };
        let prefill = admitted.map(|began| phase("prefill", began, prefilled));
        let decode = decoding.map(|began| phase("decode", began, self.last_token));
        [grammar, queue, prefill, decode]
            .into_iter()
            .flatten()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Checks the names, the ends in seconds and the failures of the phases of a request that took
    /// nine seconds.
    fn check(
        moments: [Option<u64>; 4],
        grammar: Option<(u64, Option<(u64, bool)>)>,
        expected: &[(&'static str, u64, u64, bool)],
    ) {
        let zero = Instant::now();
        let at = |seconds| zero + Duration::from_secs(seconds);
        let [submitted, admitted, first_token, last_token] = moments.map(|it| it.map(at));
        let phases = RequestPhases {
            arrived: zero,
            grammar: grammar.map(|(began, ended)| GrammarPhase {
                began: at(began),
                ended: ended.map(|(ended, has_failed)| (at(ended), has_failed)),
            }),
            submitted,
            admitted,
            first_token,
            last_token,
            ended: at(9),
        };
        let expected = expected
            .iter()
            .map(|&(name, began, ended, has_failed)| TracePhase {
                name,
                began: at(began),
                ended: at(ended),
                has_failed,
            });
        let expected: Vec<_> = expected.collect();
        assert_eq!(phases.list(GenAiOperation::Chat), expected, "{moments:?}");
    }

    #[test]
    fn each_phase_ends_where_the_next_begins_and_an_open_one_with_the_request() {
        let some = |moments: [u64; 4]| moments.map(Some);
        let queue = ("queue", 3, 4, false);
        let prefill = ("prefill", 4, 6, false);
        let decode = ("decode", 6, 8, false);
        let compiled = Some((1, Some((2, false))));
        let grammar = ("grammar", 1, 2, false);
        check(
            some([3, 4, 6, 8]),
            compiled,
            &[grammar, queue, prefill, decode],
        );
        let left = [Some(3), Some(4), Some(6), None];
        check(left, None, &[queue, prefill, ("decode", 6, 9, true)]);
        check(
            [Some(3), Some(4), None, None],
            None,
            &[queue, ("prefill", 4, 9, true)],
        );
        check([Some(3), None, None, None], None, &[("queue", 3, 9, true)]);
        check([None; 4], Some((1, None)), &[("grammar", 1, 9, true)]);
        check(
            [None; 4],
            Some((1, Some((2, true)))),
            &[("grammar", 1, 2, true)],
        );
        check([None; 4], None, &[]);
        // A turn that began before the submission.
        let early = some([3, 2, 6, 8]);
        check(
            early,
            None,
            &[("queue", 3, 3, false), ("prefill", 3, 6, false), decode],
        );
    }

    #[test]
    fn embeddings_have_no_decode() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut phases = RequestPhases {
            arrived: now,
            grammar: None,
            submitted: Some(now),
            admitted: Some(now),
            first_token: Some(at(1)),
            last_token: Some(at(3)), // Of the second text.
            ended: at(4),
        };
        let list = |phases: &RequestPhases| phases.list(GenAiOperation::Embeddings);
        let [_, prefill] = list(&phases)[..] else {
            panic!("{phases:?}");
        };
        assert_eq!((prefill.name, prefill.ended), ("prefill", at(3)));
        phases.last_token = None;
        let failed = list(&phases)[1];
        assert_eq!((failed.ended, failed.has_failed), (at(4), true));
    }
}
