//! Fuzzes [`sterna_fuzz::checks::config_json`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::config_json::check(data));
