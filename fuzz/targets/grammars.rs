//! Fuzzes [`sterna_fuzz::checks::grammars`].
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: sterna_fuzz::run_template_if_asked(),
    |data: &[u8]| sterna_fuzz::checks::grammars::check(data)
);
