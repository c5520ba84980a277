//! Kernel speed.
fn main() {}
