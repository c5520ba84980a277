//! Places at which tests make a step fail.
//!
//! Each place of a step calls `pass` or `pass_row`. With the feature `faults`, which the tests
//! of this package enable, these functions call the hook that a test has set. Without the feature,
//! as in every build of the product, they are empty.

macro_rules! places {
    ($($name:ident,)*) => {
        /// A place in the computation of a step, named by what has just happened.
        #[allow(missing_docs, reason = "the names say it")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Place {
            $($name,)*
        }

        #[cfg(feature = "faults")]
        impl Place {
            /// Every place.
            pub const ALL: &[Place] = &[$(Place::$name,)*];
        }
    };
}

places! {
    // The forward pass, on the engine thread.
    ForwardBegun,
    TokenEmbedded,
    BatchPlaced,
    PagesCopied,
    LayerBegun,
    LayerEnded,
    LastOutputAdded,
    HeadMultiplied,
    // The stages of a layer and the output head, on any worker.
    JobBegun,
    JobEnded,
    PartTaken,
    OutputAdded,
    RowsNormed,
    RowQuantized,
    PanelsMultiplied,
    TokenStored,
    QueriesRotated,
    SpanAttended,
    BlockAttended,
    TokenMixed,
    HeadsGathered,
    GatesMultiplied,
    GatesActivated,
    GatedRowsMade,
    HiddenNormed,
    HeadScreened,
    HeadRescored,
    // The sampler, on any worker.
    BatchForwarded,
    SamplingBegun,
    LogitsCopied,
    LogitsScanned,
    LogprobsSummed,
    LogprobsRanked,
    // The changes of logits, also before a step on the engine thread.
    BiasAdded,
    StopTokensForbidden,
    RepetitionPenalized,
    OutputPenalized,
    // The rest of the sampler.
    LargestFound,
    TokensWeighed,
    TokenScored,
    TokenDrawn,
    DraftAccepted,
    BatchSampled,
}

/// Passes a place.
#[inline(always)]
pub(crate) fn pass(place: Place) {
    pass_row(place, 0, &mut []);
}

/// Passes a place that has made the values of one row.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub(crate) fn pass_row(_place: Place, _row: usize, _values: &mut [f32]) {}

#[cfg(feature = "faults")]
pub(crate) use hook::pass_row;
#[cfg(feature = "faults")]
pub use hook::{Hook, set_hook};

#[cfg(feature = "faults")]
mod hook {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, PoisonError, RwLock};

    use super::Place;

    /// Called with a place, the index of the row there, and the row's values. It may panic, wait or
    /// change the values.
    pub type Hook = dyn Fn(Place, usize, &mut [f32]) + Send + Sync;

    static IS_SET: AtomicBool = AtomicBool::new(false);
    static HOOK: RwLock<Option<Arc<Hook>>> = RwLock::new(None);

    /// Sets the hook of this process, or removes it.
    pub fn set_hook(hook: Option<Arc<Hook>>) {
        IS_SET.store(hook.is_some(), Ordering::SeqCst);
        *HOOK.write().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    pub(crate) fn pass_row(place: Place, row: usize, values: &mut [f32]) {
        if !IS_SET.load(Ordering::Relaxed) {
            return;
        }
        let hook = HOOK.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(hook) = hook {
            hook(place, row, values);
        }
    }
}
