//! Fuzzes [`sterna_fuzz::checks::safetensors`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::safetensors::check(data));
