//! Metadata that is written to a GGUF file: values by key.
//!
//! Source: the GGUF specification, version 3.

/// A metadata value that is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataValue {
    Size(u32),
    Float(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Bools(Vec<bool>),
    Integers(Vec<i32>),
    Floats(Vec<f32>),
}

/// Metadata keys with their values, in the order of the file.
pub(crate) type MetadataEntries = Vec<(String, MetadataValue)>;

/// Appends keys with their values.
pub(super) fn put_entries(metadata: &MetadataEntries, out: &mut Vec<u8>) {
    for (key, value) in metadata {
        put_text(key, out);
        put_value(value, out);
    }
}

fn put_value(value: &MetadataValue, out: &mut Vec<u8>) {
    let mut put = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        MetadataValue::Size(size) => put(4, &size.to_le_bytes()),
        MetadataValue::Float(float) => put(6, &float.to_le_bytes()),
        MetadataValue::Bool(bool) => put(7, &[u8::from(*bool)]),
        MetadataValue::Text(text) => {
            put(8, &[]);
            put_text(text, out);
        }
        MetadataValue::Texts(texts) => {
            put_array(8, texts.len(), out);
            texts.iter().for_each(|text| put_text(text, out));
        }
        MetadataValue::Bools(bools) => {
            put_array(7, bools.len(), out);
            out.extend(bools.iter().map(|bool| u8::from(*bool)));
        }
        MetadataValue::Integers(integers) => {
            put_array(5, integers.len(), out);
            out.extend(integers.iter().flat_map(|integer| integer.to_le_bytes()));
        }
        MetadataValue::Floats(floats) => {
            put_array(6, floats.len(), out);
            out.extend(floats.iter().flat_map(|float| float.to_le_bytes()));
        }
    }
}

fn put_array(kind: u32, length: usize, out: &mut Vec<u8>) {
    out.extend(9_u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((length as u64).to_le_bytes());
}

pub(super) fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
