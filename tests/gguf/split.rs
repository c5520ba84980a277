//! A checkpoint in several GGUF files, as llama.cpp's `gguf-split` makes them, is the same model as
//! the whole file.
//!
//! The test cuts whole files. It shares nothing with Sterna's reader.

use std::fs;
use std::ops::Range;
use std::path::Path;

use sterna::checkpoint::{ModelConfig, Source};

use crate::checkpoint_text::text_of;
use crate::checkpoints::{computed_bits, fixture};
use crate::{TEXTS, alone};

const ALIGNMENT: usize = 32;

/// A whole file: the places of its metadata and of its tensors.
struct Whole<'a> {
    bytes: &'a [u8],
    keys: u64,
    metadata: Range<usize>,
    tensors: Vec<TensorOfFile>,
}

struct TensorOfFile {
    /// The entry in the header, without the offset at its end.
    entry: Range<usize>,
    data: Range<usize>,
}

impl<'a> Whole<'a> {
    fn read(bytes: &'a [u8]) -> Whole<'a> {
        let [tensors, keys] = [8, 16].map(|at| number(bytes, at, 8));
        let mut at = 24;
        for _ in 0..keys {
            at = text_end(bytes, at);
            at = value_end(bytes, at + 4, number(bytes, at, 4));
        }
        let metadata = 24..at;
        let mut entries = Vec::new();
        for _ in 0..tensors {
            let start = at;
            at = text_end(bytes, at);
            at += 4 + 8 * size(number(bytes, at, 4)) + 4;
            entries.push((start..at, size(number(bytes, at, 8))));
            at += 8;
        }
        let data = at.next_multiple_of(ALIGNMENT);
        let mut ends: Vec<usize> = entries.iter().map(|(_, offset)| *offset).collect();
        ends.push(bytes.len() - data);
        ends.sort_unstable();
        let end_after = |offset| ends[ends.partition_point(|end| *end <= offset)];
        let tensors = entries.into_iter().map(|(entry, offset)| TensorOfFile {
            entry,
            data: data + offset..data + end_after(offset),
        });
        Whole {
            bytes,
            keys,
            metadata,
            tensors: tensors.collect(),
        }
    }

    /// Returns part `index` of `count`, with these tensors. Only the first part has the metadata.
    fn part(&self, index: usize, count: usize, tensors: &[TensorOfFile]) -> Vec<u8> {
        let mut metadata = Vec::new();
        let mut keys = 3;
        if index == 0 {
            metadata.extend(&self.bytes[self.metadata.clone()]);
            keys += self.keys;
        }
        for (key, kind, value) in [
            ("split.no", 2_u32, &(index as u16).to_le_bytes()[..]),
            ("split.count", 2, &(count as u16).to_le_bytes()),
            (
                "split.tensors.count",
                5,
                &(self.tensors.len() as i32).to_le_bytes(),
            ),
        ] {
            metadata.extend((key.len() as u64).to_le_bytes());
            metadata.extend(key.as_bytes());
            metadata.extend(kind.to_le_bytes());
            metadata.extend(value);
        }
        let counts = [tensors.len() as u64, keys].map(u64::to_le_bytes);
        let mut part = [
            b"GGUF",
            &3_u32.to_le_bytes()[..],
            &counts.concat(),
            &metadata,
        ]
        .concat();
        let mut data: Vec<u8> = Vec::new();
        for tensor in tensors {
            part.extend(&self.bytes[tensor.entry.clone()]);
            part.extend((data.len() as u64).to_le_bytes());
            data.extend(&self.bytes[tensor.data.clone()]);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        part.resize(part.len().next_multiple_of(ALIGNMENT), 0);
        part.extend(data);
        part
    }

    /// Returns the files of a checkpoint in `count` parts, by name.
    fn split(&self, count: usize) -> Vec<(String, Vec<u8>)> {
        let start = |index: usize| index * self.tensors.len() / count;
        let part = |index: usize| {
            let name = format!("model-{:05}-of-{count:05}.gguf", index + 1);
            let tensors = &self.tensors[start(index)..start(index + 1)];
            (name, self.part(index, count, tensors))
        };
        (0..count).map(part).collect()
    }
}

pub(crate) fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let mut number = [0; 8];
    number[..length].copy_from_slice(&bytes[at..at + length]);
    u64::from_le_bytes(number)
}

pub(crate) fn size(number: u64) -> usize {
    number.try_into().unwrap()
}

/// Returns where the text at `at` ends.
pub(crate) fn text_end(bytes: &[u8], at: usize) -> usize {
    at + 8 + size(number(bytes, at, 8))
}

/// Returns where the value at `at` ends. `kind` is a type number of the GGUF specification.
pub(crate) fn value_end(bytes: &[u8], at: usize, kind: u64) -> usize {
    match kind {
        0 | 1 | 7 => at + 1,
        2 | 3 => at + 2,
        4..=6 => at + 4,
        10..=12 => at + 8,
        8 => text_end(bytes, at),
        9 => {
            let (of_items, items) = (number(bytes, at, 4), number(bytes, at + 4, 8));
            (0..items).fold(at + 12, |at, _| value_end(bytes, at, of_items))
        }
        _ => panic!("type {kind}"),
    }
}

fn first_of(parts: Vec<(String, Vec<u8>)>) -> Result<Source, String> {
    let first = parts[0].0.clone();
    let source = Source::in_memory(parts).with_gguf(&first);
    source.map_err(|error| error.to_string())
}

#[test]
fn parts_compute_the_bits_of_the_whole_file() {
    for path in [
        "llama-blocks/llama-blocks-iq2_bn.gguf",
        "qwen3-group64-yarn/qwen3-group64-yarn-q2_0.gguf",
    ] {
        let path = fixture(path);
        let bytes = fs::read(&path).unwrap();
        let whole = alone(&path);
        let expected = computed_bits(&whole);
        let config = ModelConfig::read(&whole).unwrap();
        let (tokenizer, _) = text_of(&whole);
        for count in [2, 5] {
            let parts = first_of(Whole::read(&bytes).split(count)).unwrap();
            let name = format!("{} in {count} parts", path.display());
            assert!(computed_bits(&parts) == expected, "{name}");
            assert_eq!(ModelConfig::read(&parts).unwrap(), config, "{name}");
            let (of_parts, _) = text_of(&parts);
            for text in TEXTS {
                let tokens = of_parts.encode_prompt(text).unwrap();
                assert_eq!(tokens, tokenizer.encode_prompt(text).unwrap(), "{name}");
            }
        }
    }
}

#[test]
fn parts_in_a_directory_are_one_model() {
    let bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf-split");
    drop(fs::remove_dir_all(&folder)); // An earlier run that failed left it.
    fs::create_dir_all(&folder).unwrap();
    let parts = Whole::read(&bytes).split(3);
    for (name, bytes) in &parts {
        fs::write(folder.join(name), bytes).unwrap();
    }
    let source = Source::open(&folder.join(&parts[0].0)).unwrap();
    assert!(computed_bits(&source) == computed_bits(&first_of(parts).unwrap()));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
    let whole = Whole::read(&bytes);
    let mut swapped = whole.split(3);
    let second = std::mem::take(&mut swapped[1].1);
    swapped[1].1 = std::mem::replace(&mut swapped[2].1, second);
    let error = first_of(swapped).unwrap_err();
    assert!(error.contains("\"split.no\": must be 1"), "{error}");

    let mut of_other = whole.split(3);
    of_other[2].1 = whole.split(2)[1].1.clone();
    let error = first_of(of_other).unwrap_err();
    assert!(
        error.contains("\"split.count\": there are 3 files; got 2"),
        "{error}"
    );

    let mut twice = whole.split(2);
    twice[1].1 = whole.part(1, 2, &whole.tensors);
    let error = first_of(twice).and_then(|source| {
        let model = crate::checkpoints::load(&source);
        model.map(drop)
    });
    assert!(error.unwrap_err().contains("the name occurs twice"));

    let mut missing = whole.split(2);
    missing[1].1 = whole.part(1, 2, &[]);
    let error = first_of(missing).and_then(|source| {
        let model = crate::checkpoints::load(&source);
        model.map(drop)
    });
    assert!(error.unwrap_err().contains("missing"));
}
