//! Fuzzes [`sterna_fuzz::checks::bin`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::bin::check(data));
