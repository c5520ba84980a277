//! What every decision depends on besides the requests themselves.

use crate::cost::{DecodeSpeeds, Predictor};
use crate::sequence::Acceptances;
use crate::{CostModel, Limits, Micros, Policy};

/// The limits, the policy, the predicted speed of the machine, and the time.
///
/// Decisions read these values through `&Conditions`. Only `Scheduler` changes them.
#[derive(Debug)]
pub(crate) struct Conditions {
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) predictor: Predictor,
    pub(crate) decode_speeds: DecodeSpeeds,
    /// How likely drafts are to be right, over all sequences.
    pub(crate) usual_acceptances: Acceptances,
    pub(crate) now: Micros, // The latest time that the caller has reported.
    pub(crate) is_draining: bool,
}

impl Conditions {
    pub(crate) fn new(limits: Limits, policy: Policy) -> Conditions {
        Conditions {
            limits,
            policy,
            predictor: Predictor::new(CostModel::UNMEASURED),
            decode_speeds: DecodeSpeeds::default(),
            usual_acceptances: Acceptances::default(),
            now: 0,
            is_draining: false,
        }
    }

    /// Advances the clock.
    ///
    /// # Panics
    /// If time runs backwards.
    pub(crate) fn advance(&mut self, now: Micros) {
        assert!(now >= self.now, "time runs backwards");
        self.now = now;
    }

    pub(crate) fn calibrate(&mut self, model: CostModel) {
        self.predictor = Predictor::new(model);
    }

    pub(crate) fn calibrate_unsure(&mut self, model: CostModel) {
        self.predictor = Predictor::unsure(model);
    }

    pub(crate) fn drain(&mut self) {
        self.is_draining = true;
    }
}
