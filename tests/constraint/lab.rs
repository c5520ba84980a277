//! An engine over a model with random logits, and the grammars of its tokenizer.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use sterna::constraint::{Grammar, GrammarError, GrammarSource, Grammars, MaskState};
use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, EventStream, FinishReason, Forward,
    GenerationRequest, Limits, LogitRows, Policy, SamplingParams, StreamEvent, TenantId, TokenId,
};
use sterna::metrics::{Identity, Metrics};
use sterna::text::{TextFiles, Tokenizer};
use sterna_random::mix;
use sterna_scheduler::{Batch, PAGE_TOKENS};

const TOKENIZER: &[u8] = include_bytes!("../fixtures/bitnet-packed/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../fixtures/bitnet-packed/tokenizer_config.json");
const VOCABULARY: u32 = 309;
/// The end of a turn.
pub(crate) const END: TokenId = 4;
/// A timeout that only a hanging test reaches.
const GUARD: Duration = Duration::from_secs(300);

/// A model whose pages hold the tokens themselves. Its logits are random numbers that depend on all
/// tokens before.
struct Hashes;

struct HashRows(Vec<u64>);

impl Forward for Hashes {
    type KvStore = Vec<[TokenId; PAGE_TOKENS]>;

    fn vocabulary(&self) -> usize {
        VOCABULARY as usize
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<Self::KvStore> {
        Ok(vec![[TokenId::MAX; PAGE_TOKENS]; limits.pages as usize])
    }

    fn forward(&mut self, batch: &Batch, pages: &mut Self::KvStore) -> impl LogitRows {
        for copy in batch.copies() {
            pages[copy.to.index()] = pages[copy.from.index()];
        }
        let mut hashes = Vec::new();
        for row in batch.rows() {
            let table = batch.pages(row);
            let place = |position: usize| (table[position / PAGE_TOKENS], position % PAGE_TOKENS);
            for (position, &token) in (row.start as usize..).zip(batch.tokens(row)) {
                let (page, slot) = place(position);
                pages[page.index()][slot] = token;
            }
            let mut hash = 0x1234_5678_9ABC_DEF1;
            for position in 0..row.end() {
                let (page, slot) = place(position);
                hash = mix(hash ^ u64::from(pages[page.index()][slot]));
                if position >= row.end() - row.logits as usize {
                    hashes.push(hash);
                }
            }
        }
        HashRows(hashes)
    }
}

impl LogitRows for HashRows {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        for (token, logit) in (0..).zip(logits) {
            *logit = (mix(self.0[row] ^ (token << 32)) >> 40) as f32 / (1 << 21) as f32;
        }
    }
}

pub(crate) struct Lab {
    pub(crate) handle: EngineHandle,
    pub(crate) grammars: Grammars,
    pub(crate) tokenizer: Arc<Tokenizer>,
}

impl Lab {
    /// Starts an engine with this many pages and at most `max_draft` draft tokens.
    pub(crate) fn new(pages: u32, max_draft: u32) -> Lab {
        let config = EngineConfig {
            limits: Limits {
                pages,
                max_running: 16,
                max_queued: 256,
                max_queued_time: u64::MAX,
                step_tokens: 64,
                prefill_chunk: 32,
                max_sequence_tokens: 2048,
                states: None,
                diffusion: None,
            },
            policy: Policy {
                max_draft,
                ..Policy::default()
            },
            public_prefixes: Vec::new(),
            cost: Some(CostModel::UNMEASURED),
            submit_queue: 256,
            drain_limit: GUARD,
            stall_limit: GUARD,
            pin: false,
        };
        let metrics = Metrics::new(&Identity {
            model_name: "hashes".into(),
            isa: "none".into(),
            kv_dtype: "f16".to_owned(),
            kv_pages: pages,
            page_tokens: PAGE_TOKENS as u32,
        });
        let files = TextFiles {
            tokenizer: TOKENIZER,
            config: Some(CONFIG),
            chat_template: None,
            tool_template: None,
        };
        let tokenizer = Arc::new(files.load(VOCABULARY).unwrap().0);
        let grammars = crate::grammars::start(&tokenizer, &[END]);
        let (handle, _engine) = Engine::start(Hashes, config, metrics).unwrap();
        Lab {
            handle,
            grammars,
            tokenizer,
        }
    }

    pub(crate) async fn compile(&self, source: GrammarSource) -> Result<Grammar, GrammarError> {
        self.grammars.compile(0, source).await
    }

    /// Returns whether the grammar allows the tokens of a text, one after the other, and then an
    /// end.
    pub(crate) fn accepts(&self, grammar: &Grammar, text: &str) -> bool {
        let output = grammar.begin(&[END]);
        let mut tokens = self.tokenizer.encode_plain(text).unwrap();
        tokens.push(END);
        (0..).zip(tokens).all(|(place, token)| {
            while !output.is_ready() {
                std::thread::yield_now();
            }
            let mut logits = vec![1.0; VOCABULARY as usize];
            let MaskState::Ready(mask) = output.masks().at(place) else {
                return false;
            };
            mask.apply(&mut logits);
            output.drawn(token);
            logits[token as usize] == 1.0
        })
    }

    /// Returns a request whose prompt and seed depend on `number`.
    pub(crate) fn request(&self, number: u64, grammar: Option<Grammar>) -> GenerationRequest {
        let length = 1 + mix(number) % 40;
        let token = |place: u64| (5 + mix(number ^ (place << 8)) % 300) as TokenId;
        GenerationRequest {
            prompt: (0..length).map(token).collect(),
            sampling: SamplingParams {
                seed: number,
                logprobs: Some(1),
                grammar,
                ..SamplingParams::default()
            },
            max_new_tokens: 1500,
            is_length_given: false,
            min_new_tokens: 0,
            stop_tokens: vec![END],
            tenant: TenantId(0),
            sub_tenant: None,
            band: None,
            arrived: Instant::now(),
            first_token_within: None,
            ends_within: None,
        }
    }

    pub(crate) async fn answer(&self, request: GenerationRequest) -> Answer {
        let stream = self.handle.submit(request).unwrap();
        self.read(stream).await
    }

    pub(crate) async fn read(&self, mut stream: EventStream) -> Answer {
        let mut answer = Answer::default();
        let all = async {
            while let Some(event) = stream.recv().await {
                match event {
                    StreamEvent::Token(output) => {
                        answer.tokens.push(output.token);
                        answer.logprobs.push(output.logprob.unwrap().to_bits());
                    }
                    StreamEvent::Finished { reason, .. } => answer.reason = Some(reason),
                    StreamEvent::DeadEnd(why) => answer.dead_end = Some(why),
                    StreamEvent::Accepted => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        tokio::time::timeout(GUARD, all).await.expect("an end");
        let text = answer.tokens.iter().filter(|token| **token != END);
        let text: Vec<TokenId> = text.copied().collect();
        let bytes = text
            .iter()
            .flat_map(|token| self.tokenizer.token_bytes(*token));
        answer.text = String::from_utf8(bytes.copied().collect()).unwrap_or_default();
        answer
    }
}

/// What a request got.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) logprobs: Vec<u32>,
    pub(crate) text: String,
    pub(crate) reason: Option<FinishReason>,
    pub(crate) dead_end: Option<String>,
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = &self.tokens[..self.tokens.len().min(40)];
        let text: String = self.text.chars().take(200).collect();
        let count = self.tokens.len();
        write!(
            f,
            "{count} tokens {tokens:?} {text:?} {:?} {:?}",
            self.reason, self.dead_end
        )
    }
}
