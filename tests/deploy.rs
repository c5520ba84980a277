//! Checks that the files in `deploy/` agree with the program: routes, flags and times.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use clap::{CommandFactory, Parser};
use serde_json::Value;
use sterna::api::{self, App};
use sterna::config::{Cli, Command};
use tower::ServiceExt;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

fn text(file: &str) -> String {
    fs::read_to_string(folder().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn yaml(file: &str) -> Value {
    serde_yaml_ng::from_str(&text(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the pods' description.
fn pod() -> Value {
    yaml("kubernetes/deployment.yaml")["spec"]["template"]["spec"].clone()
}

/// Returns the environment variables of the container.
fn variables(pod: &Value) -> Vec<(&str, &str)> {
    let variables = pod["containers"][0]["env"].as_array().unwrap().iter();
    variables
        .map(|one| {
            (
                one["name"].as_str().unwrap(),
                one["value"].as_str().unwrap(),
            )
        })
        .collect()
}

/// Returns the number after `name=` in the unit.
fn unit_seconds(name: &str) -> u64 {
    let unit = text("sterna.service");
    let mut lines = unit.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap().parse().unwrap()
}

/// Reads a command line as the program does.
fn parsed<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Cli {
    Cli::try_parse_from(arguments).unwrap()
}

#[test]
fn the_base_lists_all_its_files() {
    let listed: BTreeSet<String> =
        serde_json::from_value(yaml("kubernetes/kustomization.yaml")["resources"].clone()).unwrap();
    let present = fs::read_dir(folder().join("kubernetes")).unwrap();
    let present: BTreeSet<String> = present
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "kustomization.yaml")
        .collect();
    assert_eq!(listed, present);
    for file in listed {
        let resource = yaml(&format!("kubernetes/{file}"));
        assert_eq!(resource["metadata"]["name"], "sterna", "{file}");
    }
}

#[tokio::test]
async fn probes_and_scrapes_ask_routes_that_exist() {
    let container = pod()["containers"][0].clone();
    let probes = ["startupProbe", "readinessProbe", "livenessProbe"];
    let mut paths: Vec<Value> = probes
        .iter()
        .map(|probe| container[probe]["httpGet"]["path"].clone())
        .collect();
    assert_eq!(paths, ["/ready", "/ready", "/health"]);
    paths.push(yaml("kubernetes/service-monitor.yaml")["spec"]["endpoints"][0]["path"].clone());
    for path in paths {
        let request = Request::get(path.as_str().unwrap()).body(Body::empty());
        let answer = api::router(App::loading()).oneshot(request.unwrap()).await;
        assert_ne!(answer.unwrap().status(), StatusCode::NOT_FOUND, "{path}");
    }
}

#[test]
fn every_variable_is_a_flag() {
    let pod = pod();
    // Kubernetes would set STERNA_PORT to the URL of the Service.
    assert_eq!(pod["enableServiceLinks"], false);
    let dockerfile = text("Dockerfile");
    let line = dockerfile
        .lines()
        .find_map(|line| line.strip_prefix("ENV "));
    let image = line
        .unwrap()
        .split(' ')
        .map(|word| word.split_once('=').unwrap().0);
    let pod_variables = variables(&pod);
    let command = Cli::command();
    for variable in image.chain(pod_variables.into_iter().map(|(name, _)| name)) {
        let flag = variable
            .strip_prefix("STERNA_")
            .unwrap()
            .to_lowercase()
            .replace('_', "-");
        let mut flags = command.get_arguments().filter_map(|flag| flag.get_long());
        assert!(flags.any(|known| known == flag), "{variable}");
    }
}

#[test]
fn the_commands_of_the_image_and_of_the_unit_are_understood() {
    let dockerfile = text("Dockerfile");
    let json = |after: &str| -> Vec<String> {
        let mut lines = dockerfile.lines();
        let line = lines.find_map(|line| line.trim().strip_prefix(after));
        serde_json::from_str(line.unwrap()).unwrap()
    };
    assert_eq!(json("ENTRYPOINT "), ["/usr/local/bin/sterna"]);
    let check = json("CMD ");
    let check = parsed(check.iter().map(String::as_str)).command;
    assert!(matches!(check, Some(Command::Healthcheck(_))), "{check:?}");
    let unit = text("sterna.service");
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let start = parsed(start.unwrap().split(' '));
    assert!(start.serve.operation.log_json);
}

#[test]
fn a_server_may_drain_before_it_is_killed() {
    let pod = pod();
    let variables = variables(&pod);
    let drain = variables
        .iter()
        .find(|(name, _)| *name == "STERNA_DRAIN_SECONDS");
    let drain: u64 = drain.unwrap().1.parse().unwrap();
    let before = &pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"];
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace >= before.as_u64().unwrap() + drain + 10, "{grace}");
    let drain = parsed(["sterna"]).serve.operation.drain_seconds;
    assert!(unit_seconds("TimeoutStopSec") >= drain + 10);
}

/// `tests/dashboards.rs` checks the rules themselves, and the query of the scaling.
#[test]
fn the_rules_of_kubernetes_are_those_of_the_dashboards() {
    let rules = yaml("kubernetes/prometheus-rule.yaml");
    assert_eq!(rules["spec"], yaml("../dashboards/rules.yml"));
}
