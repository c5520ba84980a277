//! Sets up the memory allocator of a server.

/// Makes glibc return large blocks to the system as soon as they are freed. Call it before the
/// process starts threads. Other C libraries return such blocks anyway.
///
/// By default, each freed block that is larger than any before raises the size from which glibc
/// returns blocks, up to 32 MiB. After large requests glibc then takes such blocks from the heaps
/// of threads, which keep them. mimalloc was tried and kept more.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "a call of the C library")]
pub(super) fn return_large_blocks() {
    const LARGE_BYTES: i32 = 256 << 10;
    // SAFETY: no other thread allocates yet, and the call changes only where later blocks come
    // from.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES) };
    if is_set != 1 {
        tracing::warn!("the process will keep the memory of large requests");
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(super) fn return_large_blocks() {}
