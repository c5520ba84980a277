//! What a report says about its run beside the figures, so that a reader can judge and repeat it.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, SecondsFormat};
use serde::Serialize;
use serde_json::Value;

/// What a server tells beside its settings: its state, and what the report says already.
const KNOWN: [&str; 7] = [
    "engine",
    "model_name",
    "model_path",
    "served_model_name",
    "status",
    "tokenizer_path",
    "version",
];

/// The circumstances of a run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RunFacts {
    /// The model that was requested.
    pub(super) model: String,
    /// The version of the server, if it tells one.
    pub(super) server_version: Option<String>,
    /// The settings that the server tells, by name.
    pub(super) server_settings: BTreeMap<String, String>,
    /// The machine of the load test: its processor, its cores and its system.
    pub(super) machine: String,
    /// When the run started.
    pub(super) date: String,
    /// Which requests were sent.
    pub(super) workload: String,
    /// The command of the load test.
    pub(super) command: String,
}

/// What a server tells about itself: the answers of `/version`, `/server_info` and `/metrics`, if
/// it has them.
#[derive(Default)]
pub(super) struct ServerAnswers {
    pub(super) version: Option<Value>,
    pub(super) info: Option<Value>,
    pub(super) metrics: Option<String>,
}

impl RunFacts {
    /// Returns the facts of a run that starts now.
    pub(super) fn now(model: &str, workload: String, server: &ServerAnswers) -> RunFacts {
        let version = |answer: &Option<Value>| Some(answer.as_ref()?["version"].as_str()?.into());
        RunFacts {
            model: model.to_owned(),
            server_version: version(&server.version).or_else(|| version(&server.info)),
            server_settings: server.settings(),
            machine: machine(),
            date: date(SystemTime::now()),
            workload,
            command: command(env::args()),
        }
    }

    /// Returns the names and values of the facts, except the settings of the server.
    pub(super) fn rows(&self) -> [(&'static str, &str); 6] {
        [
            ("model", &self.model),
            (
                "server version",
                self.server_version.as_deref().unwrap_or("not told"),
            ),
            ("machine of the load test", &self.machine),
            ("date", &self.date),
            ("workload", &self.workload),
            ("command", &self.command),
        ]
    }
}

impl ServerAnswers {
    /// Returns the values in the server's information and the labels of its info metrics. Lists
    /// and objects are left out: they are the state of the server.
    fn settings(&self) -> BTreeMap<String, String> {
        let fields = self.info.iter().filter_map(Value::as_object).flatten();
        let told = fields.filter_map(|(name, value)| match value {
            Value::String(text) => Some((name.clone(), text.clone())),
            Value::Number(_) | Value::Bool(_) => Some((name.clone(), value.to_string())),
            _ => None,
        });
        let lines = self.metrics.iter().flat_map(|text| text.lines());
        let labels = lines.filter_map(info_labels).flatten();
        let mut settings: BTreeMap<String, String> = labels.chain(told).collect();
        for known in KNOWN {
            settings.remove(known);
        }
        settings
    }
}

/// Returns the labels of a line of Prometheus's text format, if the line is of an info metric.
fn info_labels(line: &str) -> Option<Vec<(String, String)>> {
    let (name, rest) = line.split_once('{')?;
    let (labels, _) = rest.rsplit_once('}')?;
    let pairs = labels
        .split("\",")
        .filter_map(|pair| pair.split_once("=\""));
    let pairs = pairs.map(|(label, value)| (label.into(), value.trim_end_matches('"').into()));
    name.ends_with("_info").then(|| pairs.collect())
}

fn machine() -> String {
    let cores = available_parallelism().map_or(0, usize::from);
    let known = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |line: &str| {
        Some(
            line.strip_prefix("model name")?
                .split_once(": ")?
                .1
                .to_owned(),
        )
    };
    let processor = known.lines().find_map(named);
    let processor = processor.unwrap_or_else(|| env::consts::ARCH.to_owned());
    format!("{processor}, {cores} cores, {}", env::consts::OS)
}

fn date(time: SystemTime) -> String {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let date = DateTime::from_timestamp(seconds.cast_signed(), 0).unwrap_or_default();
    date.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Returns a command as a shell reads it. The program has no folder.
fn command(mut arguments: impl Iterator<Item = String>) -> String {
    let program = arguments.next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default();
    let is_plain = |text: &str| {
        let plain = |c: char| c.is_alphanumeric() || "-_./:,=+@%".contains(c);
        !text.is_empty() && text.chars().all(plain)
    };
    let quoted = arguments.map(|text| match is_plain(&text) {
        true => text,
        false => format!("'{}'", text.replace('\'', "'\\''")),
    });
    let words: Vec<String> = [program.to_string_lossy().into_owned()]
        .into_iter()
        .chain(quoted)
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_server_tells_its_version_and_its_settings() {
        let info = r#"{"version":"1.2","status":"ready","page_size":16,"internal_states":[{}]}"#;
        let metrics = "# HELP x_info y\nx_info{version=\"1.2\",isa=\"avx2\",a=\"b,c\"} 1\n\
                       tokens{kind=\"d\"} 1\n";
        let server = ServerAnswers {
            version: None,
            info: serde_json::from_str(info).ok(),
            metrics: Some(metrics.into()),
        };
        let facts = RunFacts::now("m", "w".into(), &server);
        assert_eq!(facts.server_version.as_deref(), Some("1.2"));
        let settings: Vec<String> = (facts.server_settings.iter())
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(settings, ["a=b,c", "isa=avx2", "page_size=16"]);
        let silent = RunFacts::now("m", "w".into(), &ServerAnswers::default());
        assert!(silent.server_version.is_none() && silent.server_settings.is_empty());
    }

    #[test]
    fn a_command_can_be_repeated_in_a_shell() {
        let words = ["/usr/bin/load", "--only", "it's", "--url", "http://a:1", ""];
        let command = command(words.map(str::to_owned).into_iter());
        assert_eq!(command, r"load --only 'it'\''s' --url http://a:1 ''");
    }

    #[test]
    fn a_date_is_in_utc() {
        let time = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        assert_eq!(date(time), "2001-09-09T01:46:40Z");
    }
}
