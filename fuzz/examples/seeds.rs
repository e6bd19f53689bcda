//! Writes every target's seeds and committed inputs as files, for a fuzzer to begin with: `seeds
//! FOLDER`.

use std::path::Path;
use std::{env, fs, io};

use warpipe_fuzz::{corpus, targets};

fn main() -> io::Result<()> {
    let folder = env::args_os()
        .nth(1)
        .ok_or_else(|| io::Error::other("usage: seeds FOLDER"))?;
    for target in targets() {
        let folder = Path::new(&folder).join(target.name);
        fs::create_dir_all(&folder)?;
        for (index, input) in corpus::of(&target).iter().enumerate() {
            fs::write(folder.join(format!("seed-{index}")), input)?;
        }
        println!("{}", target.name);
    }
    Ok(())
}
