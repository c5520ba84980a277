//! A stream says the same as a whole answer: random tokens, parts of characters among them, and
//! stop strings that begin and end anywhere.

use serde_json::{Value, json};
use sterna_random::Random;

use crate::effort;
use crate::model::{PageModel, Rule};
use crate::requests::{Said, streaming, with, words};
use crate::server::{ROOMY, TestServer};

/// Returns a random part of `text`, up to eight characters long.
fn part(text: &str, random: &mut Random) -> Option<String> {
    let chars: Vec<char> = text.chars().collect();
    if chars.is_empty() {
        return None;
    }
    let start = random.index(chars.len());
    let end = chars.len().min(start + random.between(1, 8) as usize);
    Some(chars[start..end].iter().collect())
}

fn request(random: &mut Random) -> Value {
    let count = random.between(1, 12);
    json!({
        "prompt": words(random, count),
        "max_tokens": random.between(1, 30),
        "temperature": 1,
        "seed": random.below(1 << 30),
        "ignore_eos": random.percent(50),
        "skip_special_tokens": random.percent(50),
        "include_stop_str_in_output": random.percent(30),
        "return_token_ids": true,
    })
}

#[tokio::test]
async fn a_stream_says_the_same_as_the_whole_answer() {
    let count = effort("STERNA_STREAMS", 1000);
    let mut random = Random::from_env();
    let server = TestServer::start(PageModel::new(Rule::Hash), ROOMY, 0, 1).await;
    let (mut stopped, mut broken) = (0, 0);
    for _ in 0..count {
        let plain = request(&mut random);
        let full = Said::whole(&server.complete(0, &plain).await);
        broken += u64::from(full.text.contains('\u{FFFD}'));
        let wanted = random.between(0, 4);
        let stops: Vec<_> = (0..wanted)
            .filter_map(|_| part(&full.text, &mut random))
            .collect();
        let body = with(&plain, json!({"stop": stops}));
        let whole = Said::whole(&server.complete(0, &body).await);
        let streamed = Said::streamed(&server.ask(0, &streaming(&body)).await);
        assert_eq!(streamed, whole, "{body}");
        assert!(
            full.text.starts_with(&whole.text),
            "{body}: {whole:?} of {full:?}"
        );
        assert!(full.tokens.starts_with(&whole.tokens), "{body}");
        let contains = |stop: &String| whole.text.contains(stop.as_str());
        let keeps = plain["include_stop_str_in_output"] == true;
        assert!(keeps || !stops.iter().any(contains), "{body}: {whole:?}");
        stopped += u64::from(!stops.is_empty() && whole.text.len() < full.text.len());
    }
    println!("{count} streams, {stopped} ended by a stop string, {broken} with broken characters");
    assert!(stopped > count / 4 && broken > count / 10);
}
