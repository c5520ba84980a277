//! Tests of reading GGUF files. `tests/gguf/write.py` wrote the fixtures.

use std::collections::BTreeMap;

use sterna_random::Random;

use super::*;
use crate::checkpoint::Source;
use crate::checkpoint::blocks::ScaleSpan;
use crate::checkpoint::tests::randomly_changed;

const ROWS: usize = 32;
const COLUMNS: usize = 256;
const SCALE: f32 = 0.375;

/// The fixtures: their names, type numbers and layouts.
const FIXTURES: [(&str, u32, BlockLayout, &[u8]); 11] = {
    macro_rules! fixture {
        ($name:literal, $number:literal, $layout:expr) => {
            (
                $name,
                $number,
                $layout,
                include_bytes!(concat!("../../../tests/gguf/fixtures/", $name, ".gguf")),
            )
        };
    }
    [
        fixture!("i2_s", 36, BlockLayout::I2s(I2sOrder::X86)),
        fixture!("i2_s_arm", 36, BlockLayout::I2s(I2sOrder::Arm)),
        fixture!("i2_s_four_rows", 36, BlockLayout::I2s(I2sOrder::FourRows)),
        fixture!("tq1_0", 34, BlockLayout::Tq1),
        fixture!("tq2_0", 35, BlockLayout::Tq2),
        fixture!("q1_0", 41, BlockLayout::Q1),
        fixture!("q2_0", 42, BlockLayout::Q2Group64),
        fixture!("q2_0_legacy", 42, BlockLayout::Q2Group128),
        fixture!("pq2_0", 142, BlockLayout::Q2Group128),
        fixture!("ptq1_0", 143, BlockLayout::Ptq1),
        fixture!("iq2_bn", 135, BlockLayout::Iq2Bn),
    ]
};
const FLOATS: &[u8] = include_bytes!("../../../tests/gguf/fixtures/floats.gguf");

fn open(bytes: &[u8]) -> LoadResult<Gguf> {
    let files = [("model.gguf".to_owned(), bytes.to_vec())];
    Gguf::open(Source::in_memory(files).folder().clone(), "model.gguf")
}

/// Reads all tensors, as loading a model does.
fn read(bytes: &[u8]) -> LoadResult<BTreeMap<String, (Storage, Vec<u8>)>> {
    let header = Header::read("model.gguf", bytes)?;
    let gguf = open(bytes)?;
    let mut tensors = BTreeMap::new();
    for entry in &header.tensors {
        let tensor = tensor(entry, gguf.storages[&entry.type_number], bytes, None)?;
        tensors.insert(tensor.name.clone(), (tensor.storage, tensor.bytes.to_vec()));
    }
    Ok(tensors)
}

/// The code of a weight in the fixtures.
fn code(row: usize, column: usize) -> u8 {
    ((row * 7 + column * column + column / 5) % 3) as u8
}

#[test]
fn every_layout_holds_the_same_codes_and_scales() {
    for (name, _, layout, bytes) in FIXTURES {
        let tensors = read(bytes).unwrap();
        let (storage, bytes) = &tensors["t"];
        let of_file = Storage::Blocks(match layout {
            BlockLayout::I2s(_) => BlockLayout::I2s(I2sOrder::X86),
            layout => layout,
        });
        assert_eq!(*storage, of_file, "{name}");
        for row in 0..ROWS {
            let (mut codes, mut scales) = ([9; COLUMNS], Vec::new());
            layout.read_ternary_row(bytes, row, &mut codes, &mut scales);
            let expected: Vec<u8> = (0..COLUMNS).map(|column| code(row, column)).collect();
            let expected: Vec<u8> = match layout {
                BlockLayout::Q1 => expected.iter().map(|code| 2 * code.div_ceil(2)).collect(),
                _ => expected,
            };
            assert_eq!(codes.to_vec(), expected, "{name}, row {row}");
            assert!(
                scales.iter().all(|scale| *scale == SCALE),
                "{name}: {scales:?}"
            );
            let groups = match layout.scale_span().unwrap() {
                ScaleSpan::Tensor | ScaleSpan::Row => 1,
                ScaleSpan::Group(columns) => COLUMNS / columns,
            };
            assert_eq!(scales.len(), groups, "{name}");
        }
    }
}

#[test]
fn written_blocks_are_those_of_the_independent_writer() {
    let mut written = 0;
    for (name, number, layout, file) in FIXTURES {
        let Some(own) = type_numbers::type_number(Storage::Blocks(layout)) else {
            continue;
        };
        let is_written = ["i2_s", "tq1_0", "tq2_0", "q2_0", "pq2_0"].contains(&name);
        if !is_written {
            continue;
        }
        written += 1;
        assert_eq!(own, number, "{name}");
        let mut bytes = Vec::new();
        for row in 0..ROWS {
            let codes: Vec<u8> = (0..COLUMNS).map(|column| code(row, column)).collect();
            layout.write_ternary_row(&codes, &[SCALE], &mut bytes);
        }
        layout.finish_ternary(SCALE, &mut bytes);
        assert!(bytes == read(file).unwrap()["t"].1, "{name}");
    }
    assert_eq!(written, 5);
}

#[test]
fn quantized_floats_have_the_values_of_the_reference() {
    let tensors = read(FLOATS).unwrap();
    for name in ["q4_0", "q8_0", "q4_k", "q6_k"] {
        let (Storage::Blocks(layout), bytes) = &tensors[name] else {
            panic!("{name} is in blocks");
        };
        let mut values = [0.0; 512];
        layout.read_floats(bytes, &mut values);
        let (_, expected) = &tensors[&format!("{name}.values")];
        let expected = expected
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes));
        for (index, (value, expected)) in values.into_iter().zip(expected).enumerate() {
            assert_eq!(value.to_bits(), expected.to_bits(), "{name}: value {index}");
        }
    }
}

/// Returns the place of the type number of the last tensor: before its offset, and the header has
/// nothing after that except padding.
fn type_number_at(bytes: &[u8], number: u32) -> usize {
    let number = number.to_le_bytes();
    let places = (24..bytes.len() - 12).filter(|at| bytes[*at..].starts_with(&number));
    let is_last = |at: &usize| bytes[at + 4..at + 12] == [0; 8];
    places
        .into_iter()
        .find(is_last)
        .expect("the fixture has this number")
}

#[test]
fn a_type_number_with_the_size_of_another_layout_is_refused_by_name() {
    let numbers: [u32; 19] = [
        0, 1, 2, 8, 12, 14, 30, 34, 35, 36, 38, 39, 41, 42, 135, 142, 143, 7, 999,
    ];
    for (name, own, layout, bytes) in FIXTURES {
        let at = type_number_at(bytes, own);
        for number in numbers {
            let mut bytes = bytes.to_vec();
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
            let is_own = match layout {
                // These have the same bytes in a row of 256.
                BlockLayout::Q2Group128 | BlockLayout::Iq2Bn => [42, 135, 142].contains(&number),
                _ => number == own,
            };
            match read(&bytes) {
                Ok(_) => assert!(is_own, "{name} as {number} is accepted"),
                Err(error) => {
                    assert!(!is_own, "{name} as {number}: {error}");
                    let error = error.to_string();
                    assert!(error.contains("tensor t: type number"), "{name}: {error}");
                }
            }
        }
    }
}

#[test]
fn truncated_and_changed_headers_are_errors_or_read_without_panic() {
    let mut random = Random::from_env();
    for (name, _, _, bytes) in FIXTURES
        .into_iter()
        .chain([("floats", 0, BlockLayout::Q8, FLOATS)])
    {
        for length in 0..bytes.len() {
            let is_padding = bytes.len() - length < 32;
            let result = read(&bytes[..length]);
            // Cut here, the weights fill groups of 128 exactly.
            let is_other = name == "q2_0"
                && read(&bytes[..length]).is_ok_and(|tensors| {
                    tensors["t"].0 == Storage::Blocks(BlockLayout::Q2Group128)
                });
            assert!(
                result.is_err() || is_padding || is_other,
                "{name} cut to {length} bytes"
            );
        }
        let header = 300.min(bytes.len());
        for at in 0..header {
            for change in [
                0,
                1,
                0xff,
                bytes[at].wrapping_add(1),
                bytes[at].wrapping_sub(1),
            ] {
                let mut bytes = bytes.to_vec();
                bytes[at] = change;
                drop(read(&bytes));
            }
        }
        for _ in 0..1000 {
            drop(read(&randomly_changed(bytes, &mut random)));
        }
    }
}

/// Returns a file of version 3 with these counts and this content after them.
fn file(tensors: u64, keys: u64, content: &[u8]) -> Vec<u8> {
    let counts = [tensors.to_le_bytes(), keys.to_le_bytes()].concat();
    [b"GGUF", &3_u32.to_le_bytes()[..], &counts, content].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("the file is malformed").to_string()
}

#[test]
fn malformed_headers_are_refused_with_the_field() {
    let pair =
        |key: &str, kind: u32, value: &[u8]| [&text(key)[..], &kind.to_le_bytes(), value].concat();
    let number = |key: &str| pair(key, 4, &7_u32.to_le_bytes());
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let nested = (0..6).map(|_| array(9, 1)).collect::<Vec<_>>().concat();
    let cases: [(&str, Vec<u8>); 13] = [
        ("does not begin with", b"GGML".to_vec()),
        (
            "git lfs pull",
            b"version https://git-lfs.github.com/spec/v1\n".to_vec(),
        ),
        ("version 1", [b"GGUF", &1_u32.to_le_bytes()[..]].concat()),
        ("big-endian", [b"GGUF", &3_u32.to_be_bytes()[..]].concat()),
        ("version 4", [b"GGUF", &4_u32.to_le_bytes()[..]].concat()),
        ("tensors are too many", file(u64::MAX, 0, &[])),
        ("metadata keys are too many", file(0, u64::MAX, &[])),
        (
            "metadata \"a\": the key occurs twice",
            file(0, 2, &[number("a"), number("a")].concat()),
        ),
        (
            "metadata \"a\": unknown value type 77",
            file(0, 1, &pair("a", 77, &[])),
        ),
        ("metadata \"a\": a boolean", file(0, 1, &pair("a", 7, &[2]))),
        (
            "beyond the end",
            file(0, 1, &pair("a", 9, &array(0, u64::MAX))),
        ),
        ("nested deeper", file(0, 1, &pair("a", 9, &nested))),
        (
            "\"general.alignment\": must be a power",
            file(0, 1, &number("general.alignment")),
        ),
    ];
    for (named, bytes) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn malformed_tensors_are_refused_by_name() {
    let entry = |name: &str, sizes: &[u64], offset: u64| {
        let sizes_bytes: Vec<u8> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        let count = (sizes.len() as u32).to_le_bytes();
        [
            &text(name)[..],
            &count,
            &sizes_bytes,
            &0_u32.to_le_bytes(),
            &offset.to_le_bytes(),
        ]
        .concat()
    };
    let with_data = |tensors: u64, entries: &[Vec<u8>]| {
        let mut bytes = file(tensors, 0, &entries.concat());
        bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
        bytes
    };
    let cases: [(&str, Vec<u8>); 8] = [
        (
            "tensor a: must have 1 to 4 dimensions",
            with_data(1, &[entry("a", &[], 0)]),
        ),
        (
            "tensor a: must have 1 to 4 dimensions",
            with_data(1, &[entry("a", &[1; 5], 0)]),
        ),
        (
            "tensor a: a dimension is 0",
            with_data(1, &[entry("a", &[0], 0)]),
        ),
        (
            "tensor a: the shape",
            with_data(1, &[entry("a", &[1 << 40, 1 << 40], 0)]),
        ),
        (
            "tensor a: its offset 3",
            with_data(1, &[entry("a", &[1], 3)]),
        ),
        (
            "tensor a: its offset 6400",
            with_data(1, &[entry("a", &[1], 6400)]),
        ),
        (
            "tensor b: it begins where the tensor a begins",
            with_data(2, &[entry("a", &[8], 0), entry("b", &[8], 0)]),
        ),
        (
            "tensor a: type number 0: it has room for 64",
            with_data(1, &[entry("a", &[99], 0)]),
        ),
    ];
    for (named, bytes) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn names_of_hugging_face_and_gguf_are_each_others_inverse() {
    for name in [
        "token_embd.weight",
        "blk.7.attn_q.weight",
        "blk.12.ffn_sub_norm.weight",
        "blk.3.ffn_down.lrc_u",
        "blk.3.ffn_down.lrc_v",
    ] {
        let hugging_face = FileNames::Gguf.hugging_face_name(name);
        assert_ne!(hugging_face, name);
        assert_eq!(FileNames::Gguf.of(&hugging_face), name);
    }
    assert_eq!(
        FileNames::Gguf.hugging_face_name("blk.3.ffn_down.lrc_U"),
        FileNames::Gguf.hugging_face_name("blk.3.ffn_down.lrc_u")
    );
    for name in [
        "blk.0.unknown.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ] {
        assert_eq!(
            FileNames::Gguf.hugging_face_name(name),
            format!("unknown {name}")
        );
    }
}

#[test]
fn parts_are_found_from_the_first() {
    let parts = |name| names::parts(name);
    assert_eq!(parts("a.gguf").unwrap(), ["a.gguf"]);
    let two = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"];
    assert_eq!(parts(two[0]).unwrap(), two);
    assert!(parts(two[1]).unwrap_err().contains(two[0]));
}

/// A file that is listed twice would be counted twice.
#[test]
fn a_missing_part_is_refused_by_name() {
    let files = [("a-00001-of-00002.gguf".to_owned(), FLOATS.to_vec())];
    let error = Source::in_memory(files)
        .with_gguf("a-00001-of-00002.gguf")
        .unwrap_err();
    assert!(
        error.to_string().contains("a-00002-of-00002.gguf"),
        "{error}"
    );
}
