//! The log-probabilities of a prompt's tokens: the field `prompt_logprobs`, and the beginning of
//! the log-probabilities of a completion with `echo`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::{MIN_LOGPROB, TokenLogprob, token_text};
use crate::engine::{ScoredToken, TokenId};
use crate::text::{Detokenizer, TextOptions, Tokenizer};

/// For each token of a prompt, that token and the most likely ones, by their ids; `null` for the
/// first token, which follows nothing.
#[derive(Serialize, ToSchema)]
#[schema(value_type = Vec<Option<std::collections::HashMap<String, PromptLogprob>>>)]
pub(in crate::api) struct PromptLogprobs(Vec<Option<BTreeMap<TokenId, PromptLogprob>>>);

/// The log-probability of a token at a place of a prompt.
#[derive(Serialize, ToSchema)]
struct PromptLogprob {
    /// The model's own log-probability, at least -9999.
    logprob: f32,
    /// The token's place among all tokens by probability, from 1.
    rank: u32,
    /// The text of the token; `\\x` and two digits for each byte if it is not valid UTF-8.
    decoded_token: String,
}

impl PromptLogprobs {
    /// Creates the log-probabilities of a prompt from the scores of its tokens after the first. At
    /// most `count` alternatives are shown for each.
    pub(in crate::api) fn new(
        scores: &[ScoredToken],
        count: usize,
        tokenizer: &Tokenizer,
    ) -> PromptLogprobs {
        let shown = |token, logprob: f32, rank| PromptLogprob {
            logprob: logprob.max(MIN_LOGPROB),
            rank,
            decoded_token: token_text(tokenizer, token),
        };
        let entry = |score: &ScoredToken| {
            let top = (1..).zip(score.top.iter().take(count));
            let mut entry: BTreeMap<_, _> = top
                .map(|(rank, &(token, logprob))| (token, shown(token, logprob, rank)))
                .collect();
            let own = || shown(score.token, score.logprob, score.rank);
            entry.entry(score.token).or_insert_with(own);
            Some(entry)
        };
        PromptLogprobs([None].into_iter().chain(scores.iter().map(entry)).collect())
    }
}

/// The text of a prompt that an answer repeats.
pub(in crate::api) struct Echo {
    text: String,
    chars: usize,                  // The length of the text.
    tokens: Vec<(TokenId, usize)>, // Each token, and where its text begins, in characters.
}

impl Echo {
    /// Returns the text of `prompt`.
    pub(in crate::api) fn new(
        prompt: &[TokenId],
        tokenizer: &Arc<Tokenizer>,
        skips_special: bool,
    ) -> Echo {
        let options = TextOptions {
            stop: Vec::new(),
            include_stop: false,
            skip_special_tokens: skips_special,
            min_tokens: 0,
        };
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
        let mut tokens = Vec::with_capacity(prompt.len());
        for &token in prompt {
            tokens.push((token, detokenizer.decoded_chars()));
            detokenizer.push(token);
        }
        detokenizer.finish();
        // Some tokenizers put a space before a text. It is no part of the text.
        let text = tokenizer.decode(prompt, skips_special);
        let chars = text.chars().count();
        let added = detokenizer.decoded_chars() - chars;
        for (_, start) in &mut tokens {
            *start = start.saturating_sub(added);
        }
        Echo {
            text,
            chars,
            tokens,
        }
    }

    /// Returns the log-probabilities of the prompt. The first token has none.
    fn logprobs(&self, scores: &[ScoredToken]) -> Vec<TokenLogprob> {
        let unscored = [None].into_iter().chain(scores.iter().map(Some));
        let entry =
            |(&(token, start), score): (&(TokenId, usize), Option<&ScoredToken>)| TokenLogprob {
                start,
                token,
                logprob: score.map(|score| score.logprob),
                top: score.map_or_else(Vec::new, |score| score.top.clone()),
            };
        self.tokens.iter().zip(unscored).map(entry).collect()
    }
}

/// What the first piece of a choice says about its prompt.
pub(super) struct PromptPart {
    echo: Option<Arc<Echo>>,
    scores: Vec<ScoredToken>,
    /// Whether the text of the prompt has log-probabilities.
    echoes_logprobs: bool,
    is_due: bool,
}

/// What a choice says about its prompt.
pub(super) struct PromptPiece {
    pub(in crate::api) text: String,
    pub(in crate::api) logprobs: Vec<TokenLogprob>,
    pub(in crate::api) scores: Vec<ScoredToken>,
}

impl PromptPart {
    /// `wants_scores` and `wants_logprobs` say what the answer has of prompt and output.
    pub(in crate::api) fn new(
        echo: Option<Arc<Echo>>,
        wants_scores: bool,
        wants_logprobs: bool,
    ) -> PromptPart {
        PromptPart {
            is_due: echo.is_some() || wants_scores,
            echoes_logprobs: echo.is_some() && wants_logprobs,
            echo,
            scores: Vec::new(),
        }
    }

    /// Adds the score of the next token.
    pub(in crate::api) fn push(&mut self, score: ScoredToken) {
        self.scores.push(score);
    }

    /// Returns whether the text of the prompt has log-probabilities. The answer then has one for
    /// each of its tokens, a stop token included, so that clients can tell the two apart.
    pub(super) fn echoes_logprobs(&self) -> bool {
        self.echoes_logprobs
    }

    /// Returns the length of the text of the prompt, in characters.
    pub(in crate::api) fn chars(&self) -> usize {
        self.echo.as_ref().map_or(0, |echo| echo.chars)
    }

    /// Returns what the first piece says about the prompt, and nothing later.
    pub(in crate::api) fn take(&mut self) -> Option<PromptPiece> {
        if !std::mem::take(&mut self.is_due) {
            return None;
        }
        let scores = std::mem::take(&mut self.scores);
        Some(PromptPiece {
            text: (self.echo.as_ref()).map_or_else(String::new, |echo| echo.text.clone()),
            logprobs: match &self.echo {
                Some(echo) if self.echoes_logprobs => echo.logprobs(&scores),
                _ => Vec::new(),
            },
            scores,
        })
    }
}
