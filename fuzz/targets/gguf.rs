//! Fuzzes [`sterna_fuzz::checks::gguf`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::gguf::check(data));
