//! The name of a model on a hub: `OWNER/NAME`, or `OWNER/NAME:CHOICE`.

use std::path::Path;

use crate::checkpoint::{is_bin, is_gguf};

/// The longest owner and the longest name on the Hugging Face Hub.
const MAX_PART: usize = 96;

/// The name of a model, and which of its files is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    owner: String,
    name: String,
    /// A file of the repository, or a quantisation that the name of the file has.
    pub(super) choice: Option<String>,
}

impl ModelName {
    /// Returns the name that `model` is. Returns `None` if it is a path: of something that exists,
    /// or in another form than a name.
    ///
    /// # Errors
    /// If there is a directory `OWNER/NAME` and `model` also chooses a file of it.
    pub fn find(model: &Path) -> Result<Option<ModelName>, String> {
        let Some(name) = model.to_str().and_then(ModelName::parse) else {
            return Ok(None);
        };
        if model.exists() {
            return Ok(None);
        }
        let repository = name.repository();
        match name.choice {
            Some(choice) if Path::new(&repository).exists() => Err(format!(
                "{repository}:{choice}: {repository} is a directory here, so it is no name of a \
                 model. Give the path of a file in it"
            )),
            _ => Ok(Some(name)),
        }
    }

    /// Returns the name that `text` has the form of.
    fn parse(text: &str) -> Option<ModelName> {
        let (repository, choice) = match text.split_once(':') {
            Some((repository, choice)) => (repository, Some(choice)),
            None => (text, None),
        };
        let (owner, name) = repository.split_once('/')?;
        let is_file = is_gguf(name) || is_bin(name);
        let has_choice = choice.is_none_or(|choice| !choice.trim().is_empty());
        if !is_part(owner) || !is_part(name) || is_file || !has_choice {
            return None;
        }
        Some(ModelName {
            owner: owner.to_owned(),
            name: name.to_owned(),
            choice: choice.map(str::to_owned),
        })
    }

    /// Returns `OWNER/NAME` if `text` has it in another form: in the address of a page of the hub,
    /// or with a branch.
    pub fn hidden_in(text: &str) -> Option<String> {
        let text = text
            .trim_start_matches("https://")
            .trim_start_matches("http://");
        let page = ["huggingface.co/", "hf.co/"].iter();
        let path = page.fold(text, |text, host| text.strip_prefix(host).unwrap_or(text));
        let mut parts = path.split(['/', '@', ':', '?']).take(2);
        let repository = format!("{}/{}", parts.next()?, parts.next()?);
        let is_page = path != text;
        let has_branch = path.strip_prefix(&repository)?.starts_with('@');
        let name = ModelName::parse(&repository)?;
        (is_page || has_branch).then(|| name.repository())
    }

    /// Returns `OWNER/NAME`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// Returns the name of the model's folder in the cache.
    pub(super) fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }
}

/// Returns whether the hub allows `part` as an owner or a name. With "--" the folder in the cache
/// would have two meanings.
fn is_part(part: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_end = |end: Option<char>| end.is_some_and(|end| !matches!(end, '-' | '.'));
    part.len() <= MAX_PART
        && part.bytes().all(is_allowed)
        && is_end(part.chars().next())
        && is_end(part.chars().next_back())
        && !part.contains("--")
        && !part.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_an_owner_and_perhaps_a_choice() {
        let name = ModelName::parse("prism-ml/Ternary-Bonsai-1.7B-gguf").unwrap();
        assert_eq!(name.repository(), "prism-ml/Ternary-Bonsai-1.7B-gguf");
        assert_eq!(name.folder(), "models--prism-ml--Ternary-Bonsai-1.7B-gguf");
        assert_eq!(name.choice, None);
        let name = ModelName::parse("a/b:sub/c.gguf").unwrap();
        assert_eq!(name.repository(), "a/b");
        assert_eq!(name.choice.as_deref(), Some("sub/c.gguf"));
    }

    #[test]
    fn other_texts_are_paths() {
        for path in [
            "model", "/a/b", "./a/b", "../a", "a/b/c", "a/", "/b", "a/..", "a/b.gguf", "a/b.BIN",
            "a/b:", "a/b: ", "a b/c", "a/b--c", "a/-b", "~/b", "a/b\\c", "",
        ] {
            assert_eq!(ModelName::parse(path), None, "{path}");
        }
        assert_eq!(ModelName::parse(&format!("a/{}", "b".repeat(97))), None);
    }

    #[test]
    fn a_name_is_found_in_the_address_of_its_page_and_before_a_branch() {
        for text in [
            "https://huggingface.co/a/b",
            "http://hf.co/a/b/tree/main",
            "huggingface.co/a/b?show=1",
            "hf.co/a/b:Q2_0",
            "a/b@main",
        ] {
            assert_eq!(ModelName::hidden_in(text).as_deref(), Some("a/b"), "{text}");
        }
        for text in [
            "a/b",
            "a/b/c",
            "./a/b@c",
            "https://a/b/c",
            "hf.co/a",
            "a@b",
            "",
        ] {
            assert_eq!(ModelName::hidden_in(text), None, "{text}");
        }
    }

    #[test]
    fn what_exists_wins_over_a_name() {
        // Tests run in the root of the package.
        assert_eq!(ModelName::find(Path::new("src/hub")), Ok(None));
        let error = ModelName::find(Path::new("src/hub:Q2_0")).unwrap_err();
        assert!(error.contains("src/hub is a directory here"), "{error}");
        assert!(
            ModelName::find(Path::new("src/no-such-model"))
                .unwrap()
                .is_some()
        );
    }
}
