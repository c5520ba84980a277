//! Large memory, for weights, keys and values, in the operating system's largest pages.
//!
//! Invariant: the memory begins at a page boundary, so also at a cache line.
//!
//! Invariant: the memory starts as zeros. Pages that are not written yet take no physical memory,
//! unless the memory is committed.

use std::fmt;
use std::io;
use std::marker::PhantomData;
#[cfg(target_os = "linux")]
use std::num::NonZero;
use std::ops::{Deref, DerefMut};
#[cfg(target_os = "linux")]
use std::thread;

use memmap2::MmapMut;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The bytes of a large page.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// The threads that take physical memory. More would wait for each other in the system.
#[cfg(target_os = "linux")]
const MAX_THREADS: usize = 16;

/// A fixed number of values in large pages.
///
/// A `Vec` would have pages of 4 KiB. With pages of 2 MiB, filling the memory causes a few hundred
/// page faults instead of several hundred thousand, and address translation is faster.
pub struct HugeSlice<T> {
    map: MmapMut,
    values: PhantomData<T>,
}

impl<T: FromBytes + IntoBytes + Immutable> HugeSlice<T> {
    /// Allocates `len` values of zero bits.
    ///
    /// # Panics
    /// If the system does not have enough memory.
    pub fn new(len: usize) -> HugeSlice<T> {
        HugeSlice::reserve(len).unwrap_or_else(|error| {
            panic!(
                "no memory for {len} values of {} bytes: {error}",
                size_of::<T>()
            )
        })
    }

    /// Allocates `len` values of zero bits, and takes the physical memory for them now. Otherwise
    /// the first write to each page takes it, and a shortage then kills the process.
    ///
    /// # Errors
    /// If the system does not have enough memory and says so. A system may also kill a process.
    pub fn committed(len: usize) -> io::Result<HugeSlice<T>> {
        let mut memory = HugeSlice::reserve(len)?;
        memory.commit()?;
        Ok(memory)
    }

    fn reserve(len: usize) -> io::Result<HugeSlice<T>> {
        let bytes = len.checked_mul(size_of::<T>());
        let map = MmapMut::map_anon(bytes.ok_or(io::ErrorKind::OutOfMemory)?)?;
        // A hint that may fail: without it the memory works, but is slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(HugeSlice {
            map,
            values: PhantomData,
        })
    }

    /// Takes the physical memory.
    fn commit(&mut self) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        match self.populate() {
            // A kernel before 5.14 does not know the advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            result => return result,
        }
        self.map.fill(0);
        Ok(())
    }

    /// Takes the physical memory. All cores do it, because the system writes zeros into all pages.
    #[cfg(target_os = "linux")]
    fn populate(&self) -> io::Result<()> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let share = self.map.len().div_ceil(cores.min(MAX_THREADS)).max(1);
        let share = share.next_multiple_of(HUGE_PAGE);
        let (map, advice) = (&self.map, memmap2::Advice::PopulateWrite);
        thread::scope(|scope| {
            let populate = |start: usize| {
                let bytes = share.min(map.len() - start);
                let take = move || map.advise_range(advice, start, bytes);
                // This thread does it if the system gives no other.
                let spawned = thread::Builder::new().spawn_scoped(scope, take);
                spawned.map_err(|_| take())
            };
            let shares: Vec<_> = (0..map.len()).step_by(share).map(populate).collect();
            shares.into_iter().try_for_each(|share| match share {
                Ok(thread) => thread.join().expect("system calls do not panic"),
                Err(taken) => taken,
            })
        })
    }
}

impl<T: FromBytes + IntoBytes + Immutable + Copy> From<Vec<T>> for HugeSlice<T> {
    /// Copies the values.
    fn from(values: Vec<T>) -> HugeSlice<T> {
        let mut memory = HugeSlice::new(values.len());
        memory.copy_from_slice(&values);
        memory
    }
}

impl<T: FromBytes + IntoBytes + Immutable> Deref for HugeSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match <[T]>::ref_from_bytes(&self.map) {
            Ok(values) => values,
            Err(_) => unreachable!("whole values, from the start of a page"),
        }
    }
}

impl<T: FromBytes + IntoBytes + Immutable> DerefMut for HugeSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match <[T]>::mut_from_bytes(&mut self.map) {
            Ok(values) => values,
            Err(_) => unreachable!("whole values, from the start of a page"),
        }
    }
}

impl<T> fmt::Debug for HugeSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.map.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the KiB of physical memory behind the mapping that contains an address.
    #[cfg(target_os = "linux")]
    fn resident_kib(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_inside = false;
        for line in maps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if let Some((start, end)) = first.split_once('-') {
                let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
                is_inside = (start..end).contains(&address);
            } else if is_inside && first == "Rss:" {
                return line.split_whitespace().nth(1).unwrap().parse().unwrap();
            }
        }
        panic!("no mapping has the address {address:#x}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn committed_memory_is_resident_before_it_is_written() {
        const BYTES: usize = 24 << 20;
        let memory = HugeSlice::<u8>::committed(BYTES).unwrap();
        assert!(resident_kib(memory.as_ptr().addr()) >= BYTES / 1024);
        assert!(memory.iter().all(|&byte| byte == 0));
        assert_eq!(HugeSlice::<u8>::committed(0).unwrap().len(), 0);
    }

    #[test]
    fn memory_that_no_machine_has_is_an_error() {
        assert!(HugeSlice::<u64>::committed(usize::MAX / 2).is_err());
        assert!(HugeSlice::<u64>::committed(1 << 58).is_err());
    }

    #[test]
    fn values_read_back_as_written() {
        let mut memory = HugeSlice::<u16>::new(5000);
        assert_eq!(&memory[..], &[0; 5000]);
        memory[4999] = 7;
        assert_eq!((memory.len(), memory[4998], memory[4999]), (5000, 0, 7));
        assert!(memory.as_ptr().addr().is_multiple_of(64));
        assert_eq!(&HugeSlice::from(vec![1.5_f32, -2.0])[..], &[1.5, -2.0]);
        assert!(HugeSlice::<f32>::new(0).is_empty());
    }
}
