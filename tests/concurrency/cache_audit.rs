//! An audit of the prefix cache: what a request tells about the prompts of others.
//!
//! A victim sends a prompt or does not. Then a prober sends the same prompt and measures. If the
//! two distributions differ, by a Kolmogorov-Smirnov test, the prober can tell what the victim
//! sent. It must not for another tenant. For its own tenant it must, or the audit would be blind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hyper::Request;
use serde_json::{Value, json};
use sterna::engine::Limits;
use sterna::model::{LoadOptions, Model};
use sterna_kernels::Kernels;
use sterna_random::Random;

use crate::client::{self, Client};
use crate::effort;
use crate::model::{PageModel, Rule};
use crate::requests::words;
use crate::server::{COMPLETIONS, ModelText, ROOMY, TestServer};

/// The tokens of a prompt.
const PROMPT: u64 = 200;

const VICTIM: usize = 0;
const OTHER: usize = 1;
const NOISE: usize = 2;

/// The probability of an alarm without a difference.
const ALPHA: f64 = 1e-4;

/// Two samples of a measurement: the prober's prompt was sent before, or was not.
#[derive(Default)]
struct Samples {
    sent: Vec<f64>,
    unsent: Vec<f64>,
}

impl Samples {
    fn push(&mut self, was_sent: bool, value: f64) {
        let sample = if was_sent {
            &mut self.sent
        } else {
            &mut self.unsent
        };
        sample.push(value);
    }

    /// Returns the largest distance between the two distribution functions.
    fn distance(&self) -> f64 {
        let share_up_to = |sample: &[f64], limit: f64| {
            let within = sample.iter().filter(|value| **value <= limit).count();
            within as f64 / sample.len() as f64
        };
        let steps = self.sent.iter().chain(&self.unsent);
        steps
            .map(|&at| (share_up_to(&self.sent, at) - share_up_to(&self.unsent, at)).abs())
            .fold(0.0, f64::max)
    }

    /// Returns whether the samples are of different distributions.
    fn differ(&self) -> bool {
        let (n, m) = (self.sent.len() as f64, self.unsent.len() as f64);
        self.distance() > (-(ALPHA / 2.0).ln() / 2.0 * (n + m) / (n * m)).sqrt()
    }
}

fn request(prompt: &[u32]) -> Value {
    json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": true})
}

/// The measurements of one prober.
#[derive(Default)]
struct Audit {
    cached_tokens: Samples,
    computed_tokens: Samples,
}

/// Audits with `samples` probes of each kind. Time is the number of tokens that the model computes
/// until the prober's first token, for other requests too.
async fn audit(
    server: &TestServer,
    computed: &AtomicU64,
    prober: usize,
    samples: u64,
    random: &mut Random,
) -> Audit {
    let mut audit = Audit::default();
    for sample in 0..2 * samples {
        let is_sent = sample % 2 == 0;
        let [secret, another] = [(); 2].map(|()| words(random, PROMPT));
        let sent = if is_sent { &secret } else { &another };
        server.complete(VICTIM, &request(sent)).await;
        let noise = words(random, 60);
        let noise = &noise[..random.between(1, 60) as usize];
        let before = computed.load(Ordering::SeqCst);
        let (probe, noise) = (request(&secret), request(noise));
        let (probe, _) = tokio::join!(
            server.complete(prober, &probe),
            server.complete(NOISE, &noise)
        );
        let work = computed.load(Ordering::SeqCst) - before;
        let cached = &probe["usage"]["prompt_tokens_details"]["cached_tokens"];
        audit.cached_tokens.push(is_sent, cached.as_f64().unwrap());
        audit.computed_tokens.push(is_sent, work as f64);
    }
    audit
}

#[test]
fn the_test_of_distributions_sees_a_difference_and_only_a_difference() {
    let mut random = Random::from_env();
    let mut samples = |shift: f64| {
        let mut samples = Samples::default();
        for sample in 0..500 {
            let is_sent = sample % 2 == 0;
            let shift = if is_sent { shift } else { 0.0 };
            samples.push(is_sent, random.fraction() + shift);
        }
        samples
    };
    assert!(samples(0.4).differ());
    assert!(!samples(0.0).differ());
}

#[tokio::test]
async fn a_prompt_of_another_tenant_leaves_no_trace_in_counts() {
    let samples = effort("STERNA_AUDIT_SAMPLES", 60);
    let mut random = Random::from_env();
    let (model, computed) = PageModel::counting(Rule::Hash);
    let server = TestServer::start(model, ROOMY, 0, 3).await;
    let across = audit(&server, &computed, OTHER, samples, &mut random).await;
    let within = audit(&server, &computed, VICTIM, samples, &mut random).await;
    for (what, across, within) in [
        ("cached tokens", across.cached_tokens, within.cached_tokens),
        (
            "computed tokens",
            across.computed_tokens,
            within.computed_tokens,
        ),
    ] {
        let distances = [across.distance(), within.distance()];
        println!("{what}: distances across and within tenants {distances:?}");
        assert!(!across.differ(), "{what} tell what another tenant sent");
        assert!(within.differ(), "{what} do not show the tenant's own cache");
    }
}

/// Measures the wall-clock time to the first token, so it needs a machine that does nothing else.
/// It runs only if `STERNA_AUDIT_SECONDS` sets the number of samples of each kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_of_another_tenant_leaves_no_trace_in_time() {
    let samples = effort("STERNA_AUDIT_SECONDS", 0);
    if samples == 0 {
        return;
    }
    let mut random = Random::from_env();
    let source = sterna::demo::source();
    let limits = Limits {
        pages: 4096,
        ..ROOMY
    };
    let options = LoadOptions {
        max_step_tokens: limits.max_batch_tokens(),
        max_logits_rows: limits.max_logits(),
        ..LoadOptions::new(Kernels::best(), 1)
    };
    let model = Model::load(&source, options).unwrap();
    let text = ModelText {
        tokenizer: &source.read("tokenizer.json").unwrap().unwrap(),
        vocabulary: model.config().vocab as u32,
        stop_tokens: model.config().eos_tokens.clone(),
    };
    let server = TestServer::of_text(model, &text, limits, 0, 3).await;
    let url = format!("http://{}{COMPLETIONS}", server.listen().await);
    let http = Client::new();
    let time_to_first_token = async |tenant: usize, prompt: &[u32]| {
        let mut body = request(prompt);
        body["stream"] = json!(true);
        let request = Request::post(&url).header("x-api-key", &server.keys[tenant]);
        let body = body.to_string();
        let start = Instant::now();
        let mut response = http.send(request, body).await.unwrap();
        assert!(client::piece(&mut response).await.is_some());
        let first = start.elapsed();
        client::text(response).await;
        first.as_secs_f64()
    };
    for prober in [OTHER, VICTIM] {
        let mut seconds = Samples::default();
        for sample in 0..2 * samples {
            let is_sent = sample % 2 == 0;
            let [secret, another] = [(); 2].map(|()| words(&mut random, PROMPT));
            let sent = if is_sent { &secret } else { &another };
            time_to_first_token(VICTIM, sent).await;
            let first = time_to_first_token(prober, &secret).await;
            seconds.push(is_sent, first);
        }
        println!("prober {prober}: distance {}", seconds.distance());
        assert_eq!(seconds.differ(), prober == VICTIM, "prober {prober}");
    }
}
