//! How the OpenAPI document describes each endpoint.

use serde_json::{Value, json};

use super::{Components, Operation, SCHEMAS};
use crate::api::admin::{Aborted, CacheReset};
use crate::api::fields::conversation::ConversationFields;
use crate::api::fields::params::CommonFields;
use crate::api::fields::structure::StructureFields;
use crate::api::fields::unsupported;
use crate::api::llama_server::completion::{self, LlamaAnswer, LlamaFields};
use crate::api::llama_server::props::{BatchSlot, Props};
use crate::api::openai::embeddings::{EmbeddingFields, EmbeddingList};
use crate::api::openai::render::RenderedRequest;
use crate::api::sglang::generate::{self, GenerateAnswer, GenerateFields, GenerateSampling};
use crate::api::sglang::loads::{LoadReport, SECTIONS, ShortLoad};
use crate::api::sglang::server_info::{ServedModelInfo, ServerInfo};
use crate::api::status::{
    ModelList, ModelObject, RecentMetricsReport, StatusReport, VersionReport,
};
use crate::api::tokenize::{
    DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeFields, TokenizeTextFields,
    TokenizerInfo,
};

const JSON: &str = "application/json";

pub(in crate::api) fn tokenize(components: &mut Components) -> Operation {
    let both = components.fields::<TokenizeFields>();
    let text = [both.clone(), components.fields::<TokenizeTextFields>()];
    let chat = [both, components.fields::<ConversationFields>()];
    let mut request = |name, fields, own| {
        let unsupported = unsupported::schemas(own);
        components.object(name, fields, unsupported)
    };
    let text = request("TokenizeTextRequest", text, unsupported::OF_TEXT);
    let chat = request("TokenizeChatRequest", chat, &[]);
    let answer = components.schema::<TokenizeAnswer>();
    Operation::new("Returns the tokens of a text or of a conversation. The model does not run.")
        .reads(json!({ "anyOf": [text, chat] }))
        .answers(200, JSON, answer)
}

pub(in crate::api) fn detokenize(components: &mut Components) -> Operation {
    let request = components.schema::<DetokenizeRequest>();
    let answer = components.schema::<DetokenizeAnswer>();
    Operation::new("Returns the text of tokens.")
        .reads(request)
        .answers(200, JSON, answer)
}

pub(in crate::api) fn version(components: &mut Components) -> Operation {
    let answer = components.schema::<VersionReport>();
    Operation::new("Returns the version of the server.").answers(200, JSON, answer)
}

pub(in crate::api) fn models(components: &mut Components) -> Operation {
    let list = components.schema::<ModelList>();
    Operation::new("Lists the served model under each of its names.").answers(200, JSON, list)
}

pub(in crate::api) fn model(components: &mut Components) -> Operation {
    let model = components.schema::<ModelObject>();
    Operation::new("Returns the served model, by any of its names.")
        .answers(200, JSON, model)
        .fails(&[404])
}

pub(in crate::api) fn tokenizer_info(components: &mut Components) -> Operation {
    let info = components.schema::<TokenizerInfo>();
    Operation::new("Describes the tokenizer of the served model.").answers(200, JSON, info)
}

pub(in crate::api) fn model_info(components: &mut Components) -> Operation {
    let info = components.schema::<ServedModelInfo>();
    Operation::new("Describes the served model, as SGLang does.").answers(200, JSON, info)
}

pub(in crate::api) fn server_info(components: &mut Components) -> Operation {
    let info = components.schema::<ServerInfo>();
    Operation::new("Describes the server and its limits, as SGLang does.").answers(200, JSON, info)
}

pub(in crate::api) fn loads(components: &mut Components) -> Operation {
    let report = components.schema::<LoadReport>();
    let sections = "Sections of the answer, separated by commas. `core` is always there, and there \
                    are no figures for the others.";
    let names = json!({"type": "array", "items": {"type": "string", "enum": SECTIONS}});
    Operation::new("Says how busy the server is, as SGLang does.")
        .query("include", sections, &names)
        .answers(200, JSON, report)
}

pub(in crate::api) fn short_loads(components: &mut Components) -> Operation {
    let load = components.schema::<ShortLoad>();
    let loads = json!({"type": "array", "items": load});
    Operation::new("Says how busy the server is, in SGLang's older shape.")
        .answers(200, JSON, loads)
}

pub(in crate::api) fn reset_prefix_cache(components: &mut Components) -> Operation {
    let reset = components.schema::<CacheReset>();
    Operation::new("Frees every cached page that no running sequence uses. Needs the admin key.")
        .answers(200, JSON, reset)
}

pub(in crate::api) fn abort(components: &mut Components) -> Operation {
    let aborted = components.schema::<Aborted>();
    let summary = "Ends the requests with this id: that of their answer, or their x-request-id. \
                   Needs the admin key.";
    Operation::new(summary)
        .answers(200, JSON, aborted)
        .fails(&[404])
}

/// Describes `/v1/embeddings`.
pub(in crate::api) fn embeddings(components: &mut Components) -> Operation {
    let fields = [components.fields::<EmbeddingFields>()];
    let request = components.object("EmbeddingRequest", fields, unsupported::schemas(&[]));
    let answer = components.schema::<EmbeddingList>();
    Operation::new("Returns the embeddings of texts.")
        .reads(request)
        .answers(200, JSON, answer)
        .fails(&[504])
}

/// Describes `/completion`.
pub(in crate::api) fn llama_completion(components: &mut Components) -> Operation {
    let fields = [
        components.fields::<CommonFields>(),
        components.fields::<StructureFields>(),
        components.fields::<LlamaFields>(),
    ];
    let supported = completion::SUPPORTED;
    let unsupported = unsupported::schemas_except(unsupported::OF_NATIVE, supported);
    let request = components.object("LlamaCompletionRequest", fields, unsupported);
    let answer = components.schema::<LlamaAnswer>();
    Operation::new("Continues a prompt, as llama-server does.")
        .reads(request)
        .answers(200, JSON, answer.clone())
        .streams(answer)
        .fails(&[504])
}

/// Describes `/generate`.
pub(in crate::api) fn generate(components: &mut Components) -> Operation {
    let sampling = [
        components.fields::<CommonFields>(),
        components.fields::<StructureFields>(),
        components.fields::<GenerateSampling>(),
    ];
    let unsupported = || unsupported::schemas_except(unsupported::OF_NATIVE, generate::SUPPORTED);
    let sampling = components.object("GenerateSamplingParams", sampling, unsupported());
    let sampling = json!({"anyOf": [sampling, {"type": "null"}],
        "description": "How tokens are drawn, and what ends the answer."});
    let fields = [components.fields::<GenerateFields>()];
    let more = unsupported().chain([("sampling_params", sampling)]);
    let request = components.object("GenerateRequest", fields, more);
    let answer = components.schema::<GenerateAnswer>();
    Operation::new("Continues a prompt, as SGLang does.")
        .reads(request)
        .answers(200, JSON, answer.clone())
        .streams(answer)
        .fails(&[504])
}

pub(in crate::api) fn render_chat(components: &mut Components) -> Operation {
    let rendered = components.schema::<RenderedRequest>();
    Operation::new("Returns the tokens of a conversation and how it would be answered, as vLLM.")
        .reads(request_of("ChatCompletion"))
        .answers(200, JSON, rendered)
}

pub(in crate::api) fn render_completion(components: &mut Components) -> Operation {
    let rendered = components.schema::<RenderedRequest>();
    Operation::new("Returns the tokens of each prompt and how it would be continued, as vLLM.")
        .reads(request_of("Completion"))
        .answers(200, JSON, json!({"type": "array", "items": rendered}))
}

/// Returns a reference to the requests of a completion endpoint.
fn request_of(name: &str) -> Value {
    json!({ "$ref": format!("{SCHEMAS}{name}Request") })
}

pub(in crate::api) fn props(components: &mut Components) -> Operation {
    let props = components.schema::<Props>();
    Operation::new("Describes the server, as llama-server does.").answers(200, JSON, props)
}

pub(in crate::api) fn slots(components: &mut Components) -> Operation {
    let slot = components.schema::<BatchSlot>();
    let fails = "If present, it is an error that all slots are used.";
    Operation::new("Says which places of the batch are used, as llama-server does.")
        .query("fail_on_no_slot", fails, &json!({"type": "string"}))
        .answers(200, JSON, json!({"type": "array", "items": slot}))
}

pub(in crate::api) fn health(components: &mut Components) -> Operation {
    let report = components.schema::<StatusReport>();
    Operation::new("Says whether the server is alive and makes progress.")
        .answers(200, JSON, report.clone())
        .answers(503, JSON, report)
}

pub(in crate::api) fn ready(components: &mut Components) -> Operation {
    let report = components.schema::<StatusReport>();
    Operation::new("Says whether the server accepts requests.").answers(200, JSON, report)
}

pub(in crate::api) fn metrics(_: &mut Components) -> Operation {
    Operation::new("Returns the metrics in Prometheus's text format. Needs the admin key.").answers(
        200,
        "text/plain",
        json!({"type": "string"}),
    )
}

pub(in crate::api) fn recent_metrics(components: &mut Components) -> Operation {
    let report = components.schema::<RecentMetricsReport>();
    Operation::new("Returns the last minutes of some metrics. Needs the admin key.")
        .answers(200, JSON, report)
}

pub(in crate::api) fn page(_: &mut Components) -> Operation {
    Operation::new("A chat page for the browser.")
        .answers(200, "text/html", json!({"type": "string"}))
        .answers_without_body(304)
}

pub(in crate::api) fn page_file(_: &mut Components) -> Operation {
    let text = json!({"type": "string"});
    Operation::new("A file of the chat page.")
        .answers(200, "text/javascript", text.clone())
        .answers(200, "text/css", text.clone())
        .answers(200, "image/svg+xml", text)
        .answers_without_body(304)
        .fails(&[404])
}

pub(in crate::api) fn openapi(_: &mut Components) -> Operation {
    Operation::new("This document.").answers(200, JSON, json!({"type": "object"}))
}
