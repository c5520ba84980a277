//! Large memory, for weights, keys and values, in the operating system's largest pages.
//!
//! Invariant: the memory begins at a page boundary, so also at a cache line.
//!
//! Invariant: the memory starts as zeros. Pages that are not written yet take no physical memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

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
        let bytes = len.checked_mul(size_of::<T>());
        let map = bytes.map(MmapMut::map_anon);
        let Some(Ok(map)) = map else {
            panic!("no memory for {len} values of {} bytes", size_of::<T>());
        };
        // A hint that may fail: without it the memory works, but is slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        HugeSlice {
            map,
            values: PhantomData,
        }
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
