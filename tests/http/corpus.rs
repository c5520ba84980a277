//! The short form of the fuzz targets: the committed corpus, and random changes of it.
//!
//! `fuzz/README.md` describes the long form.

use std::env;
use std::fs;
use std::path::Path;

use sterna_random::Random;

#[expect(
    unreachable_pub,
    reason = "the fuzz targets use these functions from another crate"
)]
#[path = "../../fuzz/checks/mod.rs"]
mod checks;

/// What random changes insert.
const INSERTED: [&[u8]; 20] = [
    b"\0",
    b"\xFF",
    b"\"",
    b"{",
    b"[",
    b"]}",
    b",",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"null",
    b"\\u0000",
    b"\r\n",
    b"\r\n\r\n",
    b"{{",
    b"}}",
    b"</s>",
    b"<|im_start|>",
    b"%s",
    b"\xF0\x9F\x91\xA9",
];

/// Checks the corpus of a target, and `count` changes of its files, or `STERNA_FUZZ_TIMES` times as
/// many.
fn replay(target: &str, check: fn(&[u8]), count: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut paths: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    paths.sort();
    let corpus: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    corpus.iter().for_each(|data| check(data));
    let mut random = Random::from_env();
    let times = env::var("STERNA_FUZZ_TIMES");
    let times = times.map_or(1, |times| times.parse().unwrap());
    for _ in 0..count * times {
        check(&changed(&corpus, &mut random));
    }
}

/// Returns a file of the corpus with a few random changes.
fn changed(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut data = corpus[random.index(corpus.len())].clone();
    for _ in 0..=random.index(4) {
        let start = random.index(data.len() + 1);
        let end = (start + random.index(16)).min(data.len());
        match random.index(5) {
            0 => drop(data.drain(start..end)),
            1 => drop(data.splice(start..start, random.pick(&INSERTED).iter().copied())),
            2 => drop(data.splice(start..end, random.pick(&INSERTED).iter().copied())),
            3 => {
                let other = &corpus[random.index(corpus.len())];
                let from = random.index(other.len() + 1);
                let to = (from + random.index(64)).min(other.len());
                drop(data.splice(start..start, other[from..to].iter().copied()));
            }
            _ => {
                if let Some(byte) = data.get_mut(start) {
                    *byte ^= 1 << random.index(8);
                }
            }
        }
    }
    data
}

#[test]
fn requests_get_an_answer_or_a_clients_error() {
    replay("requests", checks::requests::check, 300);
}

#[test]
fn http_bytes_get_http_or_nothing() {
    replay("http", checks::http::check, 200);
}

#[test]
fn grammars_end_only_their_own_answers() {
    replay("grammars", checks::grammars::check, 60);
}

#[test]
fn texts_become_no_control_tokens() {
    replay("tokenizer_text", checks::tokenizer_text::check, 2000);
}

#[test]
fn templates_end() {
    replay("template", checks::template::check, 300);
}

#[test]
fn stop_strings_do_not_depend_on_the_tokens() {
    replay("stop_strings", checks::stop_strings::check, 2000);
}

#[test]
fn tensor_files_load_or_are_refused() {
    replay("safetensors", checks::safetensors::check, 100);
}

#[test]
fn gguf_files_load_or_are_refused() {
    replay("gguf", checks::gguf::check, 300);
}

#[test]
fn bin_files_load_or_are_refused() {
    replay("bin", checks::bin::check, 1000);
}

#[test]
fn tokenizer_files_load_or_are_refused() {
    replay("tokenizer_json", checks::tokenizer_json::check, 100);
}

#[test]
fn configurations_are_read_or_refused() {
    replay("config_json", checks::config_json::check, 2000);
}

#[test]
fn tenants_files_are_read_or_refused() {
    replay("tenants", checks::tenants::check, 300);
}
