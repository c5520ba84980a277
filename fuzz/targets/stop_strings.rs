//! Fuzzes [`sterna_fuzz::checks::stop_strings`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::stop_strings::check(data));
