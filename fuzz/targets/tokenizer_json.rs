//! Fuzzes [`sterna_fuzz::checks::tokenizer_json`].
#![no_main]

use std::panic;
use std::sync::Once;

static HOOK: Once = Once::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // libFuzzer's own hook ends the process even for a panic of the library that `text` catches.
    HOOK.call_once(|| panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));
    sterna_fuzz::checks::tokenizer_json::check(data);
});
