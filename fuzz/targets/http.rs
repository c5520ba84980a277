//! Fuzzes [`sterna_fuzz::checks::http`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::http::check(data));
