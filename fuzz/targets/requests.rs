//! Fuzzes [`sterna_fuzz::checks::requests`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::requests::check(data));
