//! The maintainers' commands: `cargo xtask test`, `verify`, `ptx`, `wheel`, `results`,
//! `gpu-bundle`.

mod aarch64;
mod api;
mod bundle;
mod c;
mod cases;
mod comparison;
mod counts;
mod environment;
mod layers;
mod lmcache;
mod nightly;
mod nixl;
mod packages;
mod pages;
mod process;
mod ptx;
mod python;
mod ray;
mod results;
mod ring_header;
mod style;
mod suite;
mod verify;
mod workspace;

use std::process::ExitCode;

use workspace::Workspace;

const USAGE: &str = "usage: cargo xtask COMMAND
  test [--long]   every check there is without a GPU; the last line sums them up
  verify [--for DURATION] [--only METHOD]
                  the methods that find what tests cannot; `verify --help` names them
  ptx             compile every CUDA source under crates/ and rewrite the committed PTX
  ring-header     write the table of kernel rings' layout into device.cuh
  python          build the Python package and run its tests on the host
  python --torch  run its tests with PyTorch, which is installed for them (gigabytes)
  python --stubs  build the Python package and write its stub, _warpipe.pyi
  engines         test the plugins with vLLM, SGLang, TRL, verl, NIXL, LMCache and Ray themselves, on a
                  CPU; they are downloaded (gigabytes)
  engines --nixl, --lmcache, --ray
                  one of these alone; NIXL's headers are those that NIXL_INCLUDE_DIR names
  wheel           build the Python package as a manylinux wheel in target/wheels
  wheel --target aarch64
                  the same for 64-bit ARM, tried under qemu-user with Debian's Python
  sdist           build the Python package's source distribution, and see that it compiles
  results [--check | --all | --from FOLDER]
                  make BENCHMARKS.md and the README's figures from the reports in results/;
                  or see whether they are made from them; or print every figure; or take in
                  the reports of a GPU machine first, which replace those
  style           the rules of the sources: layers, imports, lengths
  api             write the list of the public API, crates/warpipe/public-api.txt
  c header        write the C interface's header, crates/warpipe-c/include/warpipe.h
  c test          compile and run the C interface's tests, in C and C++
  c examples      build and run the examples in C++, examples/cpp
  c snippets      compile the snippets in C and C++ of the pages, and run the whole programs
  c-dist          make the C interface's install tree in target/c-dist
  pages           see that links resolve and that a test runs every snippet
  book            make the book of docs/ in target/book, with mdBook (built once)
  comparison [OPTION]...
                  measure the host path beside a bare ring and iceoryx2; `--help` says how
  gpu-bundle [--no-comparison]
                  assemble target/gpu-bundle, which tests a machine that has a GPU and no Rust";

/// A failure, as told to a person: what failed, and the next step.
type Outcome<T> = Result<T, String>;

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["test"] => Workspace::find().map(|workspace| suite::run(workspace, false)),
        ["test", "--long"] => Workspace::find().map(|workspace| suite::run(workspace, true)),
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        ["verify", "--help" | "-h"] => {
            println!("{}", verify::USAGE);
            return ExitCode::SUCCESS;
        }
        ["verify", options @ ..] => match verify::Options::parse(options) {
            Some(options) => Workspace::find().map(|workspace| verify::run(&workspace, &options)),
            None => {
                eprintln!("{}", verify::USAGE);
                return ExitCode::from(2);
            }
        },
        ["ptx"] => Workspace::find()
            .and_then(|workspace| ptx::rewrite(&workspace))
            .map(|()| true),
        ["ring-header"] => Workspace::find()
            .and_then(|workspace| ring_header::write(&workspace))
            .map(|()| true),
        ["python"] => Workspace::find().map(|workspace| suite::run_python(&workspace)),
        ["python", "--torch"] => {
            Workspace::find().map(|workspace| suite::run_python_with_torch(&workspace))
        }
        ["engines"] => Workspace::find().map(|workspace| suite::run_engines(&workspace)),
        ["engines", option] => match suite::Integration::of(option) {
            Some(one) => Workspace::find().map(|workspace| suite::run_integration(&workspace, one)),
            None => return usage(),
        },
        ["style"] => Workspace::find().and_then(|workspace| {
            style::report(&workspace)?;
            layers::check(&workspace).map(|()| true)
        }),
        ["python", "--stubs"] => Workspace::find()
            .and_then(|workspace| python::stubs(&workspace))
            .map(|()| true),
        ["wheel", "--target", "aarch64"] => {
            Workspace::find().and_then(|workspace| aarch64::wheel(&workspace))
        }
        ["wheel"] => Workspace::find()
            .and_then(|workspace| python::wheel(&workspace))
            .map(|_| true),
        ["sdist"] => Workspace::find()
            .and_then(|workspace| python::sdist(&workspace))
            .map(|()| true),
        ["results"] => Workspace::find()
            .and_then(|workspace| results::write(&workspace, None))
            .map(|()| true),
        ["results", "--all"] => Workspace::find()
            .and_then(|workspace| results::print(&workspace))
            .map(|()| true),
        ["results", "--check"] => Workspace::find()
            .and_then(|workspace| results::check(&workspace))
            .map(|()| true),
        ["results", "--from", folder] => Workspace::find()
            .and_then(|workspace| results::write(&workspace, Some(folder.as_ref())))
            .map(|()| true),
        ["api"] => Workspace::find()
            .and_then(|workspace| api::write(&workspace))
            .map(|()| true),
        ["pages"] => Workspace::find()
            .and_then(|workspace| pages::check(&workspace))
            .map(|()| true),
        ["book"] => Workspace::find()
            .and_then(|workspace| pages::book(&workspace))
            .map(|()| true),
        ["c", "header"] => Workspace::find()
            .and_then(|workspace| c::write_header(&workspace))
            .map(|()| true),
        ["c", "test"] => Workspace::find().and_then(|workspace| {
            let counts = c::test(&workspace)?;
            println!("\n{counts}");
            Ok(counts.failed == 0)
        }),
        ["c", "examples"] => Workspace::find().and_then(|workspace| {
            let counts = c::run_examples(&workspace)?;
            println!("\n{counts}");
            Ok(counts.failed == 0)
        }),
        ["c", "snippets"] => Workspace::find().and_then(|workspace| {
            let counts = c::check_snippets(&workspace)?;
            println!("\n{counts}");
            Ok(counts.failed == 0)
        }),
        ["c-dist"] => Workspace::find()
            .and_then(|workspace| c::dist(&workspace))
            .map(|()| true),
        ["comparison", options @ ..] => {
            Workspace::find().and_then(|workspace| comparison::run(&workspace, options))
        }
        ["gpu-bundle"] | ["gpu-bundle", "--no-comparison"] => Workspace::find()
            .and_then(|workspace| bundle::assemble(&workspace, arguments.len() == 1))
            .map(|()| true),
        _ => return usage(),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
