//! shuttle's threads, locks and atomics, and channels over them, with the interfaces that the
//! engine uses. Each operation on a channel lets another thread run before it.

pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
pub(super) use shuttle::sync::{Mutex, MutexGuard, mpsc};
pub(super) use shuttle::thread;

/// A cell that is set once.
pub(super) struct OnceLock<T>(std::sync::OnceLock<T>);

impl<T> Default for OnceLock<T> {
    fn default() -> OnceLock<T> {
        OnceLock(std::sync::OnceLock::new())
    }
}

impl<T> OnceLock<T> {
    pub(super) fn get(&self) -> Option<&T> {
        thread::yield_now();
        self.0.get()
    }

    pub(super) fn set(&self, value: T) -> Result<(), T> {
        thread::yield_now();
        self.0.set(value)
    }

    pub(super) fn get_or_init(&self, value: impl FnOnce() -> T) -> &T {
        thread::yield_now();
        self.0.get_or_init(value)
    }
}

/// Channels from which one thread receives, as from `crossbeam`'s.
pub(super) mod channel {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use shuttle::sync::{Mutex, MutexGuard};
    use shuttle::thread::{self, Thread};

    struct State<T> {
        messages: VecDeque<T>,
        capacity: usize,
        senders: usize,
        is_closed: bool, // The receiver is dropped.
        waiting: Option<Thread>,
    }

    type Shared<T> = Arc<Mutex<State<T>>>;

    pub(in crate::engine) struct Sender<T>(Shared<T>);

    pub(in crate::engine) struct Receiver<T>(Shared<T>);

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::engine) enum TryRecvError {
        Empty,
        Disconnected,
    }

    pub(in crate::engine) fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
        let shared = Arc::new(Mutex::new(State {
            messages: VecDeque::new(),
            capacity,
            senders: 1,
            is_closed: false,
            waiting: None,
        }));
        (Sender(Arc::clone(&shared)), Receiver(shared))
    }

    pub(in crate::engine) fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
        bounded(usize::MAX)
    }

    fn lock<T>(shared: &Shared<T>) -> MutexGuard<'_, State<T>> {
        shared.lock().expect("no thread panics")
    }

    impl<T> State<T> {
        fn wake(&mut self) {
            if let Some(thread) = self.waiting.take() {
                thread.unpark();
            }
        }
    }

    impl<T> Sender<T> {
        pub(in crate::engine) fn send(&self, message: T) -> Result<(), T> {
            let mut state = lock(&self.0);
            if state.is_closed || state.messages.len() >= state.capacity {
                return Err(message);
            }
            state.messages.push_back(message);
            state.wake();
            Ok(())
        }

        pub(in crate::engine) fn try_send(&self, message: T) -> Result<(), T> {
            self.send(message)
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Sender<T> {
            lock(&self.0).senders += 1;
            Sender(Arc::clone(&self.0))
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            let mut state = lock(&self.0);
            state.senders -= 1;
            if state.senders == 0 {
                state.wake();
            }
        }
    }

    impl<T> Receiver<T> {
        pub(in crate::engine) fn try_recv(&self) -> Result<T, TryRecvError> {
            let mut state = lock(&self.0);
            match state.messages.pop_front() {
                Some(message) => Ok(message),
                None if state.senders == 0 => Err(TryRecvError::Disconnected),
                None => Err(TryRecvError::Empty),
            }
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            let mut state = lock(&self.0);
            state.is_closed = true;
            let messages = std::mem::take(&mut state.messages);
            drop(state);
            drop(messages);
        }
    }

    /// Waits for a message in any of several channels, or for the end of one.
    pub(in crate::engine) struct Select<'a>(Vec<&'a dyn Awaited>);

    trait Awaited {
        /// Wakes this thread when the channel changes. Returns whether it need not wait.
        fn begin_waiting(&self) -> bool;
    }

    impl<T> Awaited for Receiver<T> {
        fn begin_waiting(&self) -> bool {
            let mut state = lock(&self.0);
            state.waiting = Some(thread::current());
            !state.messages.is_empty() || state.senders == 0
        }
    }

    impl<'a> Select<'a> {
        pub(in crate::engine) fn new() -> Select<'a> {
            Select(Vec::new())
        }

        pub(in crate::engine) fn recv<T>(&mut self, receiver: &'a Receiver<T>) {
            self.0.push(receiver);
        }

        /// Returns the index of a channel that need not be waited for.
        pub(in crate::engine) fn ready(&mut self) -> usize {
            loop {
                let mut channels = self.0.iter();
                if let Some(index) = channels.position(|channel| channel.begin_waiting()) {
                    return index;
                }
                thread::park();
            }
        }

        /// Returns the index of a channel that need not be waited for, if there is one.
        pub(in crate::engine) fn try_ready(&mut self) -> Result<usize, ()> {
            let mut channels = self.0.iter();
            (channels.position(|channel| channel.begin_waiting())).ok_or(())
        }

        /// Waits as `ready` does: no time passes here.
        pub(in crate::engine) fn ready_timeout(&mut self, _: Duration) -> Option<usize> {
            Some(self.ready())
        }
    }
}

/// The channel of a stream.
pub(super) mod events {
    use tokio::sync::mpsc;

    use super::thread;

    pub(in crate::engine) struct UnboundedSender<T>(mpsc::UnboundedSender<T>);

    pub(in crate::engine) struct UnboundedReceiver<T>(mpsc::UnboundedReceiver<T>);

    pub(in crate::engine) fn unbounded_channel<T>() -> (UnboundedSender<T>, UnboundedReceiver<T>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (UnboundedSender(sender), UnboundedReceiver(receiver))
    }

    impl<T> UnboundedSender<T> {
        pub(in crate::engine) fn send(&self, message: T) -> Result<(), T> {
            thread::yield_now();
            self.0.send(message).map_err(|error| error.0)
        }
    }

    impl<T> UnboundedReceiver<T> {
        pub(in crate::engine) async fn recv(&mut self) -> Option<T> {
            thread::yield_now();
            self.0.recv().await
        }
    }
}
