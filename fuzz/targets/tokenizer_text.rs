//! Fuzzes [`sterna_fuzz::checks::tokenizer_text`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::tokenizer_text::check(data));
