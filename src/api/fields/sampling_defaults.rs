//! The sampling parameters that a checkpoint recommends, in its `generation_config.json`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::json_field::{Float, Integer};
use super::json_object::JsonObject;

/// Sampling parameters of requests that do not set them. By default, there are none.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct SamplingDefaults {
    pub(in crate::api) temperature: Option<Float<0, 200>>,
    pub(in crate::api) top_p: Option<Float<0, 100>>,
    pub(in crate::api) top_k: Option<Integer<-1, { u32::MAX as i64 }>>,
    pub(in crate::api) min_p: Option<Float<0, 100>>,
    pub(in crate::api) repetition_penalty: Option<Float<1, 10_000>>,
    max_new_tokens: Option<Integer<1, { i64::MAX }>>,
}

/// Sampling parameters that requests need not set. A parameter that is `null` has its neutral
/// value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(in crate::api) struct PreferredSampling {
    /// The temperature.
    pub(in crate::api) temperature: Option<f32>,
    /// The total probability of the tokens that are drawn from.
    pub(in crate::api) top_p: Option<f32>,
    /// The number of tokens that are drawn from.
    pub(in crate::api) top_k: Option<i64>,
    /// The least probability of a token, relative to the probability of the most likely token.
    pub(in crate::api) min_p: Option<f32>,
    /// The penalty of tokens of prompt and output.
    pub(in crate::api) repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Reads a `generation_config.json`. Its values have the same limits as the fields of requests.
    ///
    /// # Errors
    /// If the text is no JSON object, or a parameter exceeds its limits.
    pub fn read(json: &[u8]) -> Result<SamplingDefaults, String> {
        let read = JsonObject::check(json).and_then(|object| object.read());
        read.map_err(|error| error.message().to_owned())
    }

    /// Returns the sampling parameters, or `None` if there are none.
    pub(in crate::api) fn preferred(&self) -> Option<PreferredSampling> {
        let preferred = PreferredSampling {
            temperature: self.temperature.map(|Float(number)| number),
            top_p: self.top_p.map(|Float(number)| number),
            top_k: self.top_k.map(|Integer(number)| number as i64),
            min_p: self.min_p.map(|Float(number)| number),
            repetition_penalty: self.repetition_penalty.map(|Float(number)| number),
        };
        (preferred != PreferredSampling::default()).then_some(preferred)
    }

    /// Returns the maximum number of output tokens.
    pub(in crate::api) fn max_tokens(&self) -> Option<u32> {
        let Integer(tokens) = self.max_new_tokens?;
        Some(u32::try_from(tokens).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::SamplingDefaults;

    #[test]
    fn a_generation_config_is_read_or_refused_by_the_name_of_its_key() {
        let text = br#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true,
            "eos_token_id": [1, 2], "min_p": null, "max_new_tokens": 2048}"#;
        let read = SamplingDefaults::read(text).unwrap();
        assert_eq!(read.max_tokens(), Some(2048));
        assert!(read.temperature.is_some() && read.min_p.is_none());
        for (text, key) in [
            (r#"{"temperature": -1}"#, "'temperature'"),
            (r#"{"top_k": "all"}"#, "'top_k'"),
            (r#"{"max_new_tokens": 0}"#, "'max_new_tokens'"),
            ("[]", "JSON object"),
        ] {
            let error = SamplingDefaults::read(text.as_bytes()).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
