//! `sterna bench` times nothing that computes wrong, and reports what it says it does.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::process::Command;

use indicatif::ProgressBar;
use serde_json::Value;
use sterna::bench::{
    DEMO_ANSWERS, Effort, Grid, Machine, ModelCard, Probe, Report, Subject,
    company_changes_nothing, demo_answers, equal_models, measure,
};
use sterna::engine::{Forward, LogitRows};
use sterna::model::{KvStore, LoadOptions, Model, toy};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, Page, SequenceId};

/// A model whose last row of logits is wrong in some steps.
struct Corrupted {
    model: Model,
    is_wrong: fn(&Batch) -> bool,
    error: Error,
}

#[derive(Clone, Copy)]
enum Error {
    /// Another token is drawn.
    Token,
    /// The same token is drawn, from logits that differ by a bit or two.
    Bits,
    /// No token can be drawn.
    NotANumber,
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

    fn new_kv_store(&self, pages: usize) -> KvStore {
        self.model.new_kv_store(pages)
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
                Error::Token => last.reverse(),
                Error::Bits => {
                    let least = last.iter_mut().min_by(|a, b| a.total_cmp(b)).unwrap();
                    *least += 1.0;
                }
                Error::NotANumber => last[7] = f32::NAN,
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

fn with_company(batch: &Batch) -> bool {
    batch.rows().len() > 1
}

fn in_a_later_chunk(batch: &Batch) -> bool {
    batch
        .rows()
        .iter()
        .any(|row| row.start > 0 && row.len() > 1)
}

#[test]
fn a_wrong_demo_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool, error| {
        let mut demo = Corrupted {
            model: demo(),
            is_wrong,
            error,
        };
        demo_answers(&mut demo)
    };
    assert_eq!(check(never, Error::Token), Ok(()));
    let mismatch = check(always, Error::Token).unwrap_err();
    assert_eq!((mismatch.prompt, mismatch.token), (0, 0));
    assert_eq!(mismatch.expected, Some(DEMO_ANSWERS[0].1[0]));
    assert!(
        mismatch.to_string().contains("nothing was timed"),
        "{mismatch}"
    );
    let mismatch = check(always, Error::NotANumber).unwrap_err();
    assert_eq!(mismatch.computed, None);
}

#[test]
fn an_instruction_set_that_is_off_by_bits_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool, error| {
        let mut toy = Corrupted {
            model: toy::model(2),
            is_wrong,
            error,
        };
        equal_models(&mut toy, &mut toy::model(1))
    };
    assert_eq!(check(never, Error::Bits), Ok(()));
    let mismatch = check(always, Error::Bits).unwrap_err();
    assert_eq!(mismatch.expected, mismatch.computed);
    assert!(
        mismatch.to_string().contains("another log-probability"),
        "{mismatch}"
    );
    assert!(check(always, Error::Token).is_err());
    assert!(check(always, Error::NotANumber).is_err());
}

#[test]
fn a_model_whose_answers_depend_on_company_is_refused() {
    let check = |is_wrong: fn(&Batch) -> bool| {
        let mut toy = Corrupted {
            model: toy::model(2),
            is_wrong,
            error: Error::Bits,
        };
        company_changes_nothing(&mut toy)
    };
    assert_eq!(check(never), Ok(()));
    let mismatch = check(with_company).unwrap_err();
    assert_eq!(mismatch.check, "alone and batched");
    let mismatch = check(in_a_later_chunk).unwrap_err();
    assert_eq!(mismatch.check, "alone and chunked");
}

/// What is committed in the program is what the reference says, as far as its lead is beyond what rounding may change.
#[test]
fn the_committed_answers_are_the_references() {
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

/// Else drawing would take as many times longer here than in a server.
#[test]
fn what_is_measured_draws_on_all_threads() {
    let mut subject = Subject::new(toy::model(2));
    let mut kv_store = subject.new_kv_store(1);
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 0, &[1, 2], &[Page::new(0)], 1);
    assert_eq!(subject.forward(&batch, &mut kv_store).workers(), 2);
}

#[test]
fn the_report_has_a_row_for_each_figure_and_says_why_one_is_missing() {
    let kernels = Kernels::new(Isa::best()).unwrap();
    let model = toy::model(2);
    let page = model.kv_bytes_per_page();
    let grid = Grid {
        streams: vec![1, 12, 4000],
        depths: vec![40, 2000],
        prompts: vec![600, 5000],
        kv_bytes: 200 * page,
        effort: Effort::SMOKE,
    };
    let probe = Probe::smoke(kernels, 2);
    let card = ModelCard::of("toy", &model);
    let report = Report {
        version: "0",
        machine: Machine {
            cpu: "a cpu".to_owned(),
            isa: kernels.isa().to_string(),
            threads: 2,
            probe_bytes: probe.bytes(),
        },
        model: card,
        checks: vec!["held".to_owned()],
        rows: measure(
            &mut Subject::new(model),
            &grid,
            &probe,
            &ProgressBar::hidden(),
        ),
    };
    let json = serde_json::to_value(&report).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), grid.rows());
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
    assert_eq!(rows[6]["steps"], 2, "600 tokens are more than a step takes");
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
        "held",
    ] {
        assert!(table.contains(text), "{text} is not in\n{table}");
    }
}

/// What a row is of, and whether it was left out.
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
fn a_report_that_cannot_be_written_is_refused_before_anything_is_measured() {
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
