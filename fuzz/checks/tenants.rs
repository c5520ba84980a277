//! Reads a tenants file.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use sterna::tenants::{Deadlines, Defaults, Roster};

/// Where Linux keeps files in memory.
const MEMORY: &str = "/dev/shm";

static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
    let name = format!("sterna-fuzz-tenants-{}.toml", std::process::id());
    let memory = PathBuf::from(MEMORY);
    let folder = if memory.is_dir() {
        memory
    } else {
        std::env::temp_dir()
    };
    folder.join(name)
});

/// Checks that a tenants file is read or refused, and reads the same twice.
pub fn check(data: &[u8]) {
    std::fs::write(&*PATH, data).expect("the temporary folder is writable");
    let defaults = Defaults {
        deadlines: Deadlines::default(),
        max_queued: 64,
        max_queued_time: Duration::from_secs(60),
    };
    let roster = Roster::open(&PATH, defaults);
    if let Ok(roster) = roster {
        assert_eq!(roster.names().len(), roster.policies().len());
        let (names, policies) = (roster.names(), roster.policies());
        let again = roster.reread().expect("the same file is still valid");
        assert_eq!((again.names(), again.policies()), (names, policies));
    }
    drop(std::fs::remove_file(&*PATH));
}
