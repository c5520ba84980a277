//! The slots through which parts go to workers and results come back.
#![expect(
    unsafe_code,
    reason = "jobs with parts of any type share one memory, which is allocated once"
)]

use crate::fault::{self, Place};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// Memory for slots of any type. It grows to the largest job.
#[derive(Default)]
pub(super) struct SlotMemory(Vec<SlotLine>);

#[repr(align(128))]
struct SlotLine {
    _bytes: MaybeUninit<[u8; 128]>,
}

/// The slots of one job.
pub(super) struct Slots<'a, T, R> {
    slots: &'a mut [MaybeUninit<Slot<T, R>>],
    /// The number of slots that are written.
    filled: usize,
}

/// The place of one worker's part, and later of its result.
#[repr(align(128))]
pub(super) struct Slot<T, R>(UnsafeCell<SlotState<T, R>>);

enum SlotState<T, R> {
    Part(T),
    Taken,
    Result(R),
}

// SAFETY: threads that share a slot access its state only by `work`, whose callers guarantee that
// one thread at a time does. The part then moves to that thread and the result back, which `Send`
// allows.
unsafe impl<T: Send, R: Send> Sync for Slot<T, R> {}

impl<'a, T, R> Slots<'a, T, R> {
    /// Returns `count` empty slots in `memory`. Allocates only if no job before needed as much.
    pub(super) fn new(memory: &'a mut SlotMemory, count: usize) -> Slots<'a, T, R> {
        const { assert!(align_of::<Slot<T, R>>() == align_of::<SlotLine>()) }
        let lines = &mut memory.0;
        let needed = count * (size_of::<Slot<T, R>>() / size_of::<SlotLine>());
        if lines.len() < needed {
            lines.resize_with(needed, || SlotLine {
                _bytes: MaybeUninit::uninit(),
            });
        }
        // SAFETY: the lines have at least as many bytes as the slots and the same alignment, and
        // they are borrowed exclusively for 'a. A `MaybeUninit` may hold any bytes.
        let slots = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) };
        Slots { slots, filled: 0 }
    }

    /// Writes a part to the next slot.
    ///
    /// # Panics
    /// If all slots are filled.
    pub(super) fn push(&mut self, part: T) {
        let workers = self.slots.len();
        let slot = self.slots.get_mut(self.filled);
        let slot = slot.unwrap_or_else(|| panic!("more parts than the {workers} workers"));
        slot.write(Slot(UnsafeCell::new(SlotState::Part(part))));
        self.filled += 1;
    }

    /// Returns the slots that hold parts.
    pub(super) fn filled(&self) -> &[Slot<T, R>] {
        // SAFETY: `push` has written the first `filled` slots.
        unsafe { self.slots[..self.filled].assume_init_ref() }
    }

    /// Returns the result of each part. Every worker must have finished.
    pub(super) fn results(self) -> Vec<R> {
        let filled = &mut self.slots[..self.filled];
        // SAFETY: `push` has written the first `filled` slots.
        let filled = unsafe { filled.assume_init_mut() };
        let result = |slot: &mut Slot<T, R>| {
            let state = std::mem::replace(slot.0.get_mut(), SlotState::Taken);
            match state {
                SlotState::Result(result) => result,
                SlotState::Part(_) | SlotState::Taken => {
                    unreachable!("every worker has finished")
                }
            }
        };
        filled.iter_mut().map(result).collect()
    }
}

impl<T, R> Drop for Slots<'_, T, R> {
    /// Drops the parts and results that are left after a panic.
    fn drop(&mut self) {
        // SAFETY: `push` has written the first `filled` slots, and nothing accesses them later.
        unsafe { self.slots[..self.filled].assume_init_drop() };
    }
}

impl<T, R> Slot<T, R> {
    /// Takes the part, calls `work` with it and stores the result.
    ///
    /// # Safety
    /// No other thread may call this at the same time.
    pub(super) unsafe fn work(&self, work: impl FnOnce(T) -> R) {
        let state = self.0.get();
        // SAFETY: the caller guarantees that no other thread is here, and the reference ends with
        // this statement.
        let part = std::mem::replace(unsafe { &mut *state }, SlotState::Taken);
        let SlotState::Part(part) = part else {
            unreachable!("each worker runs once per job");
        };
        fault::pass(Place::PartTaken);
        let result = SlotState::Result(work(part));
        // SAFETY: the caller guarantees that no other thread is here.
        unsafe { *state = result };
    }
}
