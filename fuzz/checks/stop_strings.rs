//! Turns tokens into text, one by one. The bytes before the first zero byte are stop strings, one a
//! line and at most as many as a request may have. Two bytes each of the rest are a token.

use std::sync::{Arc, LazyLock};

use sterna::text::{Detokenizer, TextFiles, TextOptions, Tokenizer};

use crate::harness::{CONFIG, TOKENIZER, VOCABULARY};

const MAX_STOPS: usize = 4;

static LOADED: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let files = TextFiles {
        tokenizer: TOKENIZER,
        config: Some(CONFIG),
        chat_template: None,
        tool_template: None,
    };
    Arc::new(files.load(VOCABULARY).expect("a valid tokenizer").0)
});

/// Checks that the deltas are the text of all tokens, up to the first stop string.
pub fn check(data: &[u8]) {
    let end = data
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(data.len());
    let stop = String::from_utf8_lossy(&data[..end]).into_owned();
    let stop: Vec<String> = stop
        .lines()
        .filter(|line| !line.is_empty())
        .take(MAX_STOPS)
        .map(Into::into)
        .collect();
    let tokens = data.get(end + 1..).unwrap_or_default().chunks_exact(2);
    let tokens: Vec<u32> = tokens
        .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) % VOCABULARY)
        .collect();
    let bytes = tokens.iter().flat_map(|token| LOADED.token_bytes(*token));
    let whole = String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned();
    let found = stop.iter().filter_map(|stop| {
        let start = whole.find(stop.as_str())?;
        Some((start + stop.len(), start))
    });
    let (text, stops) = deltas(&tokens, &stop);
    match found.min() {
        Some((_, start)) => assert_eq!((text.as_str(), stops), (&whole[..start], true)),
        None => assert_eq!((text, stops), (whole, false)),
    }
}

/// Returns all deltas together, and whether a stop string ended them.
fn deltas(tokens: &[u32], stop: &[String]) -> (String, bool) {
    let options = TextOptions {
        stop: stop.to_vec(),
        include_stop: false,
        skip_special_tokens: false,
        min_tokens: 0,
    };
    let mut detokenizer = Detokenizer::new(Arc::clone(&LOADED), options);
    let mut text = String::new();
    for token in tokens {
        let delta = detokenizer.push(*token);
        text += &delta.text;
        if delta.stopped {
            return (text, true);
        }
    }
    let delta = detokenizer.finish();
    (text + &delta.text, delta.stopped)
}
