//! Checks that dashboards and rules query only exported metrics, and that every metric has a panel.
//!
//! The test reads the metrics from the text of a new registry. Prometheus scrapes the same text,
//! so kinds and labels agree.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "harness/promql.rs"]
mod promql;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use promql::Selector;
use serde_json::Value;
use sterna::engine::{Rate, TenantId, TenantPolicy};
use sterna::metrics::{Identity, Metrics, names};

/// The names and labels of series that rules and Prometheus itself make.
const RULE_LABELS: [&str; 1] = ["model_name"];

/// Labels that Prometheus adds to every series it scrapes.
const SCRAPE_LABELS: [&str; 2] = ["instance", "job"];

const RATE: Rate = Rate {
    per_minute: 1,
    burst: 1,
};

/// The functions that apply only to counters.
const COUNTER_FUNCTIONS: [&str; 3] = ["rate", "increase", "irate"];

/// The query of a panel or of a variable, and its place in the dashboard.
struct Query {
    place: String,
    promql: String,
}

/// The kind and the labels of one exported metric.
#[derive(Default)]
struct Exported {
    kind: String,
    labels: BTreeSet<String>,
}

type Catalogue = BTreeMap<String, Exported>;

#[test]
fn every_query_parses_and_names_only_exported_metrics() {
    let catalogue = catalogue_with_rules();
    for query in queries().into_iter().chain(rules()) {
        check(&query, &catalogue)
            .unwrap_or_else(|problem| panic!("{}: {problem}\n  {}", query.place, query.promql));
    }
}

#[test]
fn every_metric_has_a_panel() {
    let catalogue = catalogue();
    let mut shown = BTreeSet::new();
    for query in queries() {
        shown.extend(check(&query, &catalogue).unwrap());
    }
    let missing: Vec<&str> = names()
        .into_iter()
        .filter(|name| !shown.contains(*name))
        .collect();
    assert!(missing.is_empty(), "no panel shows {missing:?}");
}

#[test]
fn wrong_queries_are_found() {
    let catalogue = catalogue();
    let problem = |promql: &str| {
        check(
            &Query {
                place: String::new(),
                promql: promql.into(),
            },
            &catalogue,
        )
        .unwrap_err()
    };
    assert!(problem("sum(rate(vllm:nothing_total[1m]))").contains("not exported"));
    assert!(problem("vllm:time_to_first_token_seconds").contains("histogram"));
    assert!(problem("rate(vllm:num_requests_running_bucket[1m])").contains("not exported"));
    assert!(problem("sum(vllm:generation_tokens_total)").contains("is a counter"));
    assert!(problem("rate(vllm:num_requests_running[1m])").contains("is not a counter"));
    assert!(
        problem("sum by (reason) (rate(vllm:request_success_total[1m]))")
            .contains("a label reason")
    );
    assert!(problem("sterna_kv_pages{status=\"free\"}").contains("label status"));
    assert!(problem("sum(rate(vllm:generation_tokens_total[1m])").contains("does not parse"));
}

#[test]
fn broken_queries_do_not_parse() {
    let catalogue = catalogue();
    for promql in [
        "",
        "sum(up",
        "sum up)",
        "sum(up))",
        "up{job=\"x\"",
        "up{job=\"x}",
        "up{job}",
        "up{job=x}",
        "up{job==\"x\"}",
        "up{job=\"x\" instance=\"y\"}",
        "rate(up[5m)",
        "rate(up[5])",
        "rate(up[m])",
        "rate(up)",
        "rate(5)",
        "rate(sum(up))",
        "rate(up[5m] + up[5m])",
        "sum(up[5m])",
        "up[5m]",
        "total(up)",
        "sum()",
        "sum(up, up)",
        "histogram_quantile(up)",
        "sum by (job (up)",
        "sum by job (up)",
        "rate by (job) (up[5m])",
        "up +",
        "up up",
        "/ up",
        "1.2.3 * up",
        "up # 1",
    ] {
        let place = String::new();
        let promql = promql.to_owned();
        let query = Query { place, promql };
        let problem = check(&query, &catalogue).unwrap_err();
        assert!(
            problem.starts_with("does not parse: "),
            "{}: {problem}",
            query.promql
        );
    }
}

#[test]
fn panels_have_descriptions_and_data_sources_and_do_not_overlap() {
    for (name, dashboard) in dashboards() {
        let mut ids = BTreeSet::new();
        let mut cells = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            assert!(
                ids.insert(panel["id"].as_u64().unwrap()),
                "{name}: {title}: the id is taken"
            );
            let grid = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
            let [x, y, width, height] = grid;
            assert!(x + width <= 24, "{name}: {title}: too wide");
            for cell in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
                assert!(
                    cells.insert(cell),
                    "{name}: {title}: overlaps another panel at {cell:?}"
                );
            }
            if panel["type"] != "row" {
                assert_eq!(
                    panel["datasource"]["uid"], "${DS_PROMETHEUS}",
                    "{name}: {title}"
                );
                let description = panel["description"].as_str().unwrap_or_default();
                assert!(
                    description.ends_with('.'),
                    "{name}: {title}: needs a description in sentences"
                );
            }
        }
    }
}

#[test]
fn every_picture_has_the_panels_of_its_dashboard() {
    for (name, dashboard) in dashboards() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
        let picture = fs::read_to_string(path.join(name.replace(".json", ".svg"))).unwrap();
        let texts: BTreeSet<&str> = picture
            .split("class=\"title\"")
            .skip(1)
            .map(|rest| rest.split(['>', '<']).nth(1).unwrap())
            .collect();
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            let heading = format!("▾ {title}");
            assert!(
                texts.contains(title) || texts.contains(&*heading),
                "the picture of {name} has no {title}: draw it again with \
                 tests/clients/prometheus/run.sh --pictures"
            );
        }
        assert_eq!(
            texts.len(),
            dashboard["panels"].as_array().unwrap().len(),
            "{name}"
        );
    }
}

#[test]
fn every_dashboard_links_to_the_others() {
    let dashboards = dashboards();
    assert_eq!(dashboards.len(), 3);
    for (name, dashboard) in &dashboards {
        let links = dashboard["links"].as_array().unwrap();
        let linked: BTreeSet<&str> = links.iter().map(|l| l["url"].as_str().unwrap()).collect();
        for (other_name, other) in dashboards.iter().filter(|(other, _)| other != name) {
            let url = format!("/d/{}", other["uid"].as_str().unwrap());
            assert!(linked.contains(&*url), "{name} has no link to {other_name}");
        }
    }
}

#[test]
fn every_alert_has_a_firing_and_a_quiet_test() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/rules_test.yml");
    let text = fs::read_to_string(path).unwrap();
    for alert in rule_values("- alert: ") {
        for ending in ["\n        exp_alerts:\n", "\n        exp_alerts: []\n"] {
            let test = format!("alertname: {alert}{ending}");
            assert!(text.contains(&test), "rules_test.yml lacks {test:?}");
        }
    }
}

#[test]
fn compose_mounts_files_that_exist_and_every_dashboard() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
    let text = fs::read_to_string(folder.join("compose.yml")).unwrap();
    let compose: Value = serde_yaml_ng::from_str(&text).unwrap();
    let services = compose["services"].as_object().unwrap().values();
    let volumes = services.flat_map(|service| service["volumes"].as_array().into_iter().flatten());
    let mounts: BTreeSet<&str> = volumes
        .filter_map(|volume| volume.as_str().unwrap().strip_prefix("./"))
        .map(|mount| mount.split_once(':').unwrap().0)
        .collect();
    for mount in &mounts {
        assert!(folder.join(mount).exists(), "{mount} is missing");
    }
    for (name, _) in dashboards() {
        assert!(mounts.contains(&*name), "Grafana does not see {name}");
    }
    let build = &compose["services"]["sterna"]["build"];
    let context = folder.join(build["context"].as_str().unwrap());
    let dockerfile = context.join(build["dockerfile"].as_str().unwrap());
    assert!(dockerfile.exists());
    // Prometheus calls the server by this name. A server without keys refuses unknown names.
    let allowed = &compose["services"]["sterna"]["environment"]["STERNA_ALLOWED_HOST"];
    let prometheus = fs::read_to_string(folder.join("prometheus.yml")).unwrap();
    let target = format!("targets: [\"{}:30000\"]", allowed.as_str().unwrap());
    assert!(prometheus.contains(&target), "{target}");
}

/// KEDA scales by a query too.
#[test]
fn scaling_names_exported_metrics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes/scaled-object.yaml");
    let object: Value = serde_yaml_ng::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let trigger = &object["spec"]["triggers"][0];
    let query = |promql: &str| Query {
        place: "scaled-object.yaml".into(),
        promql: promql.into(),
    };
    let catalogue = catalogue_with_rules();
    let promql = trigger["metadata"]["query"].as_str().unwrap();
    check(&query(promql), &catalogue).unwrap();
    let wrong = "sum(vllm:num_requests_waiting) / up > rate(sterna_nothing_total[5m])";
    assert_eq!(
        check(&query(wrong), &catalogue).unwrap_err(),
        "sterna_nothing_total is not exported"
    );
}

#[test]
fn the_readme_lists_every_panel() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/README.md");
    let readme = fs::read_to_string(path).unwrap();
    for (name, dashboard) in dashboards() {
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            let entry = match panel["type"].as_str() {
                Some("row") => format!("\n## {title}\n"),
                _ => format!("\n| {title} | "),
            };
            assert!(
                readme.contains(&entry),
                "{name}: dashboards/README.md does not list {title}"
            );
        }
    }
}

/// Returns the metrics that `query` names, or the problem with it.
fn check(query: &Query, catalogue: &Catalogue) -> Result<BTreeSet<String>, String> {
    let queried =
        promql::read(&query.promql).map_err(|problem| format!("does not parse: {problem}"))?;
    let shown = queried.selectors.iter();
    let shown: BTreeSet<String> = shown
        .map(|selector| check_selector(selector, catalogue))
        .collect::<Result<_, _>>()?;
    for label in &queried.grouped_by {
        let known = shown.iter().all(|name| catalogue[name].has_label(label));
        if !known {
            return Err(format!(
                "groups by a label {label} that {shown:?} does not have"
            ));
        }
    }
    if shown.is_empty() {
        return Err("names no metric".into());
    }
    Ok(shown)
}

/// Returns the metric that `selector` selects, or what is wrong with its name, labels or function.
fn check_selector(selector: &Selector, catalogue: &Catalogue) -> Result<String, String> {
    let name = &selector.name;
    let (metric, exported) = resolve(name, catalogue)?;
    for label in &selector.labels {
        if !exported.has_label(label) {
            return Err(format!("{name} has no label {label}"));
        }
    }
    match selector.range_function {
        None if exported.is_counter() => Err(format!("{name} is a counter: query its rate")),
        Some(function) if COUNTER_FUNCTIONS.contains(&function) && !exported.is_counter() => Err(
            format!("{name} is not a counter: {function} does not apply"),
        ),
        _ => Ok(metric),
    }
}

/// Returns the metric that a series belongs to. The series of a histogram belong to it.
fn resolve<'a>(name: &str, catalogue: &'a Catalogue) -> Result<(String, &'a Exported), String> {
    if let Some(exported) = catalogue.get(name) {
        if exported.kind == "histogram" {
            return Err(format!(
                "{name} is a histogram: query its _bucket, _sum or _count"
            ));
        }
        return Ok((name.to_owned(), exported));
    }
    let parts = ["_bucket", "_sum", "_count"];
    let base = parts
        .iter()
        .find_map(|part| name.strip_suffix(part))
        .unwrap_or(name);
    match catalogue.get(base) {
        Some(exported) if exported.kind == "histogram" => Ok((base.to_owned(), exported)),
        _ => Err(format!("{name} is not exported")),
    }
}

impl Exported {
    /// Returns whether the metric's series are counters. The series of a histogram are counters.
    fn is_counter(&self) -> bool {
        self.kind != "gauge"
    }

    fn has_label(&self, label: &str) -> bool {
        self.labels.contains(label) || SCRAPE_LABELS.contains(&label)
    }
}

/// Returns all metrics of a new registry, with their kinds and labels.
fn catalogue() -> Catalogue {
    let identity = Identity {
        model_name: "toy".into(),
        isa: "scalar".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: 8,
        page_tokens: 16,
    };
    let metrics = Metrics::new(&identity);
    // Limits have a series only if the tenant has them.
    let tenant = TenantId(1);
    let policy = TenantPolicy {
        max_running: 1,
        max_queued: 1,
        guaranteed_pages: 1,
        max_pages: 1,
        requests: Some(RATE),
        tokens: Some(RATE),
        ..TenantPolicy::default()
    };
    metrics.set_tenants(&[(tenant, "acme".into())], vec![(tenant, policy)]);
    let text = metrics.render();
    let mut catalogue = Catalogue::new();
    for line in text.lines() {
        if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            catalogue.insert(
                name.to_owned(),
                Exported {
                    kind: kind.to_owned(),
                    labels: BTreeSet::new(),
                },
            );
        }
    }
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, labels)) = line.split_once('{') else {
            continue;
        };
        // A series of a histogram belongs to the longest exported name that it starts with.
        let metric = catalogue
            .keys()
            .filter(|name| series.starts_with(name.as_str()))
            .max_by_key(|name| name.len());
        let metric = metric
            .unwrap_or_else(|| panic!("{series} has no type"))
            .clone();
        let labels = labels
            .split(',')
            .filter_map(|label| label.split_once("=\""))
            .map(|(name, _)| name.to_owned());
        catalogue.get_mut(&metric).unwrap().labels.extend(labels);
    }
    assert_eq!(catalogue.len(), names().len(), "{text}");
    catalogue
}

/// Returns all metrics of the server, the series that rules record, and Prometheus's own `up`.
fn catalogue_with_rules() -> Catalogue {
    let mut catalogue = catalogue();
    let recorded = rule_values("record: ");
    assert!(!recorded.is_empty());
    for name in recorded {
        let labels = RULE_LABELS.map(str::to_owned).into();
        let kind = "gauge".to_owned();
        catalogue.insert(name, Exported { kind, labels });
    }
    let kind = "gauge".to_owned();
    let labels = BTreeSet::new();
    catalogue.insert("up".into(), Exported { kind, labels });
    catalogue
}

/// Returns the query of every rule.
fn rules() -> Vec<Query> {
    let expressions = rule_values("expr: ");
    let names = rule_values("record: ").len() + rule_values("- alert: ").len();
    assert_eq!(expressions.len(), names, "an expression is not on one line");
    let queries = expressions.into_iter().map(|promql| Query {
        place: "rules.yml".into(),
        promql,
    });
    queries.collect()
}

/// Returns the values of one key in the rules. Each is on one line.
fn rule_values(key: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/rules.yml");
    let text = fs::read_to_string(path).unwrap();
    let values = text.lines().filter_map(|line| line.split_once(key));
    values.map(|(_, value)| value.to_owned()).collect()
}

/// Returns every query of every dashboard, with Grafana's variables replaced by values.
fn queries() -> Vec<Query> {
    let mut queries = Vec::new();
    for (name, dashboard) in dashboards() {
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let place = format!("{name}: {} {}", panel["title"], target["refId"]);
                queries.push(Query {
                    place,
                    promql: fill_in(target["expr"].as_str().unwrap()),
                });
            }
        }
        for variable in dashboard["templating"]["list"].as_array().unwrap() {
            let place = format!("{name}: variable {}", variable["name"]);
            // `label_values(selector, label)` is a Grafana function; its selector is PromQL.
            if let Some(call) = variable["query"]["query"].as_str() {
                let arguments = call
                    .strip_prefix("label_values(")
                    .and_then(|rest| rest.strip_suffix(')'));
                let (selector, label) = arguments
                    .and_then(|arguments| arguments.rsplit_once(", "))
                    .unwrap();
                let promql = format!("sum by ({label}) ({})", fill_in(selector));
                queries.push(Query { place, promql });
            }
        }
    }
    assert!(
        queries.len() > 20,
        "the walk found only {} queries",
        queries.len()
    );
    queries
}

fn fill_in(promql: &str) -> String {
    let filled = promql
        .replace("$__rate_interval", "1m")
        .replace("$model_name", ".*")
        .replace("$instance", ".*")
        .replace("$tenant", ".*")
        .replace("$top", "10");
    assert!(!filled.contains('$'), "an unknown variable in {promql}");
    filled
}

fn dashboards() -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
    let mut dashboards = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".json") {
            let text = fs::read_to_string(&path).unwrap();
            let dashboard =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
            dashboards.push((name, dashboard));
        }
    }
    assert!(!dashboards.is_empty());
    dashboards
}
