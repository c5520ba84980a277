//! A server whose model gives the same answer to every prompt, with any tokenizer and template.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::Method;
use serde_json::{Value, json};
use sterna::api::{self, App, ModelCard, SamplingDefaults, Serving};
use sterna::engine::{
    CostModel, Engine, EngineConfig, Forward, LogitRows, Policy, SequenceId, TokenId,
};
use sterna::metrics::{Identity, Metrics};
use sterna::text::{TextFiles, Tokenizer};
use sterna::tools::ToolFormat;
use sterna_scheduler::{Batch, Limits};

use crate::CHAT;
use crate::harness::*;

/// A model that gives the same answer to every prompt, and then ends its turn.
struct Speaker {
    vocabulary: usize,
    answer: Vec<TokenId>,
    prompts: HashMap<SequenceId, usize>, // The length of each prompt.
}

struct Said(Vec<TokenId>);

impl LogitRows for Said {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        logits.fill(0.0);
        logits[self.0[row] as usize] = 12.0;
    }
}

impl Forward for Speaker {
    type KvStore = ();

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn new_kv_store(&self, _: &Limits) -> std::io::Result<()> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch, (): &mut ()) -> impl LogitRows {
        let mut said = Vec::new();
        for row in batch.rows().iter().filter(|row| row.logits > 0) {
            let prompt = *self.prompts.entry(row.sequence).or_insert(row.end());
            let token = self.answer.get(row.end() - prompt);
            said.push(*token.unwrap_or(&END_OF_TURN));
        }
        Said(said)
    }
}

/// Returns the tokenizer of the harness with further added tokens. The first has the id
/// `VOCABULARY`.
pub(crate) fn tokenizer_with(added: &[&str], is_special: bool) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(TOKENIZER).unwrap();
    let tokens = json["added_tokens"].as_array_mut().unwrap();
    tokens.extend((VOCABULARY..).zip(added).map(|(id, content)| {
        json!({
            "id": id, "content": content, "special": is_special,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    }));
    json.to_string().into_bytes()
}

/// Starts a server whose model says the tokens that `answer` returns.
pub(crate) fn start(
    tokenizer: &[u8],
    template: &str,
    vocabulary: u32,
    answer: impl FnOnce(&Tokenizer) -> Vec<TokenId>,
) -> axum::Router {
    start_with_stops(tokenizer, template, vocabulary, vec![END_OF_TURN], answer)
}

/// Starts a server whose model has these stop tokens, and says the tokens that `answer` returns.
pub(crate) fn start_with_stops(
    tokenizer: &[u8],
    template: &str,
    vocabulary: u32,
    stop_tokens: Vec<TokenId>,
    answer: impl FnOnce(&Tokenizer) -> Vec<TokenId>,
) -> axum::Router {
    let files = TextFiles {
        tokenizer,
        config: Some(CONFIG),
        chat_template: Some(template),
        tool_template: None,
    };
    let (tokenizer, chat_template) = files.load(vocabulary).unwrap();
    let model = Speaker {
        vocabulary: vocabulary as usize,
        answer: answer(&tokenizer),
        prompts: HashMap::new(),
    };
    let limits = Server::limits(8);
    let metrics = Metrics::new(&Identity {
        model_name: "speaker".into(),
        isa: "none".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: limits.pages,
        page_tokens: 16,
    });
    let config = EngineConfig {
        limits,
        policy: Policy {
            max_draft: 0,
            ..Policy::default()
        },
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 64,
        drain_limit: PATIENCE,
        stall_limit: PATIENCE,
        pin: false,
    };
    let (engine, _threads) = Engine::start(model, config, metrics.clone()).unwrap();
    let app = App::loading();
    let tokenizer = Arc::new(tokenizer);
    app.serve(Serving {
        tool_format: ToolFormat::find(chat_template.as_ref(), &tokenizer),
        model: ModelCard {
            name: "speaker".into(),
            aliases: Vec::new(),
            max_model_len: MAX_MODEL_LEN,
            vocabulary,
            stop_tokens,
            ..ModelCard::default()
        },
        grammars: grammars::start(&tokenizer, &[END_OF_TURN]),
        tokenizer,
        chat_template,
        defaults: SamplingDefaults::default(),
        engine,
        metrics,
    });
    api::router(app)
}

pub(crate) async fn post(router: &axum::Router, path: &str, body: &Value) -> Answer {
    let headers = [("content-type", "application/json")];
    let answer = send(router, Method::POST, path, &headers, body.to_string()).await;
    if answer.status == 200 {
        let path = path.split('?').next().unwrap_or(path);
        let fault = Document::get().await.fault_of_request(path, body);
        assert_eq!(fault, None, "answered, but not as documented: {body}");
    }
    answer
}

pub(crate) async fn chat(router: &axum::Router, more: Value) -> Answer {
    let messages = json!([{"role": "user", "content": "Why?"}]);
    let body = json!({"messages": messages, "temperature": 0});
    post(router, CHAT, &merged(body, more)).await
}
