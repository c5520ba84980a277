//! Tests of the checkpoint's files: malformed headers, indices and shards.

use sterna_random::Random;

use super::safetensors::MAX_HEADER_BYTES;
use super::tensor::MAX_TENSORS;
use super::*;

/// Returns a copy of a file in which one to four bytes are random.
pub(super) fn randomly_changed(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + random.index(4) {
        let at = random.index(bytes.len());
        bytes[at] = random.below(256) as u8;
    }
    bytes
}

/// Returns a safetensors file with the given header and `data` zero bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn one(name: &str) -> Vec<u8> {
    file(
        &format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#),
        4,
    )
}

fn names(files: &[(&str, Vec<u8>)]) -> Result<Vec<String>, LoadError> {
    let files = files.iter();
    let source = Source::in_memory(files.map(|(name, bytes)| ((*name).to_owned(), bytes.clone())));
    let files = TensorFiles::open(&source)?;
    let tensors = files.tensors()?.into_list();
    Ok(tensors.into_iter().map(|(name, _)| name).collect())
}

fn check_refused(files: &[(&str, Vec<u8>)], named: &str) {
    let error = names(files).expect_err(named).to_string();
    assert!(error.contains(named), "{error}");
}

/// Files in `/proc` report a length of 0, whatever they hold.
#[cfg(target_os = "linux")]
#[test]
fn a_file_longer_than_its_reported_length_is_an_error() {
    let error = Source::directory("/proc").read("version").unwrap_err();
    assert!(error.to_string().contains("/proc/version"), "{error}");
}

fn index(map: &str) -> Vec<u8> {
    format!(r#"{{"weight_map":{map}}}"#).into_bytes()
}

#[test]
fn single_and_sharded_files_list_their_tensors() {
    assert_eq!(names(&[("model.safetensors", one("a"))]).unwrap(), ["a"]);
    let map = index(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    let shards = [
        ("model.safetensors.index.json", map),
        ("one.safetensors", one("a")),
        ("two.safetensors", one("b")),
    ];
    assert_eq!(names(&shards).unwrap(), ["a", "b"]);
}

#[test]
fn malformed_files_are_refused_by_name() {
    check_refused(&[], "model.safetensors");
    check_refused(&[("model.safetensors", vec![1, 2, 3])], "model.safetensors");
    check_refused(
        &[("model.safetensors", u64::MAX.to_le_bytes().to_vec())],
        "model.safetensors",
    );
    let mut cut = one("a");
    cut.pop();
    check_refused(&[("model.safetensors", cut)], "model.safetensors");
    let entry = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let twice = file(&format!("{{{entry},{entry}}}"), 1);
    check_refused(&[("model.safetensors", twice)], "tensor a");
}

#[test]
fn a_pointer_of_git_lfs_is_called_so() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    check_refused(&[("model.safetensors", pointer.to_vec())], "git lfs pull");
}

#[test]
fn an_oversized_header_is_refused_before_it_is_parsed() {
    let mut long = one("a");
    long[..8].copy_from_slice(&(MAX_HEADER_BYTES as u64 + 1).to_le_bytes());
    check_refused(&[("model.safetensors", long)], "too long");
    let entries = |count: usize| {
        let entry = |i| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#);
        let entries: Vec<String> = (0..count).map(entry).collect();
        let header = format!(r#"{{"__metadata__":{{}},{}}}"#, entries.join(","));
        [("model.safetensors", file(&header, 0))]
    };
    check_refused(&entries(MAX_TENSORS + 1), "more than 65536 tensors");
    assert_eq!(names(&entries(MAX_TENSORS)).unwrap().len(), MAX_TENSORS);
}

#[test]
fn an_index_at_odds_with_its_shards_is_refused() {
    let with = |map: &str, shards: &[(&'static str, Vec<u8>)]| {
        let mut files = vec![("model.safetensors.index.json", index(map))];
        files.extend_from_slice(shards);
        files
    };
    check_refused(&with(r#"{"a":"one.safetensors"}"#, &[]), "one.safetensors");
    check_refused(
        &with(r#"{"a":"../one.safetensors"}"#, &[]),
        "../one.safetensors",
    );
    check_refused(
        &with(r#"{"a":"/one.safetensors"}"#, &[]),
        "/one.safetensors",
    );
    check_refused(&with(r#"{"b":"one"}"#, &[("one", one("a"))]), "tensor b");
    check_refused(
        &with(
            r#"{"a":"one","b":"two"}"#,
            &[("one", one("a")), ("two", one("a"))],
        ),
        "tensor a",
    );
}

#[test]
fn only_regular_files_are_read() {
    let error = Source::directory("/dev")
        .read("null")
        .expect_err("a device")
        .to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn a_tensor_that_the_loader_does_not_take_is_an_error() {
    let finish = |name: &str| {
        let source = Source::in_memory([("model.safetensors".to_owned(), one(name))]);
        TensorFiles::open(&source)
            .unwrap()
            .tensors()
            .unwrap()
            .finish()
    };
    let error = finish("x.extra").expect_err("unknown").to_string();
    assert!(error.contains("x.extra"), "{error}");
    assert!(finish("model.layers.0.self_attn.rotary_emb.inv_freq").is_ok());
}
