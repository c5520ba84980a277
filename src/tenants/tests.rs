//! Tests of the tenants file: correct files, files with one fault each, and reading a file again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::keys::KeyHash;
use super::*;
use crate::engine::{Band, PublicPrefix, Rate, TenantId, TenantPolicy, TenantsError};

const DEFAULTS: Defaults = Defaults {
    deadlines: Deadlines {
        first_token: None,
        total: Some(Duration::from_secs(600)),
    },
    max_queued: 64,
    max_queued_time: Duration::from_secs(15),
};

/// A tenants file that is deleted when the test ends.
struct TenantsFile(PathBuf);

impl TenantsFile {
    fn new(name: &str, text: &str) -> TenantsFile {
        let file = format!("sterna-tenants-{name}-{}.toml", std::process::id());
        let file = TenantsFile(std::env::temp_dir().join(file));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        fs::write(&self.0, text).unwrap();
    }

    fn open(&self) -> Result<Roster, FileError> {
        Roster::open(&self.0, DEFAULTS)
    }
}

impl Drop for TenantsFile {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

fn hash(key: &str) -> String {
    KeyHash::of(key.as_bytes()).to_hex()
}

fn table(id: &str, key: &str, more: &str) -> String {
    format!(
        "[[tenant]]\nid = \"{id}\"\nkey_sha256 = \"{}\"\n{more}\n",
        hash(key)
    )
}

fn number_of(roster: &Roster, key: &str) -> Option<u32> {
    let tenant = roster.tenants().find(Some(key.as_bytes()));
    tenant.map(|tenant| tenant.number.0)
}

#[test]
fn every_field_of_a_table_is_read() {
    let text = format!(
        r#"
        [[public_prefix]]
        name = "support"
        system = "You are the support bot."
        [[public_prefix]]
        name = "law"
        system = "You are no lawyer."

        [[tenant]]
        id = "acme"
        key_sha256 = ["{}", "{}"]
        weight = 4
        band = "interactive"
        requests_per_minute = 600
        tokens_per_minute = 100_000
        token_burst = 5000
        max_running = 16
        max_queued = 32
        max_queued_seconds = 30
        guaranteed_pages = 10
        max_pages = 500
        first_token_seconds = 5
        total_seconds = 60
        public = ["law", "support"]
        models = ["sterna-demo", "sk"]
        "#,
        hash("old"),
        hash("new").to_uppercase(),
    );
    let roster = TenantsFile::new("full", &text).open().unwrap();
    let expected = TenantPolicy {
        band: Band::Interactive,
        weight: 4,
        requests: Some(Rate {
            per_minute: 600,
            burst: 60,
        }),
        tokens: Some(Rate {
            per_minute: 100_000,
            burst: 5000,
        }),
        max_running: 16,
        max_queued: 32,
        max_queued_time: 30_000_000,
        guaranteed_pages: 10,
        max_pages: 500,
        public: vec![PublicPrefix(1), PublicPrefix(0)],
    };
    assert_eq!(roster.policies(), [(TenantId(1), expected)]);
    let names: Vec<&str> = roster
        .public()
        .iter()
        .map(|text| text.name.as_str())
        .collect();
    assert_eq!(names, ["support", "law"]);
    let deadlines = Deadlines {
        first_token: Some(Duration::from_secs(5)),
        total: Some(Duration::from_secs(60)),
    };
    for key in ["old", "new"] {
        let tenant = roster.tenants().find(Some(key.as_bytes())).unwrap();
        assert_eq!((tenant.id.as_str(), tenant.deadlines), ("acme", deadlines));
    }
}

#[test]
fn omitted_fields_have_defaults() {
    let text = table("a", "k", "tokens_per_minute = 500\nrequests_per_minute = 3");
    let roster = TenantsFile::new("short", &text).open().unwrap();
    let expected = TenantPolicy {
        requests: Some(Rate {
            per_minute: 3,
            burst: 1,
        }),
        tokens: Some(Rate {
            per_minute: 500,
            burst: 500,
        }),
        max_queued: 64,
        max_queued_time: 15_000_000,
        ..TenantPolicy::default()
    };
    assert_eq!(roster.policies(), [(TenantId(1), expected)]);
    let tenant = roster.tenants().find(Some(b"k")).unwrap();
    assert_eq!(tenant.deadlines, DEFAULTS.deadlines);
}

/// The text of a file, the line of its fault, and a part of the error.
type Faulty = (String, Option<usize>, &'static str);

fn shape_faults() -> Vec<Faulty> {
    let good = table("a", "k", "");
    vec![
        (String::new(), None, "no [[tenant]]"),
        ("# empty\n".into(), None, "no [[tenant]]"),
        ("[[tenant]]\nid = \"a\n".into(), Some(2), "string"),
        ("[[tenant]\n".into(), Some(1), "]"),
        (good.clone() + "colour = 3", Some(5), "colour"),
        (
            good.clone() + "weight = 1\nweight = 2",
            Some(6),
            "duplicate",
        ),
        (good.clone() + "[[tennant]]\n", Some(5), "tennant"),
        (
            good.clone() + &table("a", "l", ""),
            Some(6),
            "`a` is already used in line 2",
        ),
        (table("", "k", ""), Some(2), "letters"),
        (table("a b", "k", ""), Some(2), "letters"),
        (table("other", "k", ""), Some(2), "metrics"),
        (table("default", "k", ""), Some(2), "metrics"),
        (table(&"a".repeat(65), "k", ""), Some(2), "letters"),
        (good + "band = \"fast\"", Some(5), "`interactive`"),
    ]
}

fn key_faults() -> Vec<Faulty> {
    let key = |line: &str| format!("[[tenant]]\nid = \"a\"\n{line}\n");
    let (k, l) = (hash("k"), hash("l"));
    let short = "64 hexadecimal";
    vec![
        (key(""), Some(1), "key_sha256"),
        (format!("[[tenant]]\nkey_sha256 = \"{k}\""), Some(1), "`id`"),
        (key("key_sha256 = 5"), Some(3), "string"),
        (key("key_sha256 = []"), Some(3), "is empty"),
        (key("key_sha256 = \"abc\""), Some(3), short),
        (
            key(&format!("key_sha256 = \"{}\"", "g".repeat(64))),
            Some(3),
            short,
        ),
        (
            key(&format!("key_sha256 = \"{}\"", "é".repeat(32))),
            Some(3),
            short,
        ),
        (
            key(&format!("key_sha256 = [\n\"{k}\",\n\"{l}0\"\n]")),
            Some(5),
            short,
        ),
        (
            key(&format!("key_sha256 = [\"{k}\",\n\"{k}\"]")),
            Some(4),
            "line 3",
        ),
        (
            table("a", "k", "") + &table("b", "k", ""),
            Some(7),
            "already used in line 3",
        ),
        (
            table("a", "k", "") + &format!("[admin]\nkey_sha256 = \"{k}\"\n"),
            Some(3),
            "already used in line 6",
        ),
        ("[admin]\n".to_owned(), Some(1), "key_sha256"),
        ("[admin]\nid = \"x\"\n".to_owned(), Some(2), "key_sha256"),
    ]
}

fn number_faults() -> Vec<Faulty> {
    let with = |line: &str| table("a", "k", line);
    let mut faults = vec![
        (with("weight = 1.5"), Some(4), "floating point, expected"),
        (with("request_burst = 5"), Some(4), "requests_per_minute"),
        (with("token_burst = 5"), Some(4), "tokens_per_minute"),
        (
            with("max_pages = 5\nguaranteed_pages = 6"),
            Some(5),
            "from 0 to 5; got 6",
        ),
    ];
    for (rate, burst) in [
        ("requests_per_minute", "request_burst"),
        ("tokens_per_minute", "token_burst"),
    ] {
        for wrong in ["0", "100000001"] {
            faults.push((with(&format!("{rate} = {wrong}")), Some(4), rate));
            let lines = format!("{rate} = 5\n{burst} = {wrong}");
            faults.push((with(&lines), Some(5), burst));
        }
    }
    for number in [
        "weight",
        "requests_per_minute",
        "tokens_per_minute",
        "max_running",
        "max_queued",
        "max_queued_seconds",
        "max_pages",
        "first_token_seconds",
        "total_seconds",
    ] {
        for wrong in ["0", "-1", "4294967296"] {
            faults.push((with(&format!("{number} = {wrong}")), Some(4), number));
        }
    }
    faults
}

fn prefix_faults() -> Vec<Faulty> {
    let with = |lines: &str| table("a", "k", "") + lines;
    let prefix = "[[public_prefix]]\nname = \"x\"\nsystem = \"\"\n";
    vec![
        (with("public = [\"x\",\n\"y\"]"), Some(5), "with this name"),
        (with(prefix) + "role = \"a\"", Some(8), "role"),
        (with("[[public_prefix]]\nname = \"x\"\n"), Some(5), "system"),
        (with(prefix) + prefix, Some(9), "`x` is already defined"),
    ]
}

fn model_faults() -> Vec<Faulty> {
    let with = |line: &str| table("a", "k", line);
    vec![
        (with("models = []"), Some(4), "is empty"),
        (with("models = \"x\""), Some(4), "expected a sequence"),
        (with("models = [\n\"x\",\n5]"), Some(6), "expected a string"),
        (
            with("models = [\"x\",\n\"\"]"),
            Some(5),
            "must not be empty",
        ),
        (with("models = [\"x\",\n\"y\",\n\"x\"]"), Some(6), "line 4"),
    ]
}

#[test]
fn every_error_names_the_file_and_the_line() {
    let file = TenantsFile::new("fault", "");
    let path = file.0.display().to_string();
    let faults = [
        shape_faults(),
        key_faults(),
        number_faults(),
        prefix_faults(),
        model_faults(),
    ];
    for (text, line, word) in faults.concat() {
        file.write(&text);
        let error = file.open().unwrap_err().to_string();
        let place = match line {
            Some(line) => format!("{path}, line {line}: "),
            None => format!("{path}: "),
        };
        assert!(error.starts_with(&place), "{error}\n---\n{text}");
        assert!(
            error.contains(word),
            "{error} does not say {word}\n---\n{text}"
        );
        assert!(!error.contains(&hash("k")), "{error}");
    }
    let missing = Roster::open(Path::new("/nowhere/tenants.toml"), DEFAULTS);
    assert!(
        missing
            .unwrap_err()
            .to_string()
            .starts_with("/nowhere/tenants.toml: ")
    );
}

#[test]
fn an_error_never_repeats_a_possible_key() {
    let secret = "sk-0123456789abcdef";
    let file = TenantsFile::new("secret", "");
    let (quoted, list) = (format!("\"{secret}\""), format!("[\"{secret}\"]"));
    let tricky = format!("'`\", expected {secret}'");
    for field in [
        "weight",
        "band",
        "token_burst",
        "public",
        "models",
        "colour",
        "key_sha256",
    ] {
        for value in [&quoted, &list, &tricky, &secret.to_owned()] {
            for line in [format!("{field} = {value}"), format!("{value} = 1")] {
                file.write(&format!("[[tenant]]\nid = \"a\"\n{line}\n"));
                let error = file.open().unwrap_err().to_string();
                assert!(!error.contains("0123456789"), "{error}\n---\n{line}");
                assert!(error.contains(", line "), "{error}\n---\n{line}");
            }
        }
    }
}

#[test]
fn only_a_tenants_own_key_finds_it() {
    let text = table("a", "ka", "") + &table("b", "kb", "");
    let roster = TenantsFile::new("keys", &text).open().unwrap();
    assert_eq!(number_of(&roster, "ka"), Some(1));
    assert_eq!(number_of(&roster, "kb"), Some(2));
    for wrong in ["", "k", "kaa", "KA", &hash("ka")] {
        assert_eq!(number_of(&roster, wrong), None, "{wrong}");
    }
    assert_eq!(roster.tenants().find(None), None);
    let anyone = Tenants::anyone(DEFAULTS.deadlines);
    for key in [None, Some(b"none".as_slice())] {
        assert_eq!(anyone.find(key).unwrap().number, TenantId(0));
    }
}

#[test]
fn tenants_keep_their_numbers_and_removed_tenants_keep_no_pages() {
    let file = TenantsFile::new("again", "");
    let (a, b, c) = (
        table("a", "ka", "guaranteed_pages = 9\nweight = 3"),
        table("b", "kb", ""),
        table("c", "kc", ""),
    );
    file.write(&(a.clone() + &b));
    let first = file.open().unwrap();
    file.write(&(c + &b));
    let second = first.clone().reread().unwrap();
    let numbers = |roster: &Roster| ["ka", "kb", "kc"].map(|key| number_of(roster, key));
    assert_eq!(numbers(&first), [Some(1), Some(2), None]);
    assert_eq!(numbers(&second), [None, Some(2), Some(3)]);
    let policies = second.policies();
    let removed = TenantPolicy {
        guaranteed_pages: 0,
        ..first.policies()[0].1.clone()
    };
    assert_eq!((policies.len(), &policies[0]), (3, &(TenantId(1), removed)));
    file.write(&a);
    let third = second.clone().reread().unwrap();
    assert_eq!(numbers(&third), [Some(1), None, None]);
    assert_eq!(third.policies()[0], first.policies()[0]);
}

#[test]
fn public_prefixes_are_fixed_at_the_start() {
    let prefix = |system: &str| format!("[[public_prefix]]\nname = \"x\"\nsystem = \"{system}\"\n");
    let tenant = table("a", "k", "public = [\"x\"]");
    let file = TenantsFile::new("public", &(prefix("One.") + &tenant));
    let roster = file.open().unwrap();
    assert!(roster.clone().reread().is_ok());
    file.write(&(prefix("Two.") + &tenant));
    assert!(roster.reread().unwrap_err().to_string().contains("restart"));
}

#[test]
fn a_tenant_may_use_its_listed_models_or_without_a_list_all() {
    let text = [
        table("a", "ka", "models = [\"one\", \"two\"]"),
        table("b", "kb", "models = [\"three\"]"),
    ];
    let file = TenantsFile::new("models", &text.concat());
    let roster = file.open().unwrap();
    let excluded = |roster: &Roster, model: &str| {
        let ids = roster.excluded_from(model, |name| name == model);
        ids.map_or_else(|error| error.to_string(), |ids| ids.join(" "))
    };
    assert_eq!(excluded(&roster, "one"), "b");
    assert_eq!(excluded(&roster, "three"), "a");
    assert!(excluded(&roster, "four").contains("no tenant may use `four`"));
    let tenant = roster.tenants().find(Some(b"ka")).unwrap();
    assert!(tenant.may_use(|name| name == "two") && !tenant.may_use(|name| name == "three"));

    file.write(&table("c", "kc", ""));
    let roster = roster.reread().unwrap();
    assert_eq!(excluded(&roster, "one"), "", "removed tenants do not count");
    let tenant = roster.tenants().find(Some(b"kc")).unwrap();
    assert!(
        tenant.may_use(|_| false),
        "without a list it may use all models"
    );
}

#[test]
fn errors_of_the_scheduler_name_the_tenant() {
    let text = table("a", "ka", "") + &table("b", "kb", "");
    let roster = TenantsFile::new("explain", &text).open().unwrap();
    let message = roster
        .explain(TenantsError::Invalid(TenantId(2)))
        .to_string();
    assert!(message.contains("`b`"), "{message}");
    let message = roster.explain(TenantsError::TooManyGuaranteed {
        guaranteed: 70,
        limit: 60,
    });
    assert!(
        message.to_string().contains("add up to 70, but only 60"),
        "{message}"
    );
}

#[test]
fn keygen_shows_a_key_once_and_prints_a_valid_table() {
    let draw = || {
        let (mut terminal, mut table) = (Vec::new(), Vec::new());
        keygen(Some("acme"), &mut terminal, &mut table).unwrap();
        (
            String::from_utf8(terminal).unwrap(),
            String::from_utf8(table).unwrap(),
        )
    };
    let (terminal, table) = draw();
    let key = terminal.lines().last().unwrap();
    assert!(key.starts_with("sk-") && key.len() == 3 + 64, "{key}");
    assert!(!table.contains(&key[3..]));
    let roster = TenantsFile::new("keygen", &table).open().unwrap();
    assert_eq!(number_of(&roster, key), Some(1));
    assert_ne!(draw().0, terminal);
    assert!(keygen(Some("a b"), Vec::new(), Vec::new()).is_err());
}

#[test]
fn the_admin_key_belongs_to_no_tenant() {
    let tenant = table("a", "ka", "");
    let admin = |key: &str| format!("[admin]\nkey_sha256 = \"{}\"\n", hash(key));
    let file = TenantsFile::new("admin", &(tenant.clone() + &admin("ko")));
    let roster = file.open().unwrap();
    let holder = |roster: &Roster, key: &str| roster.tenants().holder(Some(key.as_bytes()));
    assert_eq!(holder(&roster, "ko"), Some(KeyHolder::Admin));
    assert_eq!(number_of(&roster, "ko"), None);
    assert!(matches!(holder(&roster, "ka"), Some(KeyHolder::Tenant(_))));
    file.write(&(tenant.clone() + &admin("kp")));
    let roster = roster.reread().unwrap();
    assert_eq!(holder(&roster, "ko"), None);
    assert_eq!(holder(&roster, "kp"), Some(KeyHolder::Admin));

    let (mut terminal, mut table) = (Vec::new(), Vec::new());
    keygen(None, &mut terminal, &mut table).unwrap();
    let terminal = String::from_utf8(terminal).unwrap();
    file.write(&(tenant + &String::from_utf8(table).unwrap()));
    let roster = roster.reread().unwrap();
    let key = terminal.lines().last().unwrap();
    assert_eq!(holder(&roster, key), Some(KeyHolder::Admin));
}

#[test]
fn a_server_without_tenants_can_have_an_admin_key() {
    let admin = format!("[admin]\nkey_sha256 = \"{}\"\n", hash("ko"));
    let read = |text: &str| {
        let file = TenantsFile::new("admin-only", text);
        anyone_and_admin(Deadlines::default(), &file.0)
    };
    let tenants = read(&admin).unwrap();
    assert!(tenants.has_admin());
    assert_eq!(tenants.holder(Some(b"ko")), Some(KeyHolder::Admin));
    for key in [None, Some(&b"kp"[..])] {
        let holder = tenants.holder(key);
        assert!(matches!(holder, Some(KeyHolder::Tenant(anyone)) if anyone.is_anyone()));
    }
    assert!(!Tenants::anyone(Deadlines::default()).has_admin());
    let twice = format!("{admin}{}", table("a", "ka", ""));
    for (text, why) in [
        ("", "missing field `admin`"),
        (twice.as_str(), "unknown field `tenant`"),
        ("[admin]\nkey_sha256 = \"ko\"\n", "line 2: a key's SHA-256"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_key_hash_is_sha_256_and_is_never_printed() {
    let of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(hash("abc"), of_abc);
    assert_eq!(KeyHash::from_hex(of_abc), Some(KeyHash::of(b"abc")));
    let roster = TenantsFile::new("debug", &table("a", "abc", ""))
        .open()
        .unwrap();
    let printed = format!("{roster:?} {:?}", roster.tenants());
    assert!(
        printed.contains("KeyHash")
            && !printed.contains("186, 120")
            && !printed.contains(&of_abc[..6])
    );
}

#[test]
fn the_readme_shows_every_field_in_a_valid_file() {
    let readme = include_str!("README.md");
    let (_, rest) = readme.split_once("```toml\n").unwrap();
    let (example, _) = rest.split_once("```").unwrap();
    assert!(TenantsFile::new("readme", example).open().is_ok());

    let unknown = table("a", "k", "colour = 1");
    let error = TenantsFile::new("fields", &unknown).open().unwrap_err();
    let error = error.to_string();
    let (_, fields) = error.split_once("expected one of ").unwrap();
    for field in fields.split(", ") {
        let name = field.trim_matches('`');
        assert!(example.contains(&format!("\n{name} = ")), "{name}");
        assert!(readme.contains(&format!("\n| {field} |")), "{field}");
    }
}
