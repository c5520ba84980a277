//! Measures how long texts that are hard for tokenizers take to encode, and whether the time grows
//! with the length or faster.
//!
//! `cargo bench --bench tokenizer` prints, for each kind of tokenizer and each family of texts, the
//! time of 1 MiB, and the ratio of this time to the time of half as much text. It exits with 1 if a
//! figure is beyond its limit.
//! Without `--bench`, as in `cargo test --benches`, or with `--test`, everything runs once with
//! short texts and prints nothing, since the times would mean nothing.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::text::{TextFiles, Tokenizer};
use sterna_random::Random;

const DEMO: &[u8] = include_bytes!("../src/demo/tokenizer.json");
/// Tokenizers of other kinds, with small vocabularies.
const SMALL: [(&str, &[u8]); 5] = [
    (
        "Unigram",
        include_bytes!("../fuzz/corpus/tokenizer_json/unigram.json"),
    ),
    (
        "WordPiece",
        include_bytes!("../fuzz/corpus/tokenizer_json/word_piece.json"),
    ),
    (
        "WordLevel",
        include_bytes!("../fuzz/corpus/tokenizer_json/word_level.json"),
    ),
    (
        "BPE, NFKC",
        include_bytes!("../fuzz/corpus/tokenizer_json/bpe_with_merges.json"),
    ),
    (
        "BPE, no merges",
        include_bytes!("../fuzz/corpus/tokenizer_json/bpe_that_ignores_merges.json"),
    ),
];

const VOCABULARY: u32 = 4096;
const BYTES: usize = 1 << 20;
const REPETITIONS: usize = 3;
const MAX_TIME: Duration = Duration::from_millis(250);
const MAX_RATIO: f64 = 2.3;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = given("--test") || !given("--bench");
    let (bytes, repetitions) = if smoke {
        (1 << 10, 1)
    } else {
        (BYTES, REPETITIONS)
    };
    let mut missed = 0;
    for (kind, tokenizer) in tokenizers() {
        for (family, text) in families(bytes) {
            let half = prefix(&text, bytes / 2);
            let result = fastest(&tokenizer, half, repetitions)
                .and_then(|half| Ok((half, fastest(&tokenizer, &text, repetitions)?)));
            if smoke {
                continue;
            }
            let (figure, is_within) = match result {
                Ok((half, whole)) => {
                    let ratio = whole.as_secs_f64() / half.as_secs_f64();
                    let milliseconds = whole.as_secs_f64() * 1e3;
                    (
                        format!("{milliseconds:>9.1} ms{ratio:>7.2}"),
                        whole <= MAX_TIME && ratio <= MAX_RATIO,
                    )
                }
                Err(error) => (format!(" refused: {error}"), true),
            };
            missed += usize::from(!is_within);
            let verdict = if is_within { "" } else { "  missed" };
            println!("{kind:<24}{family:<24}{figure}{verdict}");
        }
    }
    if !smoke {
        println!("limits: {MAX_TIME:?}, ratio {MAX_RATIO}; {missed} missed");
    }
    ExitCode::from(u8::from(missed > 0))
}

fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let load = |(kind, json): (&'static str, &[u8])| {
        let files = TextFiles {
            tokenizer: json,
            config: None,
            chat_template: None,
            tool_template: None,
        };
        let loaded = files.load(VOCABULARY);
        (kind, loaded.expect("the tokenizer is valid").0)
    };
    let whole = whole_text_bpe();
    let large = [
        ("byte-level BPE", DEMO),
        ("BPE over the whole text", &whole),
    ];
    large.into_iter().chain(SMALL).map(load).collect()
}

/// Returns the tokenizer of the demo without its pre-tokenizer. So the merges run over the whole
/// text, as in tokenizers of SentencePiece.
fn whole_text_bpe() -> Vec<u8> {
    let mut tokenizer: Value = serde_json::from_slice(DEMO).expect("the file is JSON");
    tokenizer["pre_tokenizer"] = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    tokenizer.to_string().into_bytes()
}

/// Returns texts of about `bytes` bytes.
fn families(bytes: usize) -> Vec<(&'static str, String)> {
    let repeated = |piece: &str| prefix(&piece.repeat(bytes / piece.len() + 1), bytes).to_owned();
    let mut random = Random::new(19);
    let mut letters = |between: &str| {
        let letter = |random: &mut Random| char::from(b'a' + random.below(26) as u8);
        let mut text = String::with_capacity(bytes);
        while text.len() < bytes {
            (0..1 + random.index(9)).for_each(|_| text.push(letter(&mut random)));
            text += between;
        }
        prefix(&text, bytes).to_owned()
    };
    vec![
        ("words", letters(" ")),
        ("one long word", letters("")),
        ("one letter", repeated("a")),
        ("spaces", repeated(" ")),
        ("spaces and a letter", repeated(" ") + "a"),
        ("line breaks", repeated("\n")),
        ("spaces, line breaks", repeated(" \n\t\r")),
        ("digits", repeated("1234567890")),
        ("punctuation", repeated("!")),
        ("apostrophes", repeated("'s'll")),
        ("Chinese", repeated("你好世界")),
        ("joined emoji", repeated("👩\u{200d}👧")),
        ("combining marks", repeated("\u{301}\u{323}")),
        ("ligatures", repeated("\u{fdfa}")),
        ("control tokens", repeated("</s>")),
        ("broken control tokens", repeated("<|im_start")),
    ]
}

/// Returns the longest part of at most `bytes` bytes from the start.
fn prefix(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

fn fastest(tokenizer: &Tokenizer, text: &str, repetitions: usize) -> Result<Duration, String> {
    let mut fastest = Duration::MAX;
    for _ in 0..repetitions {
        let began = Instant::now();
        let tokens = tokenizer.encode_prompt(text);
        fastest = fastest.min(began.elapsed());
        drop(tokens.map_err(|error| error.to_string())?);
    }
    Ok(fastest)
}
