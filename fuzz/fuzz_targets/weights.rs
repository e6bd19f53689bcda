#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warpipe_fuzz::parse("weights", bytes));
