//! What goes wrong: redirects, broken connections, wrong bytes, refusals and full disks.

use std::fs;
use std::os::unix::fs::symlink;

use super::server::{Answer, HubServer, Received, Repository, content, sha256};
use super::{Cache, TOKEN, WEIGHTS, check_error, safetensors};

const NAME: &str = "owner/model";

/// Starts a hub that answers `fault` for the weights, if it is an answer.
fn with_fault(
    fault: impl Fn(&Received, usize) -> Option<Answer> + Send + Sync + 'static,
) -> HubServer {
    let repository = safetensors();
    HubServer::start(move |request, before| {
        let is_of_weights = request.path.ends_with("model.safetensors");
        let answer = is_of_weights.then(|| fault(request, before)).flatten();
        answer.unwrap_or_else(|| repository.answer(request))
    })
}

/// Starts a hub that refuses to list its files.
fn refusing(status: u16, headers: &[(&'static str, &str)]) -> HubServer {
    let headers: Vec<_> = headers
        .iter()
        .map(|&(name, value)| (name, value.to_owned()))
        .collect();
    HubServer::start(move |_, _| Answer {
        headers: headers.clone(),
        ..Answer::status(status)
    })
}

/// Returns the ranges that were asked for, one for each request for the weights.
fn ranges(server: &HubServer) -> Vec<String> {
    let downloads = server.downloads().into_iter();
    let of_weights = downloads.filter(|request| request.path.ends_with("model.safetensors"));
    of_weights
        .map(|request| request.header("range").unwrap_or("all").to_owned())
        .collect()
}

fn check_weights(cache: &Cache) {
    let weights = fs::read(cache.snapshot().join("model.safetensors"));
    assert_eq!(weights.unwrap(), WEIGHTS);
    assert!(!incomplete(cache).exists());
}

fn incomplete(cache: &Cache) -> std::path::PathBuf {
    cache
        .blobs()
        .join(format!("{}.incomplete", sha256(WEIGHTS)))
}

fn leave(cache: &Cache, bytes: &[u8]) {
    fs::create_dir_all(cache.blobs()).unwrap();
    fs::write(incomplete(cache), bytes).unwrap();
}

#[test]
fn a_redirect_to_another_host_gets_no_token() {
    let storage = HubServer::start(|request, _| content(WEIGHTS, request));
    let link = format!("{}/a?signature=b", storage.url);
    let server = with_fault(move |_, _| Some(Answer::redirect(link.clone())));
    let cache = Cache::new();
    cache.fetch_with_token(&server, NAME).unwrap();
    check_weights(&cache);
    let authorization = format!("Bearer {TOKEN}");
    for request in server.received() {
        assert_eq!(
            request.header("authorization"),
            Some(&*authorization),
            "{request:?}"
        );
    }
    let [request] = &storage.received()[..] else {
        panic!("{:?}", storage.received())
    };
    assert_eq!(request.path, "/a?signature=b");
    assert_eq!(request.header("authorization"), None);
}

#[test]
fn a_redirect_on_the_same_host_keeps_the_token() {
    let server = with_fault(|request, _| {
        let is_first = request.path.starts_with("/owner/");
        let there = "/cache/model.safetensors".to_owned();
        Some(match is_first {
            true => Answer::redirect(there),
            false => content(WEIGHTS, request),
        })
    });
    let cache = Cache::new();
    cache.fetch_with_token(&server, NAME).unwrap();
    check_weights(&cache);
    assert!(
        server
            .received()
            .iter()
            .all(|request| request.header("authorization").is_some())
    );
}

#[test]
fn a_redirect_without_an_end_or_an_aim_is_an_error() {
    let circle = |request: &Received, _| Some(Answer::redirect(request.path.clone()));
    check_error(
        Cache::new().fetch(&with_fault(circle), NAME),
        &["more than 10 redirects"],
    );
    for location in ["ftp://host/a", "a", "http://"] {
        let server = with_fault(move |_, _| Some(Answer::redirect(location.to_owned())));
        check_error(
            Cache::new().fetch(&server, NAME),
            &["redirects to something that is no URL"],
        );
    }
    check_error(
        Cache::new().fetch(&with_fault(|_, _| Some(Answer::status(302))), NAME),
        &["no URL"],
    );
}

#[test]
fn a_link_that_has_expired_is_asked_for_again() {
    let storage = HubServer::start(|request, before| match before {
        0 => Answer::status(403),
        _ => content(WEIGHTS, request),
    });
    let link = format!("{}/a", storage.url);
    let server = with_fault(move |_, _| Some(Answer::redirect(link.clone())));
    let cache = Cache::new();
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
}

#[test]
fn a_file_is_resumed_where_an_earlier_start_stopped() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    leave(&cache, &WEIGHTS[..10]);
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
    assert_eq!(ranges(&server), ["bytes=10-"]);
}

#[test]
fn a_file_that_was_complete_needs_no_request() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    leave(&cache, WEIGHTS);
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
    assert!(ranges(&server).is_empty());
}

#[test]
fn what_cannot_be_resumed_begins_again() {
    // The server knows no ranges.
    let server = with_fault(|_, _| {
        Some(Answer {
            body: WEIGHTS.to_vec(),
            ..Answer::status(200)
        })
    });
    let cache = Cache::new();
    leave(&cache, &WEIGHTS[..10]);
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
    assert_eq!(ranges(&server), ["bytes=10-"]);

    // What was left is wrong, or too long.
    for (left, expected) in [
        (&b"something else"[..], &["bytes=14-", "all"][..]),
        (&[0; 1000][..], &["all"][..]),
    ] {
        let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
        leave(&cache, left);
        cache.fetch(&server, NAME).unwrap();
        check_weights(&cache);
        assert_eq!(ranges(&server), expected);
    }
}

#[test]
fn another_part_than_the_wanted_one_is_an_error() {
    let server = with_fault(|_, _| {
        Some(Answer {
            headers: vec![("content-range", "bytes 9-50/51".to_owned())],
            body: WEIGHTS[9..].to_vec(),
            ..Answer::status(206)
        })
    });
    let cache = Cache::new();
    leave(&cache, &WEIGHTS[..10]);
    check_error(
        cache.fetch(&server, NAME),
        &["another part than the bytes from 10 on of 51"],
    );
}

#[test]
fn a_connection_that_is_cut_is_continued() {
    let server = with_fault(|request, _| {
        let answer = content(WEIGHTS, request);
        let cut = answer.body.len().min(20);
        Some(Answer {
            cut: Some(cut),
            ..answer
        })
    });
    let cache = Cache::new();
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
    assert_eq!(ranges(&server), ["all", "bytes=20-", "bytes=40-"]);
}

#[test]
fn a_connection_that_brings_nothing_is_tried_five_times() {
    let server = with_fault(|request, before| {
        Some(Answer {
            cut: Some(if before == 0 { 7 } else { 0 }),
            ..content(WEIGHTS, request)
        })
    });
    let cache = Cache::new();
    let expected = [
        "model.safetensors",
        "5 tries",
        "first 7 bytes are kept; start again",
    ];
    check_error(cache.fetch(&server, NAME), &expected);
    assert_eq!(ranges(&server).len(), 6);
    assert_eq!(fs::read(incomplete(&cache)).unwrap(), &WEIGHTS[..7]);
    // Offline, the part is no model.
    let offline = cache.fetch_offline(&server, NAME);
    check_error(offline, &["it was not downloaded yet"]);
}

#[test]
fn a_server_that_is_overloaded_is_asked_again() {
    let server = with_fault(|_, before| [503, 429].get(before).copied().map(Answer::status));
    let cache = Cache::new();
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
    assert_eq!(ranges(&server).len(), 3);
    let server = refusing(500, &[]);
    check_error(Cache::new().fetch(&server, NAME), &["500", "5 tries"]);
    assert_eq!(server.received().len(), 5);
}

#[test]
fn wrong_bytes_never_get_a_name_in_the_cache() {
    let wrong = WEIGHTS.to_ascii_uppercase();
    let found = sha256(&wrong);
    let server = with_fault(move |request, _| Some(content(&wrong, request)));
    let cache = Cache::new();
    let expected = ["model.safetensors", &found, &sha256(WEIGHTS), "Start again"];
    check_error(cache.fetch(&server, NAME), &expected);
    assert!(!incomplete(&cache).exists());
    assert!(!cache.blobs().join(sha256(WEIGHTS)).exists());
    assert!(!cache.snapshot().join("model.safetensors").exists());

    // Small files have the hash of git.
    let repository = safetensors();
    let server = HubServer::start(
        move |request, _| match request.path.ends_with("config.json") {
            true => content(b"[]", request),
            false => repository.answer(request),
        },
    );
    check_error(
        Cache::new().fetch(&server, NAME),
        &["config.json: the hash is"],
    );
}

#[test]
fn more_bytes_than_listed_are_refused() {
    let server = with_fault(|_, _| {
        Some(Answer {
            body: [WEIGHTS, b"!"].concat(),
            ..Answer::status(200)
        })
    });
    check_error(
        Cache::new().fetch(&server, NAME),
        &["sends more than the listed 51 bytes"],
    );
}

#[test]
fn a_refusal_says_what_helps() {
    let cache = Cache::new();
    let server = refusing(401, &[]);
    let expected = ["owner/model: 127.0.0.1 answers 401", "HF_TOKEN is not set"];
    check_error(cache.fetch(&server, NAME), &expected);
    let expected = [
        "answers 401",
        "the token in HF_TOKEN or in HF_HOME may not read it",
    ];
    check_error(cache.fetch_with_token(&server, NAME), &expected);
    let reason = "Access to model owner/model is restricted.";
    let server = refusing(403, &[("x-error-message", reason)]);
    let page = format!("Accept its conditions at {}/owner/model", server.url);
    let expected = ["403", "(Access to model owner/model is restricted.)", &page];
    check_error(cache.fetch_with_token(&server, NAME), &expected);
    let server = refusing(404, &[]);
    let expected = ["answers 404", "neither such a model nor such a directory"];
    check_error(cache.fetch(&server, NAME), &expected);
    assert_eq!(server.received().len(), 1);
    check_error(cache.fetch(&refusing(418, &[]), NAME), &["answers 418"]);
    assert!(!cache.0.exists());

    let server = with_fault(|_, _| Some(Answer::status(404)));
    check_error(
        cache.fetch(&server, NAME),
        &["owner/model/model.safetensors: 127.0.0.1 answers 404"],
    );
}

#[test]
fn a_hub_that_nobody_reaches_is_named() {
    let server = HubServer::of(safetensors());
    let cache = Cache::new();
    let mut settings = cache.settings(&server);
    // Port 1 of a loopback address is closed.
    settings.endpoint = "http://127.0.0.1:1".to_owned();
    let fetch = |settings| sterna::hub::fetch(&super::named(NAME), settings, |_| Ok(()));
    let expected = [
        "owner/model: 127.0.0.1:1: ",
        "5 tries",
        "no copy",
        "HF_ENDPOINT",
    ];
    check_error(fetch(&settings), &expected);
    cache.fetch(&server, NAME).unwrap();
    check_error(fetch(&settings), &["5 tries", "start with --offline"]);
}

#[test]
fn a_listing_that_leaves_the_cache_is_refused() {
    let repository = Repository::new(&[("config.json", b"{}"), ("../../../../evil.json", b"{}")]);
    let (cache, server) = (Cache::new(), HubServer::of(repository));
    let expected = [
        "owner/model: the listing of",
        "\"../../../../evil.json\" is not one inside",
    ];
    check_error(cache.fetch(&server, NAME), &expected);
    assert!(!cache.0.exists());

    let server = HubServer::start(|_, _| Answer {
        body: vec![b' '; 33 << 20],
        ..Answer::status(200)
    });
    check_error(cache.fetch(&server, NAME), &["owner/model"]);
}

/// Writing to `/dev/full` fails as writing to a full disk does.
#[test]
fn a_full_disk_is_named_with_what_helps() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    fs::create_dir_all(cache.blobs()).unwrap();
    symlink("/dev/full", incomplete(&cache)).unwrap();
    let expected = ["No space left on device", "Free some space, or set HF_HOME"];
    check_error(cache.fetch(&server, NAME), &expected);
    assert_eq!(ranges(&server).len(), 1);
    // With space, the next start goes on.
    fs::remove_file(incomplete(&cache)).unwrap();
    cache.fetch(&server, NAME).unwrap();
    check_weights(&cache);
}

#[test]
fn two_starts_download_a_file_once() {
    let (cache, server) = (Cache::new(), HubServer::of(safetensors()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| cache.fetch(&server, NAME).unwrap());
        }
    });
    check_weights(&cache);
    assert_eq!(ranges(&server), ["all"]);
    assert_eq!(fs::read_dir(cache.snapshot()).unwrap().count(), 4);
}
