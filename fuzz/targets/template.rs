//! Fuzzes [`sterna_fuzz::checks::template`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::template::check(data));
