//! How `config.json` states the rotary frequencies: which types it may name, and their parameters.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::rope::{RopeScaling, longrope_attention_factor, yarn_attention_factor};
use crate::checkpoint::{LoadError, LoadResult, require};

/// The values of `rope_type` that this engine computes.
const ROPE_TYPES: [&str; 5] = ["default", "linear", "yarn", "llama3", "longrope"];

/// The positions of a model.
#[derive(Clone, Copy)]
pub(super) struct Positions {
    pub(super) max: f64,
    /// The positions of the first training.
    pub(super) original: f64,
}

/// The object `rope_scaling` or `rope_parameters`.
#[derive(Deserialize)]
pub(super) struct RopeJson {
    pub(super) rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The older name of `rope_type`. Some writers store both.
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    /// The parameters of other types. The default type ignores them if it is named.
    #[serde(flatten)]
    other_parameters: BTreeMap<String, Value>,
}

impl RopeJson {
    /// Returns whether Python would take the object for none: it has no known key.
    pub(super) fn is_empty(&self) -> bool {
        self.rope_theta.is_none()
            && self.rope_type().is_none()
            && self.partial_rotary_factor.is_none()
    }

    pub(super) fn partial_rotary_factor(&self) -> Option<f64> {
        self.partial_rotary_factor
    }

    /// # Errors
    /// If the object has parameters that only other types than the default one have. `field` is
    /// its name.
    pub(super) fn refuse_other_parameters(&self, field: &str) -> LoadResult<()> {
        match self.other_parameters.keys().next() {
            Some(key) => Err(LoadError::config(field, format!("{key} is not supported"))),
            None => Ok(()),
        }
    }

    pub(super) fn rope_type(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.legacy_type.as_deref())
    }

    /// Returns how the object scales frequencies. `field` is its name.
    pub(super) fn scaling(
        &self,
        field: &str,
        positions: Positions,
        pairs: usize,
    ) -> LoadResult<RopeScaling> {
        let number = |key: &str| self.number(field, key);
        let require = |key: &str| {
            let missing = || LoadError::config(field, format!("{key} is missing"));
            self.number(field, key)?.ok_or_else(missing)
        };
        let original = number("original_max_position_embeddings")?;
        let original = original.unwrap_or(positions.original);
        Ok(match self.rope_type().unwrap_or("default") {
            "linear" => RopeScaling::Linear {
                factor: require("factor")?,
            },
            "yarn" => {
                let unsupported = ["mscale", "mscale_all_dim", "truncate"];
                self.refuse_parameters(field, &unsupported)?;
                let factor = require("factor")?;
                let attention_factor = number("attention_factor")?;
                RopeScaling::Yarn {
                    factor,
                    original,
                    beta_fast: number("beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("beta_slow")?.unwrap_or(1.0),
                    attention_factor: attention_factor
                        .unwrap_or_else(|| yarn_attention_factor(factor)),
                }
            }
            "llama3" => RopeScaling::Llama3 {
                factor: require("factor")?,
                original,
                low: require("low_freq_factor")?,
                high: require("high_freq_factor")?,
            },
            "longrope" => {
                let is_long = positions.max > original;
                let key = if is_long {
                    "long_factor"
                } else {
                    "short_factor"
                };
                let factor = number("factor")?.unwrap_or(positions.max / original);
                let attention_factor = number("attention_factor")?;
                RopeScaling::LongRope {
                    divisors: self.divisors(field, key, pairs)?,
                    attention_factor: attention_factor
                        .unwrap_or_else(|| longrope_attention_factor(factor, original)),
                }
            }
            _ => RopeScaling::None,
        })
    }

    /// Returns a parameter that must be a positive number.
    fn number(&self, field: &str, key: &str) -> LoadResult<Option<f64>> {
        let value = self
            .other_parameters
            .get(key)
            .filter(|value| !value.is_null());
        let number = value.map(|value| {
            let number = value
                .as_f64()
                .filter(|number| number.is_finite() && *number > 0.0);
            let problem = || format!("{key} must be a positive number; got {value}");
            number.ok_or_else(|| LoadError::config(field, problem()))
        });
        number.transpose()
    }

    fn divisors(&self, field: &str, key: &str, pairs: usize) -> LoadResult<Vec<f64>> {
        let list = self.other_parameters.get(key).and_then(Value::as_array);
        let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
        let divisors = list.and_then(|list| list.iter().map(positive).collect());
        let divisors: Option<Vec<f64>> = divisors.filter(|list: &Vec<f64>| list.len() == pairs);
        let problem = || format!("{key} must be a list of {pairs} positive numbers");
        divisors.ok_or_else(|| LoadError::config(field, problem()))
    }

    fn refuse_parameters(&self, field: &str, keys: &[&str]) -> LoadResult<()> {
        let is_set = |key: &&&str| {
            self.other_parameters
                .get(**key)
                .is_some_and(|v| !v.is_null())
        };
        match keys.iter().find(is_set) {
            Some(key) => Err(LoadError::config(field, format!("{key} is not supported"))),
            None => Ok(()),
        }
    }

    /// # Errors
    /// If the object asks for a type that is not known. `field` is its name, and `partial` is the
    /// factor beside it.
    pub(super) fn check(&self, field: &str, partial: Option<f64>) -> LoadResult<()> {
        let rope_type = self.rope_type();
        if let (None, Some(parameter)) = (rope_type, self.other_parameters.keys().next()) {
            let problem = format!("has {parameter:?}, but no rope_type");
            return Err(LoadError::config(field, problem));
        }
        let rope_type = rope_type.unwrap_or("default");
        let known = ROPE_TYPES.join(", ");
        let problem = format_args!("rope_type must be one of {known}; got {rope_type:?}");
        require(ROPE_TYPES.contains(&rope_type), field, problem)?;
        check_partial(field, self.partial_rotary_factor.or(partial))
    }
}

/// # Errors
/// If only a part of the values of a head is rotated. `field` is the name of the factor.
pub(super) fn check_partial(field: &str, factor: Option<f64>) -> LoadResult<()> {
    let factor = factor.unwrap_or(1.0);
    let problem = format_args!("partial_rotary_factor must be 1; got {factor}");
    require(factor == 1.0, field, problem)
}
