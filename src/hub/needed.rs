//! Which files of a repository the loader needs.
//!
//! Without a choice they are those that the loader takes from a directory: safetensors with
//! `config.json` if there are any, else the only GGUF file. Small files of text come with them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::checkpoint::{
    SAFETENSORS_FILE, SAFETENSORS_INDEX, TOOL_TEMPLATE_FILE, gguf_parts, is_bin, is_gguf,
};

/// The most files of text, and the most shards. Real models have some ten, and some hundred.
const MAX_TEXT_FILES: usize = 64;
const MAX_SHARDS: usize = 10_000;
/// The most files that an error lists.
const MAX_LISTED: usize = 40;
/// What the name of a part of a model begins with that reads images. It is no model by itself.
const IMAGE_PART: &str = "mmproj";

/// The files that the loader needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NeededFiles {
    /// The GGUF or `.bin` file to open. `None` means the whole directory.
    model: Option<String>,
    /// The paths, ascending. Each one is in the repository.
    pub(super) files: Vec<String>,
    /// Whether the index of shards is among the files, and the shards are not.
    pub(super) has_index: bool,
}

impl NeededFiles {
    /// Finds the files among the `paths` of a repository. `choice` is a path, or a quantisation.
    ///
    /// # Errors
    /// If there is no model, several would do, or a part is missing.
    pub(super) fn find(
        paths: &BTreeSet<&str>,
        choice: Option<&str>,
    ) -> Result<NeededFiles, String> {
        let is_safetensors = |choice: &str| [SAFETENSORS_FILE, SAFETENSORS_INDEX].contains(&choice);
        let has_safetensors = paths.contains("config.json")
            && (paths.contains(SAFETENSORS_FILE) || paths.contains(SAFETENSORS_INDEX));
        if has_safetensors && choice.is_none_or(is_safetensors) {
            return NeededFiles::directory(paths);
        }
        let model = chosen(paths, choice)?;
        let parts = match is_gguf(model) {
            true => gguf_parts(model)?,
            false => vec![model.to_owned()],
        };
        if let Some(missing) = parts.iter().find(|&part| !paths.contains(part.as_str())) {
            return Err(format!(
                "{model} is split, and the part {missing} is missing"
            ));
        }
        let mut files = text_files(paths, model)?;
        files.extend(parts);
        Ok(NeededFiles {
            model: Some(model.to_owned()),
            files,
            has_index: false,
        })
    }

    fn directory(paths: &BTreeSet<&str>) -> Result<NeededFiles, String> {
        let has_index = !paths.contains(SAFETENSORS_FILE);
        let weights = match has_index {
            true => SAFETENSORS_INDEX,
            false => SAFETENSORS_FILE,
        };
        let mut files = text_files(paths, weights)?;
        files.push(weights.to_owned());
        Ok(NeededFiles {
            model: None,
            files,
            has_index,
        })
    }

    /// Returns the shards that `index` lists.
    ///
    /// # Errors
    /// If the index is malformed, or the repository lacks a shard.
    pub(super) fn shards(
        &self,
        index: &[u8],
        paths: &BTreeSet<&str>,
    ) -> Result<Vec<String>, String> {
        #[derive(Deserialize)]
        struct Shards {
            weight_map: BTreeMap<String, String>,
        }
        let index: Shards = serde_json::from_slice(index)
            .map_err(|error| format!("{SAFETENSORS_INDEX}: {error}"))?;
        let shards: BTreeSet<String> = index.weight_map.into_values().collect();
        if shards.len() > MAX_SHARDS {
            let count = shards.len();
            return Err(format!(
                "{SAFETENSORS_INDEX} lists {count} shards; the limit is {MAX_SHARDS}"
            ));
        }
        match shards.iter().find(|&shard| !paths.contains(shard.as_str())) {
            Some(missing) => Err(format!(
                "{SAFETENSORS_INDEX} lists the shard {missing:?}, and there is no such file"
            )),
            None => Ok(shards.into_iter().collect()),
        }
    }

    /// Returns whether the model is the whole directory.
    pub(super) fn is_directory(&self) -> bool {
        self.model.is_none()
    }

    /// Returns the small files of text, and the other files.
    pub(super) fn texts_and_weights(&self) -> (Vec<String>, Vec<String>) {
        self.files.iter().cloned().partition(|path| is_text(path))
    }

    /// Returns the path to open, if the files are in `folder`.
    pub(super) fn path_in(&self, folder: &Path) -> PathBuf {
        match &self.model {
            Some(model) => folder.join(model),
            None => folder.to_owned(),
        }
    }
}

/// Returns the GGUF or `.bin` file that `choice` means. A split file stands under its first part.
///
/// # Errors
/// If there is none, or there are several.
fn chosen<'a>(paths: &BTreeSet<&'a str>, choice: Option<&str>) -> Result<&'a str, String> {
    let is_model = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_first = is_gguf(path) && gguf_parts(path).is_ok();
        is_first && !name.to_lowercase().starts_with(IMAGE_PART)
    };
    let models: Vec<&str> = paths.iter().copied().filter(is_model).collect();
    let of_choice: Vec<&str> = match choice {
        None => models.clone(),
        Some(choice) => match paths.get(choice) {
            Some(path) if is_gguf(path) || is_bin(path) => return Ok(path),
            _ => {
                let is_named = |path: &&str| has_word(path, choice);
                models.iter().copied().filter(is_named).collect()
            }
        },
    };
    let lists = |files: &[&str]| {
        let more = if files.len() > MAX_LISTED {
            ", …"
        } else {
            ""
        };
        files[..files.len().min(MAX_LISTED)].join(", ") + more
    };
    match (&of_choice[..], choice) {
        ([one], _) => Ok(one),
        ([], Some(choice)) if !models.is_empty() => Err(format!(
            "no GGUF file is called {choice:?} or has this quantisation in its name. Choose one \
             with OWNER/NAME:FILE: {}",
            lists(&models)
        )),
        ([], Some(choice)) if paths.iter().any(|path| path.ends_with(".safetensors")) => {
            Err(format!(
                "there is no GGUF or .bin file {choice:?}. The repository has safetensors: give \
                 its name without \":{choice}\""
            ))
        }
        ([], Some(choice)) => Err(format!("there is no GGUF or .bin file {choice:?}")),
        ([], None) => Err(format!(
            "there is no model that Sterna reads: no config.json with {SAFETENSORS_FILE} or \
             {SAFETENSORS_INDEX}, and no GGUF file. A .bin file of sgl-kernel must be chosen, with \
             OWNER/NAME:FILE"
        )),
        (several, _) => Err(format!(
            "there are several GGUF files. Choose one with OWNER/NAME:FILE, or by a quantisation \
             that one file has in its name: {}",
            lists(several)
        )),
    }
}

/// Returns whether `word` stands in `path` as a word, in capitals or not. `Q2_0` is no word of
/// `a-PQ2_0.gguf`, nor `Q4_K` of `a-Q4_K_M.gguf`.
fn has_word(path: &str, word: &str) -> bool {
    let (path, word) = (path.to_lowercase(), word.to_lowercase());
    let continues = |c: char| c.is_alphanumeric() || c == '_';
    path.match_indices(&word).any(|(at, _)| {
        let before = path[..at].chars().next_back();
        let after = path[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(continues)
    })
}

/// Returns whether a file is a small one of text.
fn is_text(path: &str) -> bool {
    path.ends_with(".json") || path.ends_with(".jinja")
}

/// Returns the small files of text that the loader may read beside the file `model`.
///
/// # Errors
/// If there are too many.
fn text_files(paths: &BTreeSet<&str>, model: &str) -> Result<Vec<String>, String> {
    let folder = model.rfind('/').map_or("", |end| &model[..=end]);
    // A .bin file may have the files of its tokenizer in a folder of its own name.
    let own_folder = model.rsplit_once('.').map_or("", |(stem, _)| stem);
    let is_needed = |path: &str| {
        let Some(beside) = path.strip_prefix(folder) else {
            return false;
        };
        let is_index = path.ends_with(".index.json");
        let is_read = match beside.rsplit_once('/') {
            None => true,
            Some((_, "config.json")) => true, // Layers of pooling have one each.
            Some((inner, _)) => {
                beside == TOOL_TEMPLATE_FILE || folder.to_owned() + inner == own_folder
            }
        };
        is_text(path) && !is_index && is_read
    };
    let files = paths.iter().filter(|path| is_needed(path));
    let files: Vec<String> = files.map(|&path| path.to_owned()).collect();
    if files.len() > MAX_TEXT_FILES {
        let count = files.len();
        return Err(format!(
            "there are {count} files of text (.json, .jinja); the limit is {MAX_TEXT_FILES}"
        ));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(paths: &[&str], choice: Option<&str>) -> Result<NeededFiles, String> {
        NeededFiles::find(&paths.iter().copied().collect(), choice)
    }

    /// Returns the file to open and the number of files.
    fn model(paths: &[&str], choice: Option<&str>) -> (Option<String>, usize) {
        let needed = find(paths, choice).unwrap();
        (needed.model, needed.files.len())
    }

    const DIRECTORY: [&str; 12] = [
        ".gitattributes",
        "1_Pooling/config.json",
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "onnx/model.onnx",
        "onnx/tokenizer.json",
        "other.gguf",
        "pytorch_model.bin.index.json",
        "tokenizer.json",
    ];

    #[test]
    fn safetensors_come_with_what_the_loader_reads_beside_them() {
        let needed = find(&DIRECTORY, None).unwrap();
        let expected = [
            "1_Pooling/config.json",
            "additional_chat_templates/tool_use.jinja",
            "chat_template.jinja",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        ];
        assert_eq!(needed.files, expected);
        assert_eq!((&needed.model, needed.has_index), (&None, false));
        assert_eq!(find(&DIRECTORY, Some("model.safetensors")).unwrap(), needed);
        assert_eq!(model(&DIRECTORY, Some("other")).0.unwrap(), "other.gguf");
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let paths = [
            "config.json",
            "model.safetensors.index.json",
            "a-1.safetensors",
        ];
        let needed = find(&paths, None).unwrap();
        assert_eq!(
            needed.files,
            ["config.json", "model.safetensors.index.json"]
        );
        assert!(needed.has_index);
        let shards = |index: &[u8]| needed.shards(index, &paths.into());
        let index = br#"{"weight_map": {"x": "a-1.safetensors", "y": "a-1.safetensors"}}"#;
        assert_eq!(shards(index).unwrap(), ["a-1.safetensors"]);
        let error = shards(br#"{"weight_map": {"x": "../a"}}"#).unwrap_err();
        assert!(
            error.contains(r#"the shard "../a", and there is no such"#),
            "{error}"
        );
        assert!(shards(b"{}").unwrap_err().contains("weight_map"));
    }

    #[test]
    fn a_quantisation_chooses_a_gguf_file() {
        let paths = [
            "m-PQ2_0.gguf",
            "m-Q2_0.gguf",
            "m-Q4_K.gguf",
            "m-Q4_K_M.gguf",
            "mmproj-m.gguf",
        ];
        let chosen = |choice| model(&paths, Some(choice)).0.unwrap();
        assert_eq!(chosen("q2_0"), "m-Q2_0.gguf");
        assert_eq!(chosen("PQ2_0"), "m-PQ2_0.gguf");
        assert_eq!(chosen("Q4_K"), "m-Q4_K.gguf");
        assert_eq!(chosen("mmproj-m.gguf"), "mmproj-m.gguf");
        let error = find(&paths, None).unwrap_err();
        assert!(
            error.contains("m-PQ2_0.gguf, m-Q2_0.gguf") && !error.contains("mmproj"),
            "{error}"
        );
        let error = find(&paths, Some("m")).unwrap_err();
        assert!(error.contains("several GGUF files"), "{error}");
        let error = find(&paths, Some("Q8_0")).unwrap_err();
        assert!(
            error.contains(r#""Q8_0""#) && error.contains("m-Q4_K_M.gguf"),
            "{error}"
        );
        assert_eq!(model(&paths[..1], None).0.unwrap(), "m-PQ2_0.gguf");
    }

    #[test]
    fn a_split_gguf_file_needs_all_of_its_parts() {
        let paths = [
            "q/m-00001-of-00002.gguf",
            "q/m-00002-of-00002.gguf",
            "q/a.json",
            "b.json",
        ];
        assert_eq!(model(&paths, None), (Some(paths[0].to_owned()), 3));
        let error = find(&paths[..1], None).unwrap_err();
        assert!(
            error.contains("the part q/m-00002-of-00002.gguf is missing"),
            "{error}"
        );
    }

    #[test]
    fn a_bin_file_is_chosen_by_its_path() {
        let paths = [
            "m.bin",
            "m/tokenizer.json",
            "n/tokenizer.json",
            "tokenizer_config.json",
        ];
        assert_eq!(model(&paths, Some("m.bin")), (Some("m.bin".to_owned()), 3));
        assert!(
            find(&paths, None)
                .unwrap_err()
                .contains("no model that Sterna reads")
        );
        assert!(
            find(&paths, Some("n.bin"))
                .unwrap_err()
                .contains("no GGUF or .bin file")
        );
    }

    #[test]
    fn the_number_of_files_is_limited() {
        let names: Vec<String> = (0..65).map(|number| format!("{number}.json")).collect();
        let mut paths: Vec<&str> = names.iter().map(String::as_str).collect();
        paths.push("m.gguf");
        assert!(find(&paths, None).unwrap_err().contains("65 files of text"));
    }
}
