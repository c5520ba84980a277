//! The CPU cores that this process may compute on.
//!
//! Two hyperthreads of a physical core share its vector units and its path to memory. A second
//! thread there does not make saturated arithmetic faster. So threads are counted and pinned by
//! physical core.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;

use core_affinity::CoreId;

/// The directory in which Linux describes the CPU topology.
const TOPOLOGY: &str = "/sys/devices/system/cpu";

/// Returns one logical CPU of each physical core that this thread may run on, in ascending order.
/// Returns none if the system does not tell. Call it before the thread is pinned.
pub fn physical() -> Vec<usize> {
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    let allowed = allowed.into_iter().map(|core| core.id).collect();
    one_of_each_core(&allowed, Path::new(TOPOLOGY))
}

/// Returns the number of logical CPUs that this process may use, considering its affinity and the
/// quota of a cgroup.
pub fn logical() -> usize {
    // The standard library considers the affinity and the quota of cgroup version 1 or 2.
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of threads that compute fastest: one for each physical core, or fewer if the
/// quota of a cgroup allows less.
pub fn usable() -> usize {
    threads(logical(), physical().len())
}

/// Pins the calling thread to a logical CPU. Returns whether the system did so.
pub fn pin(cpu: usize) -> bool {
    core_affinity::set_for_current(CoreId { id: cpu })
}

fn threads(logical: usize, physical: usize) -> usize {
    if physical == 0 {
        logical
    } else {
        logical.min(physical)
    }
}

/// Returns the lowest `allowed` CPU of each core. A CPU that `topology` does not describe counts as
/// a core.
fn one_of_each_core(allowed: &BTreeSet<usize>, topology: &Path) -> Vec<usize> {
    let mut taken = BTreeSet::new();
    let mut firsts = Vec::new();
    for &cpu in allowed {
        if taken.contains(&cpu) {
            continue;
        }
        firsts.push(cpu);
        let file = topology.join(format!("cpu{cpu}/topology/thread_siblings_list"));
        if let Ok(siblings) = fs::read_to_string(file) {
            taken.extend(cpu_list(&siblings).unwrap_or_default());
        }
    }
    firsts
}

/// Reads a list of CPUs such as `0,4` or `0-1,8`. Returns `None` if the text is malformed.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the CPUs chosen among `allowed`. The siblings of CPU i are `lists[i]`.
    fn chosen(name: &str, lists: &[&str], allowed: &[usize]) -> Vec<usize> {
        let folder = std::env::temp_dir().join(format!("sterna-{name}-{}", std::process::id()));
        for (cpu, list) in lists.iter().enumerate() {
            let topology = folder.join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join("thread_siblings_list"), list).unwrap();
        }
        let chosen = one_of_each_core(&allowed.iter().copied().collect(), &folder);
        fs::remove_dir_all(&folder).unwrap();
        chosen
    }

    #[test]
    fn hyperthreads_count_once() {
        let adjacent = ["0-1\n", "0-1\n", "2-3\n", "2-3\n"];
        assert_eq!(chosen("adjacent", &adjacent, &[0, 1, 2, 3]), [0, 2]);
        let apart = [
            "0,4\n", "1,5\n", "2,6\n", "3,7\n", "0,4\n", "1,5\n", "2,6\n", "3,7\n",
        ];
        assert_eq!(
            chosen("apart", &apart, &[0, 1, 2, 3, 4, 5, 6, 7]),
            [0, 1, 2, 3]
        );
        assert_eq!(chosen("alone", &["0\n", "1\n"], &[0, 1]), [0, 1]);
        let four = ["0-3", "0-3", "0-3", "0-3", "4-7", "4-7", "4-7", "4-7"];
        assert_eq!(chosen("four", &four, &[0, 1, 2, 3, 4, 5, 6, 7]), [0, 4]);
    }

    #[test]
    fn only_allowed_cpus_count() {
        let apart = [
            "0,4\n", "1,5\n", "2,6\n", "3,7\n", "0,4\n", "1,5\n", "2,6\n", "3,7\n",
        ];
        // The second thread of core 0, both threads of core 1, the first thread of core 3.
        assert_eq!(chosen("allowed", &apart, &[4, 1, 5, 3]), [1, 3, 4]);
        assert_eq!(chosen("nothing-allowed", &apart, &[]), [0; 0]);
    }

    #[test]
    fn without_a_readable_topology_every_cpu_is_a_core() {
        assert_eq!(chosen("missing", &["0"], &[0, 1, 2]), [0, 1, 2]);
        assert_eq!(chosen("garbled", &["0-", "?"], &[0, 1]), [0, 1]);
    }

    #[test]
    fn lists_of_cpus_are_read() {
        for (text, expected) in [
            ("0", Some(vec![0])),
            ("0-1,8\n", Some(vec![0, 1, 8])),
            ("3,2", Some(vec![3, 2])),
            ("", None),
            ("0-", None),
            ("a", None),
        ] {
            assert_eq!(cpu_list(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_quota_lowers_the_count_and_a_missing_topology_does_not() {
        assert_eq!(threads(8, 4), 4); // Hyperthreads.
        assert_eq!(threads(3, 4), 3); // A quota of three cores.
        assert_eq!(threads(2, 0), 2);
        assert!(usable() >= 1 && usable() <= thread::available_parallelism().unwrap().get());
    }
}
