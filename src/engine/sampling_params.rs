//! How a request's tokens are drawn, and what is reported of each.

use sterna_scheduler::TokenId;

use crate::checkpoint::Pooling;
use crate::constraint::{Grammar, ThinkingBudget};

/// The largest number of `SamplingParams::logprobs`.
pub(super) const MAX_LOGPROBS: u32 = 20;

/// Outside this range a division or a product can turn a finite logit into an infinite one, which
/// fails the request.
const REPETITION_PENALTIES: std::ops::RangeInclusive<f32> = 0.01..=100.0;

/// The sampling parameters of a request. By default, the temperature is 1 and everything else is
/// off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the largest logit, the lowest token id on a tie.
    pub temperature: f32,
    /// Keeps only this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens with at least this probability; 1 is off.
    pub top_p: f32,
    /// Drops tokens whose probability, relative to the most likely token's, is smaller; 0 is off.
    pub min_p: f32,
    /// The only source of randomness besides the position.
    pub seed: u64,
    /// Divides the positive logits and multiplies the negative logits of tokens in the prompt and
    /// the output. 0.01 to 100; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit once for each occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of every token that occurs in the output; 0 is off.
    pub presence_penalty: f32,
    /// Added to single logits before everything else. Negative infinity forbids a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The number of most likely tokens to report beside the drawn one. 0 reports only the drawn
    /// token's log-probability, `None` reports nothing.
    pub logprobs: Option<u32>,
    /// The grammar that the output follows.
    pub grammar: Option<Grammar>,
    /// After how many tokens the reasoning of the output is ended.
    pub thinking: Option<ThinkingBudget>,
    /// The number of most likely tokens to report for each token of the prompt after the first,
    /// beside that token. `None` reports nothing.
    pub prompt_logprobs: Option<u32>,
    /// How blocks of masked tokens are filled, if the output comes by block diffusion.
    pub unmasking: Option<Unmasking>,
    /// How the hidden states of the prompt become its embedding. The request then gets that instead
    /// of tokens, and its other parameters have no effect.
    pub pooling: Option<Pooling>,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
            grammar: None,
            thinking: None,
            prompt_logprobs: None,
            unmasking: None,
            pooling: None,
        }
    }
}

/// How blocks of masked tokens are filled: which of the drawn tokens stay after a pass.
///
/// A token stays if its plain probability is above the threshold: that of the model's logits,
/// whatever the temperature. The one with the highest probability always stays, the first of equal
/// ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unmasking {
    /// The threshold, from 0 to 1.
    pub threshold: f32,
    /// The token in the place of an unknown token.
    pub mask_token: TokenId,
}

impl SamplingParams {
    /// Returns the parameters of choice `index` of a request: the choice's seed is the request's
    /// seed plus `index`, wrapping.
    pub(super) fn of_choice(&self, index: u64) -> SamplingParams {
        SamplingParams {
            seed: self.seed.wrapping_add(index),
            ..self.clone()
        }
    }

    /// Returns the same parameters for an output by block diffusion. The mask token is never drawn.
    #[must_use]
    pub fn by_diffusion(mut self, unmasking: Unmasking) -> SamplingParams {
        let forbidden = (unmasking.mask_token, f32::NEG_INFINITY);
        self.logit_bias.push(forbidden);
        self.unmasking = Some(unmasking);
        self
    }

    /// Returns parameters that draw the most likely token each time.
    pub fn greedy() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        }
    }

    /// Returns the name of a parameter with an invalid value, or `None` if all are valid.
    pub(super) fn invalid(&self) -> Option<&'static str> {
        let not_negative = |number: f32| number.is_finite() && number >= 0.0;
        let mut biases = self.logit_bias.iter().map(|&(_, bias)| bias);
        let checks = [
            ("temperature", not_negative(self.temperature)),
            ("top_p", not_negative(self.top_p)),
            ("min_p", not_negative(self.min_p)),
            (
                "repetition_penalty",
                REPETITION_PENALTIES.contains(&self.repetition_penalty),
            ),
            ("frequency_penalty", self.frequency_penalty.is_finite()),
            ("presence_penalty", self.presence_penalty.is_finite()),
            (
                "logit_bias",
                biases.all(|bias| bias.is_finite() || bias == f32::NEG_INFINITY),
            ),
            (
                "logprobs",
                self.logprobs.is_none_or(|count| count <= MAX_LOGPROBS),
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs
                    .is_none_or(|count| count <= MAX_LOGPROBS),
            ),
        ];
        let failed = checks.into_iter().find(|(_, is_valid)| !is_valid);
        failed.map(|(name, _)| name)
    }
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// The token. The last one may be a stop token, which is not part of the text.
    pub token: TokenId,
    /// Its raw log-probability, before bias, penalties, masks and temperature. `None` unless
    /// `logprobs` is set.
    pub logprob: Option<f32>,
    /// The most likely tokens with their raw log-probabilities, most likely first.
    pub top: Vec<(TokenId, f32)>,
}

/// A token of a prompt, and how likely the model finds it after the tokens before it.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The token.
    pub token: TokenId,
    /// Its raw log-probability.
    pub logprob: f32,
    /// Its place among all tokens by probability, from 1.
    pub rank: u32,
    /// The most likely tokens with their raw log-probabilities, most likely first.
    pub top: Vec<(TokenId, f32)>,
}
