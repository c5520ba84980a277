//! The OpenAPI document: what every endpoint reads and answers.
//!
//! Invariant: the document is made from the routes of the router and from the types that read
//! requests and write answers. No limit stands here.

pub(in crate::api) mod operations;
pub(in crate::api) mod schema;

use std::collections::{BTreeMap, BTreeSet};

use axum::handler::Handler;
use axum::routing::{MethodRouter, delete, get, post};
use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Object, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::app::App;
use crate::api::error::{ErrorBody, classes_of};
use crate::api::middleware::authentication::needs_key;
use schema::{EMBEDDED, NamedSchemas, collect, embedded};

pub(in crate::api) const SCHEMAS: &str = "#/components/schemas/";
const EVENT_STREAM: &str = "text/event-stream";
const DESCRIPTION: &str = "An HTTP API for a ternary language model. A field that is `null` \
    counts as absent, an unknown field is ignored, and a known field that is not supported is an \
    error. The HTTP library answers malformed HTTP (400) and heads over 16 KiB (431) itself, \
    without JSON.";

/// What each status of an error means.
const STATUSES: &[(u16, &str)] = &[
    (400, "The request is not valid. `param` names the field."),
    (401, "The key is missing or not valid."),
    (
        403,
        "The key or the host of the request is not allowed, or the operator has ended the request.",
    ),
    (404, "The model, the path or the request does not exist."),
    (408, "The body was incomplete or arrived too slowly."),
    (413, "The body is too large or has too many values."),
    (415, "The content type is not JSON."),
    (429, "The tenant has reached one of its own limits."),
    (
        500,
        "The server failed. Its log names the request by `x-request-id`.",
    ),
    (503, "The server is overloaded, starting, or shutting down."),
    (504, "The request exceeded a deadline."),
];

/// An endpoint: its path and method, what handles it and how the document describes it.
pub(in crate::api) struct ApiRoute {
    /// The path as the router writes it.
    pub(in crate::api) path: &'static str,
    pub(in crate::api) handler: MethodRouter<App>,
    method: &'static str,
    describe: fn(&mut Components) -> Operation,
}

impl ApiRoute {
    pub(in crate::api) fn get<H: Handler<T, App>, T: 'static>(
        path: &'static str,
        handler: H,
        describe: fn(&mut Components) -> Operation,
    ) -> ApiRoute {
        ApiRoute {
            path,
            handler: get(handler),
            method: "get",
            describe,
        }
    }

    pub(in crate::api) fn delete<H: Handler<T, App>, T: 'static>(
        path: &'static str,
        handler: H,
        describe: fn(&mut Components) -> Operation,
    ) -> ApiRoute {
        ApiRoute {
            path,
            handler: delete(handler),
            method: "delete",
            describe,
        }
    }

    pub(in crate::api) fn post<H: Handler<T, App>, T: 'static>(
        path: &'static str,
        handler: H,
        describe: fn(&mut Components) -> Operation,
    ) -> ApiRoute {
        ApiRoute {
            path,
            handler: post(handler),
            method: "post",
            describe,
        }
    }
}

/// How the document describes an endpoint.
pub(in crate::api) struct Operation {
    summary: &'static str,
    request: Option<Value>,
    answers: BTreeMap<u16, Map<String, Value>>, // By status and content type.
    errors: Vec<u16>,
    query: Vec<Value>,
    error_body: Option<Value>, // In place of OpenAI's.
}

impl Operation {
    /// Describes an endpoint whose requests have no body.
    pub(in crate::api) fn new(summary: &'static str) -> Operation {
        Operation {
            summary,
            request: None,
            answers: BTreeMap::new(),
            errors: vec![400, 403, 500, 503],
            query: Vec::new(),
            error_body: None,
        }
    }

    /// Adds a body, and the errors that it can cause.
    pub(in crate::api) fn reads(mut self, schema: Value) -> Operation {
        self.request = Some(schema);
        self.fails(&[404, 408, 413, 415, 429])
    }

    /// Adds an optional parameter of the query.
    pub(in crate::api) fn query(
        mut self,
        name: &str,
        description: &str,
        schema: &Value,
    ) -> Operation {
        self.query.push(json!({
            "name": name,
            "in": "query",
            "description": description,
            "schema": schema,
        }));
        self
    }

    /// Adds an answer.
    pub(in crate::api) fn answers(
        mut self,
        status: u16,
        content_type: &str,
        schema: Value,
    ) -> Operation {
        let of_status = self.answers.entry(status).or_default();
        of_status.insert(content_type.to_owned(), json!({ "schema": schema }));
        self
    }

    /// Adds an answer that is a stream of events. `data` is the schema of the JSON in an event. As
    /// in OpenAPI 3.2, the schema of a stream describes one event.
    pub(in crate::api) fn streams(self, data: Value) -> Operation {
        // Without `contentMediaType`, because the last event of a stream can be `[DONE]`.
        let data = json!({
            "type": "string",
            "description": "JSON, or `[DONE]` at the end of the stream.",
            "contentSchema": data,
        });
        let event = json!({"type": "object", "properties": {"data": data}, "required": ["data"]});
        self.answers(200, EVENT_STREAM, event)
    }

    /// Adds an answer without a body.
    pub(in crate::api) fn answers_without_body(mut self, status: u16) -> Operation {
        self.answers.entry(status).or_default();
        self
    }

    /// Adds statuses of errors.
    pub(in crate::api) fn fails(mut self, statuses: &[u16]) -> Operation {
        self.errors.extend(statuses);
        self
    }

    /// Says that errors have another body than OpenAI's.
    pub(in crate::api) fn fails_as(mut self, schema: Value) -> Operation {
        self.error_body = Some(schema);
        self
    }

    fn json(self, path: &str, parameters: &[Value]) -> Value {
        let mut errors = self.errors;
        let mut security = Vec::new();
        if needs_key(path) {
            errors.push(401);
            // A server without a tenants file needs no key.
            security = vec![json!({"bearer": []}), json!({"apiKey": []}), json!({})];
        }
        let mut responses = Map::new();
        for status in errors {
            let name = format!("#/components/responses/{status}");
            let response = match &self.error_body {
                None => json!({ "$ref": name }),
                Some(schema) => json!({
                    "description": description_of(status),
                    "content": {"application/json": {"schema": schema}},
                    "headers": headers(status),
                }),
            };
            responses.insert(status.to_string(), response);
        }
        for (status, content) in self.answers {
            let description = match status {
                200 => "The answer.",
                304 => "The client has the answer already.",
                _ => "Why not.",
            };
            let mut response = json!({"description": description, "headers": headers(status)});
            if !content.is_empty() {
                response["content"] = content.into();
            }
            responses.insert(status.to_string(), response);
        }
        responses.sort_keys();
        let all_parameters = [parameters, &self.query].concat();
        let mut operation = json!({
            "summary": self.summary,
            "parameters": all_parameters,
            "security": security,
            "responses": responses,
        });
        if let Some(schema) = self.request {
            let content = json!({"application/json": {"schema": schema}});
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        operation
    }
}

/// Returns what a status of an error means.
fn description_of(status: u16) -> &'static str {
    let mut statuses = STATUSES.iter();
    let found = statuses.find(|(known, _)| *known == status);
    found.map_or("", |(_, description)| description)
}

/// The fields of an object.
pub(in crate::api) type ObjectSchema = Object;

/// The schemas that the operations refer to.
#[derive(Default)]
pub(in crate::api) struct Components {
    schemas: NamedSchemas,
}

impl Components {
    /// Adds the schema of `T`. Returns a reference to it.
    pub(in crate::api) fn schema<T: ToSchema>(&mut self) -> Value {
        collect::<T>(&mut self.schemas);
        self.named(&T::name(), T::schema())
    }

    /// Adds the schema of `T` under another name. Returns a reference to it.
    pub(in crate::api) fn schema_as<T: ToSchema>(&mut self, name: &str) -> Value {
        T::schemas(&mut self.schemas);
        self.named(name, T::schema())
    }

    /// Returns the fields of `T`, for `object`.
    pub(in crate::api) fn fields<T: ToSchema>(&mut self) -> ObjectSchema {
        T::schemas(&mut self.schemas);
        match <T as PartialSchema>::schema() {
            RefOr::T(Schema::Object(fields)) => fields,
            _ => unreachable!("the schema of a struct is an object"),
        }
    }

    /// Adds an object with all of these fields, and fields with schemas of their own. Returns a
    /// reference to it.
    pub(in crate::api) fn object(
        &mut self,
        name: &str,
        parts: impl IntoIterator<Item = ObjectSchema>,
        more: impl Iterator<Item = (&'static str, Value)>,
    ) -> Value {
        let mut all = ObjectSchema::with_type(Type::Object);
        for part in parts {
            all.properties.extend(part.properties);
            all.required.extend(part.required);
        }
        let more = more.map(|(field, schema)| (field.to_owned(), embedded(schema)));
        all.properties.extend(more);
        self.named(name, RefOr::T(Schema::Object(all)))
    }

    fn named(&mut self, name: &str, schema: RefOr<Schema>) -> Value {
        self.schemas.push((name.to_owned(), schema));
        json!({ "$ref": format!("{SCHEMAS}{name}") })
    }

    /// Returns the schemas by name. The schemas of fields stand where the document uses them.
    fn json(self) -> Value {
        let raw: BTreeMap<String, Value> = (self.schemas.into_iter())
            .map(|(name, schema)| {
                let schema = serde_json::to_value(schema).expect("all keys are strings");
                (name, schema)
            })
            .collect();
        let is_embedded = |schema: &Value| schema.get(EMBEDDED).is_some();
        let named = raw.iter().filter(|(_, schema)| !is_embedded(schema));
        named
            .map(|(name, schema)| (name.clone(), unfolded(schema, &raw)))
            .collect()
    }
}

/// Returns a schema in which embedded schemas replace the references to them.
fn unfolded(schema: &Value, named: &BTreeMap<String, Value>) -> Value {
    let Value::Object(fields) = schema else {
        return match schema {
            Value::Array(items) => items.iter().map(|item| unfolded(item, named)).collect(),
            other => other.clone(),
        };
    };
    if let Some(embedded) = fields.get(EMBEDDED) {
        return unfolded(embedded, named);
    }
    let name = fields.get("$ref").and_then(Value::as_str);
    let target = name.and_then(|name| named.get(name.strip_prefix(SCHEMAS)?));
    if let Some(embedded) = target.and_then(|target| target.get(EMBEDDED)) {
        return described(unfolded(embedded, named), fields);
    }
    if let Some(Value::Array(items)) = fields.get("oneOf")
        && let [one, other] = items.as_slice()
        && let null = json!({"type": "null"})
        && (*one == null || *other == null)
    {
        let one = if *one == null { other } else { one };
        return described(nullable(unfolded(one, named)), fields);
    }
    let unfolded = |(name, field): (&String, &Value)| (name.clone(), unfolded(field, named));
    fields.iter().map(unfolded).collect()
}

/// Gives a schema the description that stands beside a reference to it.
fn described(mut schema: Value, beside: &Map<String, Value>) -> Value {
    if let Some(description) = beside.get("description") {
        schema["description"] = description.clone();
    }
    schema
}

/// Returns a schema that allows `null` too.
fn nullable(mut schema: Value) -> Value {
    let description = schema
        .as_object_mut()
        .and_then(|fields| fields.remove("description"));
    let mut schema = match (schema.get("type"), schema.get("enum"), schema.get("anyOf")) {
        (Some(Value::String(kind)), None, _) if kind == "null" => schema,
        (Some(Value::String(kind)), None, _) => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        (None, None, Some(Value::Array(kinds))) => {
            let kinds = kinds.iter().cloned().chain([json!({"type": "null"})]);
            json!({ "anyOf": kinds.collect::<Vec<_>>() })
        }
        _ => json!({ "anyOf": [schema, {"type": "null"}] }),
    };
    if let Some(description) = description {
        schema["description"] = description;
    }
    schema
}

/// Returns the document of these routes.
pub(in crate::api) fn document(routes: &[ApiRoute]) -> Value {
    let mut components = Components::default();
    let mut paths: BTreeMap<String, Value> = BTreeMap::new();
    for route in routes {
        let operation = (route.describe)(&mut components);
        let path = route.path.replace("{*", "{");
        let names = path
            .split('{')
            .skip(1)
            .filter_map(|rest| rest.split('}').next());
        let parameters: Vec<Value> = names
            .map(|name| {
                json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
            })
            .collect();
        let operation = operation.json(route.path, &parameters);
        paths.entry(path).or_insert_with(|| json!({}))[route.method] = operation;
    }
    let error = components.schema::<ErrorBody>();
    let responses: Map<String, Value> = (STATUSES.iter())
        .map(|(status, description)| (status.to_string(), response(*status, description, &error)))
        .collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Sterna",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
        },
        "paths": paths,
        "components": {
            "schemas": components.json(),
            "responses": responses,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// Returns the response of an error, with the types and codes of this status.
fn response(status: u16, description: &str, error: &Value) -> Value {
    let (kinds, codes): (BTreeSet<_>, Vec<_>) = classes_of(status).unzip();
    let properties = json!({"type": {"enum": kinds}, "code": {"enum": codes}});
    let of_status = json!({"properties": {"error": {"properties": properties}}});
    let schema = json!({ "allOf": [error, of_status] });
    json!({
        "description": description,
        "content": {"application/json": {"schema": schema}},
        "headers": headers(status),
    })
}

fn headers(status: u16) -> Value {
    let header = |description: &str, kind: &str, required: bool| {
        let schema = json!({"type": kind});
        json!({"description": description, "required": required, "schema": schema})
    };
    let id = "The client's id of the request if it sent one, otherwise a new one.";
    let mut headers = json!({ "x-request-id": header(id, "string", true) });
    if matches!(status, 429 | 503) {
        let after = "Seconds after which the client should retry.";
        headers["retry-after"] = header(after, "integer", false);
        let after = "The same in milliseconds.";
        headers["retry-after-ms"] = header(after, "integer", false);
    }
    headers
}
