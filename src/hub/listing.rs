//! What a hub says of a repository: its commit and its files, with their sizes and hashes.

use std::path::{Component, Path};

use serde::Deserialize;

/// The largest listing that is read, and the most files that it may have.
pub(super) const MAX_LISTING_BYTES: u64 = 32 << 20;
const MAX_FILES: usize = 50_000;
const MAX_PATH_BYTES: usize = 1024;

/// The files of a repository at a commit.
#[derive(Debug)]
pub(super) struct HubListing {
    /// The hash of the commit, in hexadecimal digits.
    pub(super) commit: String,
    pub(super) files: Vec<HubFile>,
}

/// A file of a repository.
#[derive(Debug)]
pub(super) struct HubFile {
    /// The path, whose components are plain names.
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) hash: FileHash,
}

/// The hash of a file, in hexadecimal digits. It is also the file's name in the cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileHash {
    /// The SHA-256 of a file in large file storage.
    Sha256(String),
    /// The hash of git: the SHA-1 of the length and the content.
    GitBlob(String),
}

/// The answer of the hub. Later versions may add fields.
#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
    size: u64,
}

impl HubListing {
    /// Reads the hub's answer.
    ///
    /// # Errors
    /// If it is malformed, or has a path or a hash that cannot be the name of a file.
    pub(super) fn parse(json: &[u8]) -> Result<HubListing, String> {
        let info: RepoInfo = serde_json::from_slice(json)
            .map_err(|error| format!("it is no list of files (sha, siblings): {error}"))?;
        if !is_hexadecimal(&info.sha, 40) {
            return Err(format!("the commit {:?} is no SHA-1", info.sha));
        }
        if info.siblings.len() > MAX_FILES {
            let files = info.siblings.len();
            return Err(format!("it has {files} files; the limit is {MAX_FILES}"));
        }
        let files = info.siblings.into_iter().map(HubFile::read);
        Ok(HubListing {
            commit: info.sha,
            files: files.collect::<Result<_, _>>()?,
        })
    }

    /// Returns the file of this path.
    pub(super) fn file(&self, path: &str) -> Option<&HubFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

impl HubFile {
    fn read(sibling: Sibling) -> Result<HubFile, String> {
        let path = sibling.rfilename;
        if !is_plain_path(&path) {
            return Err(format!(
                "the path {path:?} is not one inside of the repository"
            ));
        }
        let (bytes, hash) = match (sibling.lfs, sibling.size, sibling.blob_id) {
            (Some(large), _, _) => (large.size, FileHash::Sha256(large.sha256)),
            (None, Some(size), Some(blob)) => (size, FileHash::GitBlob(blob)),
            _ => {
                return Err(format!(
                    "the file {path} has no size or no hash (blobs=true)"
                ));
            }
        };
        if !is_hexadecimal(hash.digits(), hash.length()) {
            return Err(format!("the file {path} has a malformed hash"));
        }
        Ok(HubFile { path, bytes, hash })
    }
}

impl FileHash {
    pub(super) fn digits(&self) -> &str {
        match self {
            FileHash::Sha256(digits) | FileHash::GitBlob(digits) => digits,
        }
    }

    /// Returns the number of digits.
    fn length(&self) -> usize {
        match self {
            FileHash::Sha256(_) => 64,
            FileHash::GitBlob(_) => 40,
        }
    }
}

/// Returns whether a path stays below the directory that it is joined to.
fn is_plain_path(path: &str) -> bool {
    let has_plain_components = Path::new(path)
        .components()
        .all(|component| matches!(component, Component::Normal(_)));
    // `components` drops "." and repeated slashes.
    let is_written_plainly = path.split('/').all(|part| !part.is_empty() && part != ".");
    has_plain_components
        && is_written_plainly
        && path.len() <= MAX_PATH_BYTES
        && !path.chars().any(|c| c.is_control() || c == '\\')
}

fn is_hexadecimal(text: &str, digits: usize) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SHA1: &str = "0123456789012345678901234567890123456789";

    fn error_of(sibling: Value) -> String {
        let json = json!({"sha": SHA1, "siblings": [sibling]}).to_string();
        HubListing::parse(json.as_bytes()).unwrap_err()
    }

    #[test]
    fn a_file_has_a_size_and_a_hash() {
        let sha256 = "ab".repeat(32);
        let large = json!({"rfilename": "sub/a.gguf", "size": 1, "blobId": SHA1,
            "lfs": {"sha256": sha256, "size": 7, "pointerSize": 130}});
        let small = json!({"rfilename": "b.json", "size": 3, "blobId": SHA1, "lfs": null});
        let json = json!({"sha": SHA1, "siblings": [large, small], "id": "a/b"}).to_string();
        let listing = HubListing::parse(json.as_bytes()).unwrap();
        let [large, small] = &listing.files[..] else {
            panic!("{listing:?}")
        };
        assert_eq!((large.bytes, &large.hash), (7, &FileHash::Sha256(sha256)));
        assert_eq!(
            (small.bytes, &small.hash),
            (3, &FileHash::GitBlob(SHA1.into()))
        );
        let error = error_of(json!({"rfilename": "b.json"}));
        assert!(error.contains("b.json has no size or no hash"), "{error}");
    }

    #[test]
    fn a_path_that_leaves_the_repository_is_refused() {
        let long = "a".repeat(1025);
        for path in [
            "../a",
            "a/../../b",
            "/etc/passwd",
            "a//b",
            "./a",
            "a/.",
            "",
            "a\\b",
            "a\nb",
            "a/",
            &long,
        ] {
            let error = error_of(json!({"rfilename": path, "size": 3, "blobId": SHA1}));
            assert!(
                error.contains("not one inside of the repository"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_hash_that_is_no_hash_is_refused() {
        for hash in ["../../../../../../../../../../../../../a", "", &SHA1[1..]] {
            let error = error_of(json!({"rfilename": "a", "size": 3, "blobId": hash}));
            assert!(error.contains("malformed hash"), "{error}");
        }
        let large = json!({"sha256": SHA1, "size": 7});
        let error = error_of(json!({"rfilename": "a", "lfs": large}));
        assert!(error.contains("malformed hash"), "{error}");
        let error = HubListing::parse(br#"{"sha": "main", "siblings": []}"#).unwrap_err();
        assert!(error.contains("no SHA-1"), "{error}");
        let error = HubListing::parse(b"<html>").unwrap_err();
        assert!(error.contains("no list of files"), "{error}");
    }
}
