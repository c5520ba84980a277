//! The chat page and its files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use axum::body::Body;
use axum::http::Method;

use crate::harness::*;

/// The folder of the page's files.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/api/page");

/// Returns the paths of the page's files below its folder.
fn files() -> BTreeSet<String> {
    fn collect(folder: &Path, files: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, files);
            } else {
                let below = path.strip_prefix(FOLDER).unwrap();
                files.insert(below.to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = BTreeSet::new();
    collect(Path::new(FOLDER), &mut found);
    for own in ["mod.rs", "README.md", "index.html"] {
        assert!(found.remove(own), "{own}");
    }
    found
}

#[tokio::test]
async fn the_page_runs_only_its_own_scripts_and_never_reads_text_as_html() {
    let server = Server::new();
    let page = server.get("/").await;
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    let policy = page.header("content-security-policy");
    for part in [
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';",
        "require-trusted-types-for 'script'; trusted-types 'none'",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{part}");
    }
    for inline in ["<style", "style=", "onclick", "<script>", "//"] {
        assert!(!page.body.contains(inline), "{inline}");
    }
    for name in files() {
        let text = fs::read_to_string(Path::new(FOLDER).join(&name)).unwrap();
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "@import",
        ] {
            assert!(!text.contains(forbidden), "{name}: {forbidden}");
        }
    }
}

#[tokio::test]
async fn every_file_of_the_page_is_served_with_its_type() {
    let server = Server::new();
    for name in files() {
        let answer = server.get(&format!("/page/{name}")).await;
        assert_eq!(answer.status, 200, "{name}");
        let kind = match Path::new(&name).extension().unwrap().to_str().unwrap() {
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            other => panic!("{name}: no content type for {other}"),
        };
        assert_eq!(answer.header("content-type"), kind, "{name}");
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        let expected = fs::read_to_string(Path::new(FOLDER).join(&name)).unwrap();
        assert_eq!(answer.body, expected, "{name}");
    }
}

#[tokio::test]
async fn the_page_names_only_files_that_exist() {
    let files = files();
    let index = fs::read_to_string(Path::new(FOLDER).join("index.html")).unwrap();
    let named: Vec<&str> = index.split("\"page/").skip(1).collect();
    assert!(named.len() > 5, "{named:?}");
    for rest in named {
        let name = rest.split('"').next().unwrap();
        assert!(files.contains(name), "{name}");
    }
    for script in files.iter().filter(|name| name.ends_with(".js")) {
        let path = Path::new(FOLDER).join(script);
        let text = fs::read_to_string(&path).unwrap();
        for rest in text.split(" from '").skip(1) {
            let imported = rest.split('\'').next().unwrap();
            let target = path.parent().unwrap().join(imported);
            assert!(target.exists(), "{script} imports {imported}");
        }
    }
}

#[tokio::test]
async fn a_browser_that_has_a_file_gets_no_body() {
    let server = Server::new();
    for path in ["/", "/page/app.js"] {
        let first = server.get(path).await;
        let known = [("if-none-match", first.header("etag"))];
        let again = server.send(Method::GET, path, &known, Body::empty()).await;
        assert_eq!((again.status.as_u16(), again.body.as_str()), (304, ""));
        let other = [("if-none-match", "\"0\"")];
        let again = server.send(Method::GET, path, &other, Body::empty()).await;
        assert_eq!(again.body, first.body);
    }
}

#[tokio::test]
async fn a_path_below_the_page_that_is_no_file_is_not_found() {
    let server = Server::new();
    for path in [
        "/page/",
        "/page/mod.rs",
        "/page/../mod.rs",
        "/page/chat",
        "/page",
    ] {
        let (status, code, _) = server.get(path).await.error();
        assert_eq!((status, code.as_str()), (404, "not_found"), "{path}");
    }
}
