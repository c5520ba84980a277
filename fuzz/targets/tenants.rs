//! Fuzzes [`sterna_fuzz::checks::tenants`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::checks::tenants::check(data));
