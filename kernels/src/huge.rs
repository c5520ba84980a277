//! Large memory, for weights, keys and values, in the operating system's largest pages.
//!
//! Invariant: the memory begins at a page boundary, so also at a cache line.
//!
//! Invariant: the memory starts as zeros. Pages that are not written yet take no physical memory,
//! unless the memory is committed.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use memmap2::MmapMut;
use zerocopy::{FromBytes, Immutable, IntoBytes};

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

    /// Allocates `len` values of zero bits, but no physical memory. The first write to a page takes
    /// that, and a shortage then kills the process; [`commit`](Self::commit) takes it earlier.
    ///
    /// # Errors
    /// If the system does not promise the memory.
    pub fn reserve(len: usize) -> io::Result<HugeSlice<T>> {
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

    /// Takes the physical memory of some values, which keep what they are. Systems other than Linux
    /// 5.14 and later do not know how; there this does nothing.
    ///
    /// # Errors
    /// If the system does not have enough memory and says so. A system may also kill a process.
    ///
    /// # Panics
    /// If there are no such values.
    pub fn commit(&mut self, values: Range<usize>) -> io::Result<()> {
        assert!(
            values.start <= values.end && values.end <= self.len(),
            "no values {values:?} of {}",
            self.len()
        );
        #[cfg(target_os = "linux")]
        {
            let (start, len) = (values.start * size_of::<T>(), values.len() * size_of::<T>());
            let populated = (self.map).advise_range(memmap2::Advice::PopulateWrite, start, len);
            match populated {
                Err(error) if error.kind() != io::ErrorKind::InvalidInput => return Err(error),
                _ => {}
            }
        }
        Ok(())
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
        let mut memory = HugeSlice::<u8>::reserve(BYTES).unwrap();
        memory[100] = 7;
        assert!(resident_kib(memory.as_ptr().addr()) <= 2 << 10);
        // Half, from the middle of a page.
        memory.commit(1000..BYTES / 2).unwrap();
        let resident = resident_kib(memory.as_ptr().addr());
        assert!((12 << 10..=14 << 10).contains(&resident), "{resident} KiB");
        memory.commit(0..BYTES).unwrap();
        assert!(resident_kib(memory.as_ptr().addr()) >= BYTES / 1024);
        assert!(
            memory
                .iter()
                .enumerate()
                .all(|(i, &byte)| byte == if i == 100 { 7 } else { 0 })
        );
        HugeSlice::<u8>::reserve(0).unwrap().commit(0..0).unwrap();
    }

    #[test]
    #[should_panic(expected = "no values 3..5 of 4")]
    fn values_that_do_not_exist_are_not_committed() {
        let _ = HugeSlice::<u64>::new(4).commit(3..5);
    }

    #[test]
    fn memory_that_no_machine_has_is_an_error() {
        assert!(HugeSlice::<u64>::reserve(usize::MAX / 2).is_err());
        assert!(HugeSlice::<u64>::reserve(1 << 58).is_err());
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
