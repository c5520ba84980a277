//! How OUT gets its name: whole or not at all.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;

use sterna::checkpoint::convert::Watch;
use sterna::convert::convert;

use super::inputs::demo;
use super::{Scratch, converted, fixture, flags};

#[test]
fn what_exists_is_replaced_only_by_force() {
    let scratch = Scratch::new();
    let input = fixture("bitnet-blocks");
    for (name, container) in [("out.gguf", "q2_0"), ("out", "hf")] {
        let out = scratch.path(name);
        converted(&input, &out, container).unwrap();
        let error = converted(&input, &out, container).unwrap_err();
        assert!(error.to_string().contains("give --force"), "{error}");
        let forced = flags(&input, &out, container, &["--force"]);
        convert(&forced, &Watch::hidden()).unwrap();
        let itself = flags(&out, &out, container, &["--force"]);
        let error = convert(&itself, &Watch::hidden()).unwrap_err();
        assert!(error.to_string().contains("are the same"), "{error}");
    }
    assert_eq!(scratch.names(), ["out", "out.gguf"]);
}

#[test]
fn a_directory_that_is_no_checkpoint_is_never_replaced() {
    let scratch = Scratch::new();
    let out = scratch.path("letters");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("letter.txt"), "Dear").unwrap();
    let forced = flags(&fixture("bitnet-blocks"), &out, "hf", &["--force"]);
    let error = convert(&forced, &Watch::hidden()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("not the directory of a checkpoint"),
        "{error}"
    );
    assert_eq!(fs::read(out.join("letter.txt")).unwrap(), b"Dear");
    assert_eq!(scratch.names(), ["letters"]);
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let scratch = Scratch::new();
    let input = demo(&scratch);
    let watch = Watch::hidden();
    watch.interrupted.store(true, Ordering::Relaxed);
    for (name, container) in [("out.gguf", "tq2_0"), ("out", "hf")] {
        let flags = flags(&input, &scratch.path(name), container, &[]);
        let error = convert(&flags, &watch).unwrap_err();
        assert!(error.to_string().contains("interrupted"), "{error}");
        assert_eq!(scratch.names(), ["demo"]);
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}

/// Returns whether the process has a thread of this name.
fn has_thread(process: u32, name: &str) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else {
        return false;
    };
    let mut names = threads.map(|thread| {
        let path = thread.unwrap().path().join("comm");
        fs::read_to_string(path).unwrap_or_default() // The thread may have ended.
    });
    names.any(|thread| thread.trim() == name)
}

/// The conversion is written and compared when the signal comes, but has no name yet: the program
/// waits for a file beside OUT, which is a pipe here.
#[test]
fn a_signal_ends_the_program_and_leaves_nothing() {
    let input = fixture("bitnet-blocks");
    for signal in ["-TERM", "-INT"] {
        let scratch = Scratch::new();
        let pipe = scratch.path("tokenizer.json");
        run("mkfifo", &[pipe.to_str().unwrap()]);
        let mut program = Command::new(env!("CARGO_BIN_EXE_sterna"));
        program
            .arg("convert")
            .arg(&input)
            .arg(scratch.path("out.gguf"));
        let program = program.args(["--layout", "q2_0"]).stderr(Stdio::piped());
        let process = program.spawn().unwrap();
        // Opening waits until the program reads.
        let mut writer = fs::OpenOptions::new().write(true).open(&pipe).unwrap();
        assert_eq!(scratch.names().len(), 2, "{:?}", scratch.names());
        run("kill", &[signal, &process.id().to_string()]);
        while has_thread(process.id(), "sterna-signals") {
            thread::yield_now(); // It ends when it has seen the signal.
        }
        writer
            .write_all(&fs::read(Path::new(&input).join("tokenizer.json")).unwrap())
            .unwrap();
        drop(writer);
        let output = process.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{signal}: {error}");
        assert!(error.contains("interrupted"), "{signal}: {error}");
        assert_eq!(scratch.names(), ["tokenizer.json"], "{signal}");
    }
}

#[test]
fn the_program_infers_the_container_from_the_name() {
    let scratch = Scratch::new();
    let input = fixture("bitnet-blocks");
    let run = |more: &[&str]| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let output = program
            .arg("convert")
            .arg(&input)
            .args(more)
            .current_dir(&scratch.0);
        let output = output.output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    assert_eq!(run(&["a.gguf", "--layout", "pq2_0"]).0, Some(0));
    assert_eq!(run(&["a"]).0, Some(0));
    assert_eq!(scratch.names(), ["a", "a.gguf"]);
    for (flags, named) in [
        (
            &["b.gguf"][..],
            "--layout: missing; a GGUF file needs one of i2_s",
        ),
        (&["b", "--layout", "q2_0"], "only GGUF files have a layout"),
        (
            &["b", "--to", "gguf", "--layout", "q2_0"],
            "must end in .gguf",
        ),
        (&["b.safetensors"], "give the directory"),
        (&["missing/b"], "missing"),
        (
            &["b.gguf", "--layout", "tq2_0"],
            "tensor model.layers.0.self_attn.q_proj.weight",
        ),
    ] {
        let (code, error) = run(flags);
        assert_eq!(code, Some(2), "{flags:?}: {error}");
        assert!(error.contains(named), "{flags:?}: {error}");
    }
    assert_eq!(scratch.names(), ["a", "a.gguf"]);
}
