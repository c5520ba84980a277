//! Memory of weights, keys and values, and whatever else is large, in pages as large as the system has.
//!
//! Always true: it begins at a page, so also at a cache line; all of it was zero at first. What nobody has written takes no memory yet.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A fixed number of values.
///
/// A vector of this size would be as good, but the system cannot be told about it: with pages of 2 MiB a model is written with a few
/// hundred interruptions instead of some hundred thousand, and its addresses are looked up in less.
pub struct HugeSlice<T> {
    map: MmapMut,
    values: PhantomData<T>,
}

impl<T: FromBytes + IntoBytes + Immutable> HugeSlice<T> {
    /// `len` values of zero bits.
    ///
    /// # Panics
    /// If the system has not as much memory.
    #[must_use]
    pub fn new(len: usize) -> HugeSlice<T> {
        let bytes = len.checked_mul(size_of::<T>());
        let map = bytes.map(MmapMut::map_anon);
        let Some(Ok(map)) = map else {
            panic!("no memory for {len} values of {} bytes", size_of::<T>());
        };
        // Only a hint: a system that does not take it is a little slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        HugeSlice {
            map,
            values: PhantomData,
        }
    }
}

impl<T: FromBytes + IntoBytes + Immutable + Copy> From<Vec<T>> for HugeSlice<T> {
    /// A copy.
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
    fn memory_holds_what_is_written() {
        let mut memory = HugeSlice::<u16>::new(5000);
        assert_eq!(&memory[..], &[0; 5000]);
        memory[4999] = 7;
        assert_eq!((memory.len(), memory[4998], memory[4999]), (5000, 0, 7));
        assert!(memory.as_ptr().addr().is_multiple_of(64));
        assert_eq!(&HugeSlice::from(vec![1.5_f32, -2.0])[..], &[1.5, -2.0]);
        assert!(HugeSlice::<f32>::new(0).is_empty());
    }
}
