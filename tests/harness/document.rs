//! Checks answers against the OpenAPI document that the server itself serves.

use std::collections::HashMap;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request};
use jsonschema::Validator;
use serde_json::{Value, json};
use sterna::api::{self, App};
use tokio::sync::OnceCell;
use tower::ServiceExt;

use super::Answer;

static DOCUMENT: OnceCell<Document> = OnceCell::const_new();

/// The statuses of a path or method that the document does not have.
const UNKNOWN: [u16; 5] = [400, 401, 403, 404, 405];

pub(crate) struct Document {
    pub(crate) json: Value,
    /// By path, method, status and content type. Their objects may have no other fields.
    answers: HashMap<(String, String, u16, String), Validator>,
    /// By path.
    requests: HashMap<String, Validator>,
    error: Validator,
}

impl Document {
    pub(crate) async fn get() -> &'static Document {
        DOCUMENT.get_or_init(Document::fetch).await
    }

    async fn fetch() -> Document {
        let request = Request::get("/openapi.json").body(Body::empty()).unwrap();
        let response = api::router(App::loading()).oneshot(request).await.unwrap();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let json: Value = serde_json::from_slice(&body).unwrap();
        let mut closed = json["components"].clone();
        close(&mut closed["schemas"]);
        let strict = |schema: &Value| validator(schema, &closed);
        let mut answers = HashMap::new();
        let mut requests = HashMap::new();
        for (path, methods) in json["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                for (status, response) in operation["responses"].as_object().unwrap() {
                    let response = match response["$ref"].as_str() {
                        Some(name) => json.pointer(&name[1..]).unwrap(),
                        None => response,
                    };
                    let contents = response["content"].as_object();
                    for (kind, content) in contents.into_iter().flatten() {
                        let status = status.parse().unwrap();
                        let key = (path.clone(), method.to_uppercase(), status, kind.clone());
                        let schema = &content["schema"];
                        let of_event = &schema["properties"]["data"]["contentSchema"];
                        let is_stream = kind == "text/event-stream";
                        answers.insert(key, strict(if is_stream { of_event } else { schema }));
                    }
                }
                let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
                if schema.is_object() {
                    requests.insert(path.clone(), validator(schema, &json["components"]));
                }
            }
        }
        let error = strict(&json!({"$ref": "#/components/schemas/ErrorBody"}));
        Document {
            json,
            answers,
            requests,
            error,
        }
    }

    /// Checks that the document has the answer to a request.
    pub(crate) fn check(&self, method: &Method, uri: &str, answer: &Answer) {
        let path = uri.split('?').next().unwrap();
        let path = match path {
            path if path.starts_with("/v1/models/") => "/v1/models/{id}",
            path if path.starts_with("/v1/requests/") => "/v1/requests/{id}",
            path if path.starts_with("/page/") => "/page/{file}",
            path => path,
        };
        let shown = format!("{method} {uri}: {} {:.300}", answer.status, answer.body);
        assert!(answer.headers.contains_key("x-request-id"), "{shown}");
        let status = answer.status.as_u16();
        let name = method.as_str().to_lowercase();
        if self.json["paths"][path][&name].is_null() {
            let is_preflight = *method == Method::OPTIONS && status == 204;
            assert!(is_preflight || UNKNOWN.contains(&status), "{shown}");
            return;
        }
        if status == 304 {
            let documented = &self.json["paths"][path][&name]["responses"]["304"];
            assert!(documented.is_object() && answer.body.is_empty(), "{shown}");
            return;
        }
        let kind = answer.header("content-type").split(';').next().unwrap();
        let key = (path.to_owned(), method.to_string(), status, kind.to_owned());
        let Some(validator) = self.answers.get(&key) else {
            panic!("the document lacks {key:?}: {shown}");
        };
        match kind {
            "application/json" => valid(validator, &answer.body, &shown),
            "text/event-stream" => {
                let frames = answer.body.split("\n\n");
                let lines = frames.flat_map(str::lines);
                for data in lines.filter_map(|line| line.strip_prefix("data: ")) {
                    match data {
                        "[DONE]" => {}
                        data if data.starts_with("{\"error\"") => valid(&self.error, data, &shown),
                        data => valid(validator, data, &shown),
                    }
                }
            }
            _ => {}
        }
    }

    /// Returns why a body is no valid request to a path, if it is none.
    pub(crate) fn fault_of_request(&self, path: &str, body: &Value) -> Option<String> {
        let error = self.requests[path].validate(body).err()?;
        Some(format!("{}: {error}", error.instance_path()))
    }
}

fn validator(schema: &Value, components: &Value) -> Validator {
    let schema = json!({"allOf": [schema], "components": components});
    jsonschema::draft202012::new(&schema).unwrap()
}

fn valid(validator: &Validator, text: &str, shown: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("no JSON: {shown}"));
    if let Err(error) = validator.validate(&value) {
        panic!(
            "not as documented: {}: {error}: {shown}",
            error.instance_path()
        );
    }
}

/// Forbids fields that an object does not list.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(close);
            if fields.get("type").is_some_and(is_object)
                && fields.contains_key("properties")
                && !fields.contains_key("additionalProperties")
            {
                fields.insert("additionalProperties".to_owned(), json!(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

fn is_object(kind: &Value) -> bool {
    kind == "object"
}
