//! `sterna bench` times no model that computes wrong tokens, and its report has every figure.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::process::Command;
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::Value;
use sterna::bench::{
    BenchReport, DEMO_ANSWERS, Effort, Grid, LimitsProbe, MachineInfo, ModelInfo, Subject,
    check_batching, check_demo, check_isa, measure,
};
use sterna::engine::{Forward, LogitRows};
use sterna::model::{KvStore, LoadOptions, Model, toy};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, Limits, Page, SequenceId};

/// Everything runs once.
const ONCE: Effort = Effort {
    min_repetitions: 1,
    repetitions: 1,
    short: Duration::ZERO,
    long: Duration::ZERO,
    steps: 2,
    repetition: Duration::ZERO,
};

/// A model whose last row of logits is wrong in the steps that `is_wrong` selects.
struct Corrupted {
    model: Model,
    is_wrong: fn(&Batch) -> bool,
    error: LogitError,
}

#[derive(Clone, Copy)]
enum LogitError {
    /// The engine draws another token.
    Token,
    /// The engine draws the same token with another log-probability.
    Bits,
    /// The engine can draw no token.
    Nan,
}

struct CorruptedRows {
    rows: Vec<Vec<f32>>,
}

impl LogitRows for CorruptedRows {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        logits.copy_from_slice(&self.rows[row]);
    }
}

impl Forward for Corrupted {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.model)
    }

    fn new_kv_store(&self, limits: &Limits) -> std::io::Result<KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        let vocabulary = Forward::vocabulary(self);
        let logits = self.model.forward(batch, kv_store);
        let mut rows: Vec<Vec<f32>> = (0..logits.rows())
            .map(|row| {
                let mut values = vec![0.0; vocabulary];
                logits.copy_row(row, &mut values);
                values
            })
            .collect();
        if let Some(last) = rows.last_mut().filter(|_| (self.is_wrong)(batch)) {
            match self.error {
                LogitError::Token => last.reverse(),
                LogitError::Bits => {
                    let smallest = last.iter_mut().min_by(|a, b| a.total_cmp(b)).unwrap();
                    *smallest += 1.0;
                }
                LogitError::Nan => last[7] = f32::NAN,
            }
        }
        CorruptedRows { rows }
    }
}

fn options() -> LoadOptions {
    LoadOptions::new(Kernels::new(Isa::best()).unwrap(), 2)
}

fn demo() -> Model {
    Model::load(&sterna::demo::source(), options()).unwrap()
}

fn never(_: &Batch) -> bool {
    false
}

fn always(_: &Batch) -> bool {
    true
}

fn beside_other_rows(batch: &Batch) -> bool {
    batch.rows().len() > 1
}

fn in_a_later_chunk(batch: &Batch) -> bool {
    batch
        .rows()
        .iter()
        .any(|row| row.start > 0 && row.len() > 1)
}

#[test]
fn a_demo_with_wrong_answers_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool, error| {
        let mut demo = Corrupted {
            model: demo(),
            is_wrong,
            error,
        };
        check_demo(&mut demo)
    };
    assert_eq!(check(never, LogitError::Token), Ok(()));
    let mismatch = check(always, LogitError::Token).unwrap_err();
    assert_eq!((mismatch.prompt, mismatch.token), (0, 0));
    assert_eq!(mismatch.expected, Some(DEMO_ANSWERS[0].1[0]));
    assert!(
        mismatch.to_string().contains("nothing was timed"),
        "{mismatch}"
    );
    let mismatch = check(always, LogitError::Nan).unwrap_err();
    assert_eq!(mismatch.computed, None);
}

#[test]
fn an_instruction_set_with_other_logprob_bits_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool, error| {
        let mut toy = Corrupted {
            model: toy::model(2),
            is_wrong,
            error,
        };
        check_isa(&mut toy, &mut toy::model(1))
    };
    assert_eq!(check(never, LogitError::Bits), Ok(()));
    let mismatch = check(always, LogitError::Bits).unwrap_err();
    assert_eq!(mismatch.expected, mismatch.computed);
    assert!(
        mismatch.to_string().contains("another log-probability"),
        "{mismatch}"
    );
    assert!(check(always, LogitError::Token).is_err());
    assert!(check(always, LogitError::Nan).is_err());
}

#[test]
fn a_model_whose_answers_depend_on_the_batch_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool| {
        let mut toy = Corrupted {
            model: toy::model(2),
            is_wrong,
            error: LogitError::Bits,
        };
        check_batching(&mut toy)
    };
    assert_eq!(check(never), Ok(()));
    let mismatch = check(beside_other_rows).unwrap_err();
    assert_eq!(mismatch.check, "alone and batched");
    let mismatch = check(in_a_later_chunk).unwrap_err();
    assert_eq!(mismatch.check, "alone and chunked");
}

#[test]
fn the_recorded_demo_answers_are_those_of_the_reference() {
    let expected: Value =
        serde_json::from_str(include_str!("fixtures/demo/expected.json")).unwrap();
    let spread = 2.0 * expected["spread_worst"].as_f64().unwrap();
    for (prompt, answer) in DEMO_ANSWERS {
        let prompts = expected["prompts"].as_array().unwrap();
        let known = prompts
            .iter()
            .find(|known| known["prompt"] == serde_json::json!(prompt));
        let known = known.expect("the reference has this prompt");
        let continuation = known["continuation"].as_array().unwrap();
        assert_eq!(
            continuation[..answer.len()],
            *serde_json::json!(answer).as_array().unwrap()
        );
        let margins = &known["margins"].as_array().unwrap()[..answer.len()];
        assert!(
            margins
                .iter()
                .all(|margin| margin.as_f64().unwrap() > spread)
        );
    }
}

/// A benchmark that samples on one thread would be slower than the server.
#[test]
fn a_measured_model_samples_on_all_threads() {
    let mut subject = Subject::new(toy::model(2));
    let mut kv_store = Model::new_kv_store(subject.model(), 1).unwrap();
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 0, &[1, 2], &[Page::new(0)], 1);
    assert_eq!(subject.forward(&batch, &mut kv_store).workers(), 2);
}

#[test]
fn the_report_has_all_figures_and_says_why_some_are_missing() {
    let kernels = Kernels::new(Isa::best()).unwrap();
    let model = toy::model(2);
    let page = model.kv_bytes_per_page();
    let grid = Grid {
        streams: vec![1, 12, 4000],
        depths: vec![40, 2000],
        prompts: vec![600, 5000],
        kv_bytes: 200 * page,
        effort: ONCE,
    };
    let probe = LimitsProbe::smoke(kernels, 2);
    let card = ModelInfo::of("toy", &model);
    let report = BenchReport {
        version: "0",
        machine: MachineInfo {
            cpu: "a cpu".to_owned(),
            isa: kernels.isa().to_string(),
            threads: 2,
            probe_bytes: probe.bytes(),
        },
        model: card,
        checks: vec!["a check".to_owned()],
        rows: measure(
            &mut Subject::new(model),
            &grid,
            &probe,
            &ProgressBar::hidden(),
        ),
    };
    let json = serde_json::to_value(&report).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), grid.figures());
    let decode = |streams, depth, skipped| ("decode".to_owned(), streams, depth, 0, skipped);
    let expected = [
        decode(1, 40, false),
        decode(12, 40, false),
        decode(4000, 40, true),
        decode(1, 2000, true),
        decode(12, 2000, true),
        decode(4000, 2000, true),
        ("prefill".to_owned(), 0, 0, 600, false),
        ("prefill".to_owned(), 0, 0, 5000, true),
    ];
    assert_eq!(rows.iter().map(named).collect::<Vec<_>>(), expected);
    assert_measured(&rows[1]);
    assert_eq!(rows[6]["steps"], 2, "600 tokens need two steps");
    assert!(rows[2]["skipped"].as_str().unwrap().contains("GB"));
    assert!(rows[3]["skipped"].as_str().unwrap().contains("1024 tokens"));
    assert_eq!(json["machine"]["threads"], 2);
    assert!(json["model"]["bits_per_weight"].as_f64().unwrap() >= 1.6);

    let table = report.to_string();
    for text in [
        "a cpu",
        "decode  12 at 40",
        "prefill 600",
        "roofline",
        "a check",
    ] {
        assert!(table.contains(text), "{text} is not in\n{table}");
    }
}

/// Returns what a figure measures, and whether it was left out.
fn named(row: &Value) -> (String, u64, u64, u64, bool) {
    let number = |name| row[name].as_u64().unwrap_or(0);
    (
        row["kind"].as_str().unwrap().to_owned(),
        number("streams"),
        number("depth"),
        number("tokens"),
        row["skipped"].is_string(),
    )
}

fn assert_measured(row: &Value) {
    let positive = |value: &Value| assert!(value.as_f64().unwrap() > 0.0, "{row}");
    for name in ["median", "min", "max"] {
        positive(&row["tokens_per_second"][name]);
    }
    for name in ["gigabytes_per_second", "gigaops_per_second"] {
        positive(&row["limits"][name]);
    }
    positive(&row["roofline"]);
    assert!(["bandwidth", "int8"].contains(&row["bound"].as_str().unwrap()));
    for part in ["plan", "forward", "sample", "commit"] {
        positive(&row["parts_ms"][part]);
    }
    let stages = row["parts_ms"]["stages"].as_object().unwrap();
    let forward: f64 = stages.values().map(|spent| spent.as_f64().unwrap()).sum();
    assert!(stages.contains_key("products") && stages.contains_key("head"));
    assert!(forward <= row["parts_ms"]["forward"].as_f64().unwrap());
}

#[test]
fn an_unwritable_report_fails_before_anything_is_measured() {
    let sterna = |flags: &[&str]| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_sterna"));
        program.arg("bench").args(flags).output().unwrap()
    };
    let refused = sterna(&["--json", "/no/such/folder/report.json"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(refused.stdout.is_empty());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("/no/such/folder/report.json"));
    let absent = sterna(&["--model", "/no/such/folder"]);
    assert_eq!(absent.status.code(), Some(2));
}
