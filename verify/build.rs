//! The library is compiled with the models' atomics.

fn main() {
    println!("cargo:rustc-cfg=loom");
    println!("cargo:rustc-check-cfg=cfg(loom)");
}
