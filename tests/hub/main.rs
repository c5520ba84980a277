//! Models that are given by their names: what is downloaded, and what each fault of a hub, of the
//! network or of the disk does. The hub is a server on a loopback address.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod faults;
mod program;
mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use server::{COMMIT, HubServer, Repository, git_hash, sha256};
use sterna::hub::{self, HubSettings, HubToken, ModelName};

/// A token, as a hub gives them.
const TOKEN: &str = "hf_the-secret-token";

/// A cache that is removed at the end of a test.
struct Cache(PathBuf);

impl Cache {
    fn new() -> Cache {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sterna-hub-{}-{number}", std::process::id());
        Cache(std::env::temp_dir().join(name))
    }

    fn settings(&self, server: &HubServer) -> HubSettings {
        HubSettings {
            endpoint: server.url.clone(),
            cache: self.0.clone(),
            token: None,
            is_offline: false,
            proxy: None,
            retry_pause: Duration::ZERO,
        }
    }

    /// Fetches a model without a token.
    fn fetch(&self, server: &HubServer, model: &str) -> Result<PathBuf, String> {
        hub::fetch(&named(model), &self.settings(server), |_| Ok(()))
    }

    fn fetch_with_token(&self, server: &HubServer, model: &str) -> Result<PathBuf, String> {
        let token = Some(HubToken::new(TOKEN).unwrap());
        let settings = HubSettings {
            token,
            ..self.settings(server)
        };
        hub::fetch(&named(model), &settings, |_| Ok(()))
    }

    fn fetch_offline(&self, server: &HubServer, model: &str) -> Result<PathBuf, String> {
        let settings = HubSettings {
            is_offline: true,
            ..self.settings(server)
        };
        hub::fetch(&named(model), &settings, |_| Ok(()))
    }

    fn blobs(&self) -> PathBuf {
        self.0.join("models--owner--model/blobs")
    }

    fn snapshot(&self) -> PathBuf {
        self.0.join("models--owner--model/snapshots").join(COMMIT)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // A test that downloads nothing makes no cache.
        drop(fs::remove_dir_all(&self.0));
    }
}

fn named(model: &str) -> ModelName {
    ModelName::find(Path::new(model)).unwrap().unwrap()
}

fn check_error(result: Result<PathBuf, String>, expected: &[&str]) {
    let error = result.unwrap_err();
    for part in expected {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("secret"), "{error}");
}

const WEIGHTS: &[u8] = b"the bytes of the weights, which are more than a few";

fn safetensors() -> Repository {
    Repository::new(&[
        ("README.md", b"# A model"),
        ("config.json", b"{}"),
        ("model.safetensors", WEIGHTS),
        ("tokenizer.json", br#"{"a": 1}"#),
        (
            "additional_chat_templates/tool_use.jinja",
            b"{{ messages }}",
        ),
    ])
}

#[test]
fn a_model_is_downloaded_once_into_the_usual_cache() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    let path = cache.fetch(&server, "owner/model").unwrap();
    assert_eq!(path, cache.snapshot());
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), WEIGHTS);
    let template = path.join("additional_chat_templates/tool_use.jinja");
    assert_eq!(fs::read(template).unwrap(), b"{{ messages }}");
    assert!(!path.join("README.md").exists());

    let link = |name: &str| fs::read_link(path.join(name)).unwrap();
    let weights = format!("../../blobs/{}", sha256(WEIGHTS));
    assert_eq!(link("model.safetensors"), Path::new(&weights));
    let config = format!("../../blobs/{}", git_hash(b"{}"));
    assert_eq!(link("config.json"), Path::new(&config));
    let commit = fs::read_to_string(cache.0.join("models--owner--model/refs/main"));
    assert_eq!(commit.unwrap(), COMMIT);

    assert_eq!(server.downloads().len(), 4);
    assert_eq!(cache.fetch(&server, "owner/model").unwrap(), path);
    assert_eq!(server.downloads().len(), 4);
    let agent = server.received()[0]
        .header("user-agent")
        .unwrap()
        .to_owned();
    assert!(agent.starts_with("sterna/"), "{agent}");
}

#[test]
fn the_configuration_is_checked_before_the_weights_are_downloaded() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    let settings = cache.settings(&server);
    let result = hub::fetch(&named("owner/model"), &settings, |directory| {
        assert!(directory.join("config.json").exists());
        Err("config.json: not ternary".to_owned())
    });
    let expected = [
        "owner/model: config.json: not ternary",
        "No weights were downloaded",
    ];
    check_error(result, &expected);
    let is_of_weights = |path: &str| path.ends_with("model.safetensors");
    let received = server.received();
    assert!(!received.iter().any(|request| is_of_weights(&request.path)));
}

#[test]
fn shards_are_downloaded_by_their_index() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"1"),
        ("model-2.safetensors", b"22"),
        ("other.safetensors", b"333"),
    ];
    let (cache, server) = (Cache::new(), HubServer::of(Repository::new(&files)));
    let path = cache.fetch(&server, "owner/model").unwrap();
    assert_eq!(fs::read(path.join("model-2.safetensors")).unwrap(), b"22");
    assert!(!path.join("other.safetensors").exists());
    assert_eq!(cache.fetch_offline(&server, "owner/model").unwrap(), path);

    let (cache, server) = (Cache::new(), HubServer::of(Repository::new(&files[..3])));
    let missing = ["owner/model", "the shard \"model-2.safetensors\""];
    check_error(cache.fetch(&server, "owner/model"), &missing);
}

#[test]
fn one_of_several_gguf_files_must_be_chosen() {
    let repository = Repository::new(&[
        ("model-Q2_0.gguf", b"two"),
        ("model-Q4_K_M.gguf", b"four"),
        ("tokenizer.json", b"{}"),
    ]);
    let (cache, server) = (Cache::new(), HubServer::of(repository));
    let both = "model-Q2_0.gguf, model-Q4_K_M.gguf";
    check_error(
        cache.fetch(&server, "owner/model"),
        &["several GGUF", "OWNER/NAME:FILE", both],
    );
    check_error(
        cache.fetch(&server, "owner/model:Q8_0"),
        &["\"Q8_0\"", both],
    );
    assert!(server.downloads().is_empty());

    let two = cache.snapshot().join("model-Q2_0.gguf");
    assert_eq!(cache.fetch(&server, "owner/model:q2_0").unwrap(), two);
    assert_eq!(fs::read(&two).unwrap(), b"two");
    assert!(cache.snapshot().join("tokenizer.json").exists());
    assert_eq!(
        cache.fetch(&server, "owner/model:model-Q2_0.gguf").unwrap(),
        two
    );
    assert_eq!(server.downloads().len(), 2);
}

#[test]
fn a_split_gguf_file_is_downloaded_whole() {
    let parts = ["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"];
    let repository = Repository::new(&[(parts[0], b"1"), (parts[1], b"22")]);
    let (cache, server) = (Cache::new(), HubServer::of(repository));
    let path = cache.fetch(&server, "owner/model").unwrap();
    assert_eq!(path, cache.snapshot().join(parts[0]));
    assert_eq!(fs::read(cache.snapshot().join(parts[1])).unwrap(), b"22");
}

#[test]
fn offline_only_the_cache_is_asked() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    let missing = [
        "owner/model: it was not downloaded yet",
        "--offline",
        "HF_HUB_OFFLINE",
    ];
    check_error(cache.fetch_offline(&server, "owner/model"), &missing);
    assert!(server.received().is_empty());

    let path = cache.fetch(&server, "owner/model").unwrap();
    let requests = server.received().len();
    assert_eq!(cache.fetch_offline(&server, "owner/model").unwrap(), path);
    let other = cache.fetch_offline(&server, "owner/model:Q2_0");
    check_error(other, &["\"Q2_0\"", "start once without"]);
    // A link without its content is no file.
    fs::remove_file(cache.blobs().join(sha256(WEIGHTS))).unwrap();
    check_error(
        cache.fetch_offline(&server, "owner/model"),
        &["no model that Sterna reads"],
    );
    assert_eq!(server.received().len(), requests);
}

#[test]
fn a_directory_wins_over_a_name() {
    assert_eq!(ModelName::find(Path::new("src/demo")), Ok(None));
}
