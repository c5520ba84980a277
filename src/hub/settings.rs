//! Where models are downloaded from and kept. The environment variables are those of Hugging Face's
//! own programs.

use std::env;
use std::fmt;
use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::Proxy;
use ureq::http::Uri;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// The pause before a try that follows a failed one. Each further pause is longer by as much.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Where models are downloaded from and kept.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// The URL of the hub, without a slash at its end (`HF_ENDPOINT`).
    pub endpoint: String,
    /// The directory of the cache (`HF_HUB_CACHE`, or `hub` in `HF_HOME`).
    pub cache: PathBuf,
    /// The token (`HF_TOKEN`, or the file `token` in `HF_HOME`).
    pub token: Option<HubToken>,
    /// Whether downloads are forbidden (`HF_HUB_OFFLINE`, or `--offline`).
    pub is_offline: bool,
    /// The proxy (`HTTPS_PROXY` and the like).
    pub proxy: Option<Proxy>,
    /// The pause before the second try.
    pub retry_pause: Duration,
}

/// A token. Its `Debug` form hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl HubToken {
    /// Returns the token that `text` is, without white space at its ends.
    ///
    /// # Errors
    /// If it is empty or has characters that no header can have.
    pub fn new(text: &str) -> Result<HubToken, String> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token has ASCII letters, digits and signs only".to_owned());
        }
        Ok(HubToken(text.to_owned()))
    }

    /// Returns the header that carries the token.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HubToken(hidden)")
    }
}

impl HubSettings {
    /// Reads the environment. `is_offline` forbids downloads whatever the environment says.
    ///
    /// # Errors
    /// If a variable is malformed, or nothing says where the cache is.
    pub fn from_environment(is_offline: bool) -> Result<HubSettings, String> {
        let mut settings = HubSettings::read(|name| env::var(name).ok())?;
        settings.is_offline |= is_offline;
        settings.proxy = Proxy::try_from_env();
        Ok(settings)
    }

    /// Reads the variables. An empty one counts as missing.
    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<HubSettings, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let directory = |name: &str| variable(name).map(PathBuf::from);
        let user_cache = || {
            let of_home = || directory("HOME").map(|home| home.join(".cache"));
            directory("XDG_CACHE_HOME").or_else(of_home)
        };
        let home = || user_cache().map(|cache| cache.join("huggingface"));
        let home = directory("HF_HOME").or_else(home);
        let cache = directory("HF_HUB_CACHE").or_else(|| Some(home.as_ref()?.join("hub")));
        let offline = variable("HF_HUB_OFFLINE").unwrap_or_default();
        let is_true = ["1", "true", "yes", "on"].contains(&offline.to_lowercase().as_str());
        let token = match variable("HF_TOKEN") {
            Some(token) => {
                let token = HubToken::new(&token);
                Some(token.map_err(|error| format!("HF_TOKEN: {error}"))?)
            }
            None => home
                .and_then(|home| token_file(&home.join("token")))
                .transpose()?,
        };
        Ok(HubSettings {
            endpoint: endpoint(variable("HF_ENDPOINT"))?,
            cache: cache.ok_or(
                "nothing says where downloaded models are kept: HF_HOME, HF_HUB_CACHE, \
                 XDG_CACHE_HOME and HOME are not set. Set HF_HOME to a directory",
            )?,
            token,
            is_offline: is_true,
            proxy: None,
            retry_pause: RETRY_PAUSE,
        })
    }
}

/// Reads the token that `hf auth login` has written, if it has.
fn token_file(path: &Path) -> Option<Result<HubToken, String>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => return None,
        Err(error) => return Some(Err(format!("{}: {error}", path.display()))),
    };
    if text.trim().is_empty() {
        return None; // As Hugging Face's own programs read it.
    }
    Some(HubToken::new(&text).map_err(|error| format!("{}: {error}", path.display())))
}

fn endpoint(value: Option<String>) -> Result<String, String> {
    let text = value.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
    let text = text.trim().trim_end_matches('/');
    let uri = text.parse::<Uri>().ok();
    let is_usable = |uri: &Uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri
                .authority()
                .is_some_and(|host| !host.as_str().contains('@'))
            && uri.query().is_none()
    };
    if !uri.as_ref().is_some_and(is_usable) {
        return Err(format!(
            "HF_ENDPOINT must be a URL such as {DEFAULT_ENDPOINT}, without a user or a query; got \
             {text:?}"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<HubSettings, String> {
        HubSettings::read(|wanted| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_other_programs_have_it() {
        let cache = |variables: &[_]| read(variables).unwrap().cache;
        let home = ("HOME", "/home/a");
        assert_eq!(cache(&[home]), Path::new("/home/a/.cache/huggingface/hub"));
        let xdg = ("XDG_CACHE_HOME", "/xdg");
        assert_eq!(cache(&[home, xdg]), Path::new("/xdg/huggingface/hub"));
        let hf = ("HF_HOME", "/hf");
        assert_eq!(cache(&[home, xdg, hf]), Path::new("/hf/hub"));
        let hub = ("HF_HUB_CACHE", "/hub");
        assert_eq!(cache(&[home, hf, hub]), Path::new("/hub"));
        assert_eq!(cache(&[("HF_HOME", " "), home]), cache(&[home]));
        assert!(read(&[]).unwrap_err().contains("Set HF_HOME"));
    }

    #[test]
    fn a_token_that_cannot_be_read_is_an_error() {
        let name = format!("sterna-token-{}", std::process::id());
        let home = env::temp_dir().join(name);
        fs::create_dir_all(home.join("token")).unwrap();
        let error = read(&[("HF_HOME", home.to_str().unwrap())]).unwrap_err();
        fs::remove_dir_all(&home).unwrap();
        assert!(error.contains("token: "), "{error}");
    }

    #[test]
    fn the_endpoint_and_the_token_are_checked() {
        let hf = ("HF_HOME", "/no/such/directory");
        let settings = read(&[hf]).unwrap();
        assert_eq!(settings.endpoint, "https://huggingface.co");
        assert_eq!((settings.token, settings.is_offline), (None, false));
        let mirror = ("HF_ENDPOINT", "http://127.0.0.1:8080/hub/");
        let token = ("HF_TOKEN", "hf_secret\n");
        let settings = read(&[hf, mirror, token, ("HF_HUB_OFFLINE", "YES")]).unwrap();
        assert_eq!(settings.endpoint, "http://127.0.0.1:8080/hub");
        assert!(settings.is_offline);
        assert!(!format!("{settings:?}").contains("secret"));
        assert_eq!(settings.token.unwrap().header(), "Bearer hf_secret");
        for endpoint in [
            "huggingface.co",
            "ftp://a",
            "https://",
            "https://a:b@c",
            "http://a?b",
        ] {
            let error = read(&[hf, ("HF_ENDPOINT", endpoint)]).unwrap_err();
            assert!(error.contains("HF_ENDPOINT must be a URL"), "{error}");
        }
        let error = read(&[hf, ("HF_TOKEN", "a secret")]).unwrap_err();
        assert!(
            error.contains("HF_TOKEN") && !error.contains("secret"),
            "{error}"
        );
    }
}
