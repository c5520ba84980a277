//! The memory that this process may use, and sizes of memory on the command line.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the number of bytes that this process may still allocate: the minimum of the machine's
/// available memory and the memory left in each enclosing cgroup.
pub fn usable_memory() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text));
    let cgroup = cgroup_memory_left();
    machine.into_iter().chain(cgroup).min().unwrap_or(2 << 30)
}

fn meminfo_available(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns the minimum of the memory left in this process's cgroup and its ancestors. Reads cgroup
/// version 2, and the memory controller of version 1.
fn cgroup_memory_left() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some((PathBuf::from("/sys/fs/cgroup").join(path), &CGROUP_2)),
                "memory" => Some((PathBuf::from("/sys/fs/cgroup/memory").join(path), &CGROUP_1)),
                _ => None,
            }
        })
        .filter_map(|(folder, names)| {
            let left = folder
                .ancestors()
                .filter_map(|folder| memory_left(folder, names));
            left.min()
        })
        .min()
}

/// The names of a cgroup version's files, and of the page cache in its statistics.
struct CgroupNames {
    limit: &'static str,
    used: &'static str,
    cache: [&'static str; 2],
}

const CGROUP_2: CgroupNames = CgroupNames {
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

const CGROUP_1: CgroupNames = CgroupNames {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

/// Returns `limit - used` of one cgroup, if it has a limit. The page cache counts as free, because
/// the kernel drops it when memory is needed. Otherwise a checkpoint that was just read would look
/// like used memory.
fn memory_left(folder: &Path, names: &CgroupNames) -> Option<u64> {
    let read = |name| fs::read_to_string(folder.join(name)).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let limit = number(names.limit)?;
    let statistics = read("memory.stat").unwrap_or_default();
    let cached: u64 = statistics
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| names.cache.contains(name))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum();
    let used = number(names.used).unwrap_or(0).saturating_sub(cached);
    Some(limit.saturating_sub(used))
}

/// Reads a size in bytes, such as `4GiB`, `512 MiB`, `1.5G` or `2000000000`.
pub(super) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` must begin with a number"))?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => {
            return Err(format!(
                "`{other}` is not a unit of memory; use KiB, MiB, GiB or TiB"
            ));
        }
    };
    Ok((number * factor as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, expected) in [
            ("4GiB", 4 << 30),
            ("512 MiB", 512 << 20),
            ("1.5g", 3 << 29),
            ("2gb", 2_000_000_000),
            ("77", 77),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
        }
        for text in ["", "GiB", "4 parsecs", "-1"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_page_cache_counts_as_free_memory() {
        let folder = std::env::temp_dir().join(format!("sterna-cgroup-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(memory_left(&folder, &CGROUP_2), None);
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        write(
            "memory.stat",
            "anon 200\nactive_file 300\ninactive_file 400\n",
        );
        assert_eq!(memory_left(&folder, &CGROUP_2), Some(800));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_machines_available_memory_is_read() {
        assert_eq!(
            meminfo_available("MemTotal: 9 kB\nMemAvailable:  7 kB\n"),
            Some(7 * 1024)
        );
        assert!(usable_memory() > 0);
    }
}
