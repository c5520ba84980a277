//! Tests of reading `.bin` files. `tests/bin/write.py` wrote the fixtures.

use sterna_random::Random;

use super::table::ScaleField;
use super::*;
use crate::checkpoint::Source;
use crate::checkpoint::tests::randomly_changed;

const VARIANT_A: &[u8] = include_bytes!("../../../tests/bin/fixtures/a.bin");
const VARIANT_B: &[u8] = include_bytes!("../../../tests/bin/fixtures/b.bin");
const CONFIG: &str = r#"{"model_type": "bitnet"}"#;

fn open(bytes: &[u8]) -> LoadResult<BitnetBin> {
    let files = [("model.bin".to_owned(), bytes.to_vec())];
    BitnetBin::open(Source::in_memory(files).folder().clone(), "model.bin")
}

/// The storage, shape and bytes of each tensor.
type TensorContents = BTreeMap<String, (Storage, Vec<usize>, Vec<u8>)>;

/// Reads the table and all tensors, as loading a model does.
fn read(bytes: &[u8]) -> LoadResult<TensorContents> {
    let tensors = open(bytes)?.tensors(bytes)?.into_iter();
    let whole = |tensor: Tensor<'_>| (tensor.storage, tensor.shape, tensor.bytes.to_vec());
    Ok(tensors
        .map(|(name, tensor)| (name, whole(tensor)))
        .collect())
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("the file is malformed").to_string()
}

/// The code of a weight in the fixtures.
fn code(row: usize, column: usize) -> u8 {
    ((row * 7 + column * column + column / 5) % 3) as u8
}

#[test]
fn both_variants_hold_the_same_tensors() {
    let (a, b) = (open(VARIANT_A).unwrap(), open(VARIANT_B).unwrap());
    assert_eq!(a.table.scale_field, ScaleField::IfPresent);
    assert_eq!(b.table.scale_field, ScaleField::Always);
    assert_eq!(read(VARIANT_A).unwrap(), read(VARIANT_B).unwrap());
    assert_eq!(a.config, CONFIG.as_bytes());
    let tensors = a.tensors(VARIANT_A).unwrap();
    let value = |name: &str| f32::from_bits(value(&tensors[name]).unwrap());
    assert_eq!(value("a.weight_scale"), 0.375);
    assert_eq!(value("d.weight_scale"), 0.75);
    assert_eq!(value("e.weight"), 5.0);
    assert_eq!(tensors["b.weight"].shape, [3]);
    assert_eq!(tensors["c.weight"].storage, Storage::Plain(Dtype::F16));
    assert_eq!(tensors["d.weight"].shape, [8, 128]);
    for (name, columns) in [("a.weight", 256), ("d.weight", 100)] {
        for row in 0..8 {
            let mut codes = vec![9; columns];
            tensors[name].read_interleaved_row(row, &mut codes).unwrap();
            let expected: Vec<u8> = (0..columns).map(|column| code(row, column)).collect();
            assert_eq!(codes, expected, "{name}, row {row}");
        }
    }
}

#[test]
fn weights_in_the_padding_and_codes_of_3_are_refused_by_row() {
    let refusal = |weight: usize, columns: usize| {
        let mut bytes = open(VARIANT_A).unwrap().tensors(VARIANT_A).unwrap()["d.weight"]
            .bytes
            .to_vec();
        bytes[3 * 32 + weight % 32] |= 3 << (6 - 2 * (weight / 32));
        let tensor = Tensor {
            name: "d.weight".to_owned(),
            storage: Storage::Interleaved,
            shape: vec![8, 128],
            bytes: &bytes,
            rows: FileOrder::Same,
            columns: FileOrder::Same,
        };
        let read = |row| tensor.read_interleaved_row(row, &mut vec![0; columns]);
        assert!(read(2).is_ok() && read(4).is_ok(), "the other rows");
        read(3).expect_err("row 3").to_string()
    };
    let error = refusal(120, 100);
    assert!(
        error.contains("tensor d.weight: its padding in row 3"),
        "{error}"
    );
    let error = refusal(77, 100);
    assert!(error.contains("row 3, column 77"), "{error}");
}

/// A file as it is written, and where each field of it is.
struct Writer {
    bytes: Vec<u8>,
    /// The names, places and sizes of fields.
    fields: Vec<(String, usize, usize)>,
}

impl Writer {
    fn new(config: &str, tensors: u32) -> Writer {
        let mut writer = Writer {
            bytes: MAGIC.to_vec(),
            fields: Vec::new(),
        };
        writer.u32("version", 1);
        writer.u32("config_len", config.len() as u32);
        writer.bytes.extend_from_slice(config.as_bytes());
        writer.u32("n_tensors", tensors);
        writer
    }

    fn u32(&mut self, field: &str, value: u32) {
        self.fields.push((field.to_owned(), self.bytes.len(), 4));
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Adds a tensor of `data` bytes. A scale of `None` is one that is not written.
    fn tensor(
        &mut self,
        name: &str,
        [dtype, has_scale]: [u32; 2],
        shape: &[u32],
        scale: Option<f32>,
        data: usize,
    ) {
        self.u32("name_len", name.len() as u32);
        self.bytes.extend_from_slice(name.as_bytes());
        self.u32("dtype", dtype);
        self.u32("ndims", shape.len() as u32);
        shape.iter().for_each(|size| self.u32("shape", *size));
        self.u32("has_scale", has_scale);
        if let Some(scale) = scale {
            self.bytes.extend_from_slice(&scale.to_le_bytes());
        }
        self.fields.push(("nbytes".to_owned(), self.bytes.len(), 8));
        self.bytes.extend_from_slice(&(data as u64).to_le_bytes());
        self.bytes.resize(self.bytes.len() + data, 0x55);
    }
}

/// Returns a file of both kinds of tensors.
fn sample(field: ScaleField) -> Writer {
    let mut writer = Writer::new(CONFIG, 3);
    let none = (field == ScaleField::Always).then_some(0.0);
    writer.tensor("norm", [1, 0], &[5], none, 20);
    writer.tensor("packed", [0, 1], &[3, 32], Some(0.5), 96);
    writer.tensor("embedding", [1, 0], &[7, 6], none, 168);
    writer
}

#[test]
fn every_changed_field_is_refused_with_its_name_or_that_of_the_tensor() {
    for variant in [ScaleField::IfPresent, ScaleField::Always] {
        let Writer { bytes, fields } = sample(variant);
        assert_eq!(open(&bytes).unwrap().table.scale_field, variant);
        assert_eq!(fields.len(), 3 + 6 + 7 + 7);
        let mut tensor = "";
        for (field, at, size) in fields {
            if field == "name_len" {
                let name = &bytes[at + 4..][..usize::from(bytes[at])];
                tensor = str::from_utf8(name).unwrap();
            }
            let mut old = [0; 8];
            old[..size].copy_from_slice(&bytes[at..at + size]);
            let old = u64::from_le_bytes(old);
            let values = [
                0,
                1,
                u64::MAX,
                u64::MAX >> 1,
                1 << 31,
                old + 1,
                old.wrapping_sub(1),
            ];
            for value in values {
                let (mut changed, value) = (bytes.clone(), &value.to_le_bytes()[..size]);
                if changed[at..at + size] == *value {
                    continue;
                }
                changed[at..at + size].copy_from_slice(value);
                let error = refusal(&changed);
                // A wrong length or count moves all fields after it.
                let is_moved = ["config_len", "name_len", "ndims", "has_scale"];
                let named = error.contains(&field) || !tensor.is_empty() && error.contains(tensor);
                assert!(
                    named || is_moved.contains(&&*field) && error.starts_with("model.bin: "),
                    "{variant:?}: {field} of {tensor:?} as {value:?}: {error}"
                );
            }
        }
    }
}

#[test]
fn truncated_and_changed_files_are_errors_or_read_without_panic() {
    let mut random = Random::from_env();
    for (name, bytes) in [("a", VARIANT_A), ("b", VARIANT_B)] {
        for length in 0..bytes.len() {
            assert!(
                read(&bytes[..length]).is_err(),
                "{name} cut to {length} bytes"
            );
        }
        let longer = [bytes, &[0]].concat();
        assert!(
            refusal(&longer).contains("1 bytes follow the last"),
            "{name}"
        );
        for _ in 0..1000 {
            drop(read(&randomly_changed(bytes, &mut random)));
        }
    }
}

/// Checks that each file is refused with these words.
fn check_refusals(cases: &[(&str, Vec<u8>)]) {
    for (named, bytes) in cases {
        let error = refusal(bytes);
        assert!(error.contains(named), "{named}: {error}");
    }
}

/// Returns a file of one tensor.
fn one(kind: [u32; 2], shape: &[u32], scale: Option<f32>, data: usize) -> Vec<u8> {
    let mut writer = Writer::new(CONFIG, 1);
    writer.tensor("t", kind, shape, scale, data);
    writer.bytes
}

#[test]
fn malformed_files_are_refused_with_the_field() {
    let with_second = |name: &str| {
        let mut writer = Writer::new(CONFIG, 2);
        writer.tensor("t", [0, 1], &[1, 32], Some(0.5), 32);
        writer.tensor(name, [1, 0], &[1], None, 4);
        writer.bytes
    };
    let mut long = Writer::new("", 0).bytes;
    long[12..16].fill(255);
    check_refusals(&[
        ("config_len: 4294967295", long),
        ("model.bin: config: ", Writer::new("{", 0).bytes),
        (
            "n_tensors: 65537 are too many",
            Writer::new(CONFIG, 65_537).bytes,
        ),
        ("both variants", Writer::new(CONFIG, 0).bytes),
        ("both variants", one([0, 1], &[1, 32], Some(0.5), 32)),
        ("name of tensor t: it occurs twice", with_second("t")),
        (
            "tensor t_scale: it differs from the scale",
            with_second("t_scale"),
        ),
        ("PyTorch", b"PK\x03\x04 what PyTorch writes".to_vec()),
    ]);
}

#[test]
fn malformed_tensors_are_refused_with_the_field() {
    check_refusals(&[
        ("dtype of tensor t: must be 0", one([4, 0], &[1], None, 4)),
        (
            "ndims of tensor t: must be at most 4; got 5",
            one([1, 0], &[1; 5], None, 4),
        ),
        (
            "shape of tensor t: a dimension is 0",
            one([1, 0], &[0], None, 0),
        ),
        ("shape of tensor t: [", one([1, 0], &[u32::MAX; 4], None, 4)),
        (
            "shape of tensor t: packed weights",
            one([0, 1], &[1, 33], Some(0.5), 33),
        ),
        (
            "shape of tensor t: packed weights",
            one([0, 1], &[32], Some(0.5), 32),
        ),
        (
            "has_scale of tensor t: must be 1",
            one([0, 0], &[1, 32], None, 32),
        ),
        (
            "has_scale of tensor t: must be 0,",
            one([1, 1], &[1], Some(0.5), 4),
        ),
        (
            "has_scale of tensor t: must be 0 or 1; got 2",
            one([1, 2], &[1], None, 4),
        ),
        (
            "nbytes of tensor t: [2] values in F32 take 8 bytes; got 4",
            one([1, 0], &[2], None, 4),
        ),
    ]);
}

#[test]
fn the_tokenizer_lies_beside_the_file_or_in_its_folder() {
    let checkpoint = |files: &[&str]| {
        let files = files
            .iter()
            .map(|name| ((*name).to_owned(), name.as_bytes().to_vec()));
        let model = ("m.bin".to_owned(), VARIANT_A.to_vec());
        Source::in_memory(files.chain([model]))
            .with_bin("m.bin")
            .unwrap()
    };
    let read = |source: &Source, name: &str| {
        let bytes = source
            .read(name)
            .map(|bytes| bytes.map(|bytes| bytes.to_vec()));
        bytes.map(|bytes| bytes.map(|bytes| String::from_utf8(bytes).unwrap()))
    };
    let beside = checkpoint(&["tokenizer.json", "tokenizer_config.json", "config.json"]);
    assert_eq!(
        read(&beside, "tokenizer.json").unwrap().unwrap(),
        "tokenizer.json"
    );
    assert_eq!(
        read(&beside, "config.json").unwrap().unwrap(),
        CONFIG,
        "the file's own"
    );
    assert_eq!(read(&beside, "chat_template.jinja").unwrap(), None);
    let both = checkpoint(&[
        "tokenizer.json",
        "m/tokenizer.json",
        "tokenizer_config.json",
    ]);
    assert_eq!(
        read(&both, "tokenizer.json").unwrap().unwrap(),
        "m/tokenizer.json"
    );
    let error = read(&both, "tokenizer_config.json")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("m/tokenizer_config.json: there is no such file beside m.bin"),
        "{error}"
    );
    let error = read(&checkpoint(&[]), "tokenizer.json")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("tokenizer.json: there is no such file beside m.bin"),
        "{error}"
    );
}
