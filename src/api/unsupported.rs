//! Fields that the server knows but does not support, and their harmless values.
//!
//! The list has the fields of OpenAI, vLLM, SGLang and llama.cpp that would change the text, its
//! length or its log-probabilities. Fields that only another field of the list gives a meaning are
//! not in it, nor are fields about speed, caches and identities: ignoring them changes no answer.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::error::{ApiError, MAX_QUOTED_CHARS, quoted};
use super::fields::unsupported;
use super::json::JsonObject;

/// A field that the server does not support: its name, whether a value asks only for what the
/// server does anyway, and the reason.
pub(super) type UnsupportedField = (&'static str, fn(&Value) -> bool, &'static str);

const ONE_ANSWER: &str = "this server returns every answer that it generates; set 'n' instead";
const NO_ECHO: &str = "this server does not echo the prompt";
const NO_SUFFIX: &str = "this server does not fill in text before a suffix";
const NO_TOOLS: &str = "this server does not call tools";
const FREE_TEXT: &str = "this server does not constrain the structure of the output";
const TEXT_ONLY: &str = "this server reads and writes text only";
const OWN_TEMPLATE: &str = "this server always uses the model's own chat template";
const OWN_TOKENS: &str = "this server always adds the special tokens that the model's files say";
const MAX_TOKENS: &str = "set 'max_tokens' instead";
const REPETITION: &str = "set 'repetition_penalty' instead";
const KEEPS_STOP: &str = "set 'include_stop_str_in_output' instead";
const LOGPROBS: &str = "set 'logprobs' instead";
const NO_REASONING: &str = "this server does not limit how long a model reasons";
const SEPARATE: &str = "this server returns reasoning in a field of its own";
const NO_TEMPLATE: &str = "this endpoint uses no chat template";
const ONE_MODEL: &str = "this server serves one model, without adapters";
const NOT_SUPPORTED: &str = "this server does not implement the field";

/// The fields that neither endpoint supports. `null` is not checked: it means an absent field.
#[rustfmt::skip] // One field, one line, so that the list reads as a table.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("best_of", is_one, ONE_ANSWER),
    ("echo", is_false, NO_ECHO),
    ("suffix", is_empty, NO_SUFFIX),
    ("tools", is_empty, NO_TOOLS),
    ("functions", is_empty, NO_TOOLS),
    ("tool_choice", is_none_or_auto, NO_TOOLS),
    ("function_call", is_none_or_auto, NO_TOOLS),
    ("response_format", |value| value["type"] == "text", FREE_TEXT),
    ("structured_outputs", is_empty, FREE_TEXT),
    ("structural_tag", is_empty, FREE_TEXT),
    ("guided_json", never, FREE_TEXT),
    ("guided_regex", never, FREE_TEXT),
    ("guided_choice", never, FREE_TEXT),
    ("guided_grammar", never, FREE_TEXT),
    ("json_schema", is_empty_text, FREE_TEXT),
    ("grammar", is_empty_text, FREE_TEXT),
    ("regex", is_empty_text, FREE_TEXT),
    ("ebnf", is_empty_text, FREE_TEXT),
    ("audio", is_empty, TEXT_ONLY),
    ("modalities", |value| *value == serde_json::json!(["text"]), TEXT_ONLY),
    ("image_data", is_empty, TEXT_ONLY),
    ("audio_data", is_empty, TEXT_ONLY),
    ("video_data", is_empty, TEXT_ONLY),
    ("multi_modal_data", is_empty, TEXT_ONLY),
    ("mm_processor_kwargs", is_empty, TEXT_ONLY),
    ("prompt_embeds", is_empty, TEXT_ONLY),
    ("input_embeds", is_empty, TEXT_ONLY),
    ("web_search_options", never, NOT_SUPPORTED),
    ("prediction", never, NOT_SUPPORTED),
    ("verbosity", |value| value == "medium", NOT_SUPPORTED),
    ("reasoning_effort", |value| value == "none", NOT_SUPPORTED),
    ("thinking_token_budget", is_minus_one, NO_REASONING),
    ("separate_reasoning", is_true, SEPARATE),
    ("stream_reasoning", is_true, SEPARATE),
    ("reasoning_format", |value| value == "auto" || value == "deepseek", SEPARATE),
    ("use_beam_search", is_false, NOT_SUPPORTED),
    ("length_penalty", is_one, NOT_SUPPORTED),
    ("prompt_logprobs", never, NOT_SUPPORTED),
    ("logprob_token_ids", is_empty, NOT_SUPPORTED),
    ("return_tokens_as_token_ids", is_false, NOT_SUPPORTED),
    ("allowed_token_ids", is_empty, NOT_SUPPORTED),
    ("bad_words", is_empty, NOT_SUPPORTED),
    ("repetition_detection", is_empty, NOT_SUPPORTED),
    ("watermarking", is_false, NOT_SUPPORTED),
    ("logits_processors", is_empty, NOT_SUPPORTED),
    ("custom_logit_processor", is_empty, NOT_SUPPORTED),
    ("custom_params", is_empty, NOT_SUPPORTED),
    ("vllm_xargs", is_empty, NOT_SUPPORTED),
    ("truncate_prompt_tokens", is_minus_one, NOT_SUPPORTED),
    ("priority", is_zero, NOT_SUPPORTED),
    ("stop_regex", is_empty, NOT_SUPPORTED),
    ("no_stop_trim", is_false, KEEPS_STOP),
    ("session_params", is_empty, NOT_SUPPORTED),
    ("return_hidden_states", is_false, NOT_SUPPORTED),
    ("lora_path", is_empty, ONE_MODEL),
    ("lora", is_empty, ONE_MODEL),
    ("n_predict", is_minus_one, MAX_TOKENS),
    ("max_new_tokens", never, MAX_TOKENS),
    ("n_probs", is_zero, LOGPROBS),
    ("post_sampling_probs", is_false, LOGPROBS),
    ("repeat_penalty", is_one, REPETITION),
    ("typical_p", is_one, NOT_SUPPORTED),
    ("tfs_z", is_one, NOT_SUPPORTED),
    ("top_a", is_zero, NOT_SUPPORTED),
    ("top_n_sigma", is_not_positive, NOT_SUPPORTED),
    ("min_keep", is_zero, NOT_SUPPORTED),
    ("mirostat", is_zero, NOT_SUPPORTED),
    ("dynatemp_range", is_zero, NOT_SUPPORTED),
    ("xtc_probability", is_zero, NOT_SUPPORTED),
    ("dry_multiplier", is_zero, NOT_SUPPORTED),
    ("adaptive_target", is_negative, NOT_SUPPORTED),
    ("samplers", is_empty, NOT_SUPPORTED),
    ("n_indent", is_zero, NOT_SUPPORTED),
    ("t_max_predict_ms", is_not_positive, NOT_SUPPORTED),
    ("chat_template", never, OWN_TEMPLATE),
    ("documents", is_empty, OWN_TEMPLATE),
    ("add_generation_prompt", is_true, OWN_TEMPLATE),
    ("continue_final_message", is_false, OWN_TEMPLATE),
];

/// The fields that `/v1/chat/completions` does not support either. A chat template writes the
/// special tokens itself.
pub(super) const OF_CHAT: &[UnsupportedField] = &[("add_special_tokens", is_false, OWN_TOKENS)];

/// The fields that `/v1/completions` does not support either.
pub(super) const OF_COMPLETIONS: &[UnsupportedField] = &[
    ("add_special_tokens", is_true, OWN_TOKENS),
    ("chat_template_kwargs", is_empty, NO_TEMPLATE),
    ("enable_thinking", is_false, NO_TEMPLATE),
];

/// Checks that a request uses no unsupported field. `own` are those of its endpoint.
///
/// # Errors
/// If an unsupported field has a value that is not harmless.
pub(super) fn check(body: JsonObject<'_>, own: &[UnsupportedField]) -> Result<(), ApiError> {
    body.read_with(Check { own })
}

/// Reads a body and looks only at the fields that the server does not support.
struct Check<'a> {
    own: &'a [UnsupportedField],
}

impl<'de> DeserializeSeed<'de> for Check<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, body: D) -> Result<(), D::Error> {
        body.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Check<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(name) = entries.next_key::<String>()? {
            let mut fields = UNSUPPORTED.iter().chain(self.own);
            match fields.find(|(unsupported, _, _)| *unsupported == name) {
                Some(field) => entries.next_value_seed(CheckValue(field))?,
                None => drop(entries.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Reads the value of an unsupported field. A value that is not harmless is an error.
struct CheckValue<'a>(&'a UnsupportedField);

impl<'de> DeserializeSeed<'de> for CheckValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        let (name, is_harmless, reason) = self.0;
        let mut excerpt = Excerpt(String::new());
        (&mut excerpt).deserialize(value)?;
        match excerpt.value() {
            Some(value) if value.is_null() || is_harmless(&value) => Ok(()),
            _ => Err(unsupported(format_args!(
                "'{name}' does not support the value {}: {reason}. Omit the field.",
                quoted(&excerpt.0)
            ))),
        }
    }
}

/// The beginning of a value as compact JSON: all of it, or more than an error message quotes.
struct Excerpt(String);

impl Excerpt {
    fn is_cut(&self) -> bool {
        self.0.chars().nth(MAX_QUOTED_CHARS).is_some()
    }

    /// Returns the value, or `None` if it is longer than any harmless value.
    fn value(&self) -> Option<Value> {
        if self.is_cut() {
            return None;
        }
        serde_json::from_str(&self.0).ok()
    }

    fn add_text(&mut self, text: &str) {
        let beginning: String = text.chars().take(MAX_QUOTED_CHARS + 1).collect();
        self.0 += &Value::from(beginning).to_string();
    }

    fn separate(&mut self, is_first: bool) {
        self.0 += if is_first { "" } else { "," };
    }
}

impl<'de> DeserializeSeed<'de> for &mut Excerpt {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        if self.is_cut() {
            return IgnoredAny::deserialize(value).map(|_| ());
        }
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Excerpt {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0 += "null";
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.0 += &value.to_string();
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0 += &value.to_string();
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0 += &value.to_string();
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.0 += &Value::from(value).to_string();
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.add_text(text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.push('[');
        let mut is_first = true;
        while items.next_element_seed(Item(self, is_first))?.is_some() {
            is_first = false;
        }
        self.0.push(']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        self.0.push('{');
        let mut is_first = true;
        while let Some(name) = entries.next_key::<String>()? {
            self.separate(is_first);
            self.add_text(&name);
            self.0.push(':');
            entries.next_value_seed(&mut *self)?;
            is_first = false;
        }
        self.0.push('}');
        Ok(())
    }
}

/// An item of an array, and whether it is the first.
struct Item<'a>(&'a mut Excerpt, bool);

impl<'de> DeserializeSeed<'de> for Item<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, item: D) -> Result<(), D::Error> {
        let Item(excerpt, is_first) = self;
        excerpt.separate(is_first);
        excerpt.deserialize(item)
    }
}

fn never(_: &Value) -> bool {
    false
}

fn is_true(value: &Value) -> bool {
    value == true
}

fn is_false(value: &Value) -> bool {
    value == false
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_minus_one(value: &Value) -> bool {
    value.as_f64() == Some(-1.0)
}

fn is_negative(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number < 0.0)
}

fn is_not_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number <= 0.0)
}

fn is_none_or_auto(value: &Value) -> bool {
    value == "none" || value == "auto"
}

fn is_empty_text(value: &Value) -> bool {
    value == ""
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
