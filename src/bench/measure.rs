//! Measures the figures: decode steps at some numbers of streams and depths, and whole prompts.
//!
//! The streams reach their depth without computation: their pages already hold keys and values of
//! another text, and the steps leave out the model until all streams decode. The scheduler does not
//! notice.

use std::io;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use sterna_random::Random;
use sterna_scheduler::{Batch, Limits, PAGE_TOKENS};

use super::figure::{Figure, FigureKind, FigureResult, Measurement, Repetition};
use super::machine_limits::LimitsProbe;
use super::workload::{random_tokens, untimed_limits, untimed_policy, with_states};
use crate::engine::{Direct, Forward, LogitRows, SamplingParams};
use crate::model::{ExpertUse, KvStore, Model, Sizes, Stage};

/// The maximum number of tokens in a step, as in a server by default.
pub const STEP_TOKENS: usize = 512;

/// The maximum number of decode steps in a repetition.
const MAX_STEPS: usize = 16;
/// The length of the prompt that warms up before a timed prompt.
const WARM_UP_TOKENS: usize = 128;

/// The scheduler lets at least this many prompts begin to decode in the same step; see
/// `scheduler/src/admission/load.rs`.
const STARTED_AT_ONCE: usize = 8;

/// What is measured, and with which effort.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Numbers of sequences that decode together.
    pub streams: Vec<usize>,
    /// Numbers of tokens before the decoded ones.
    pub depths: Vec<usize>,
    /// Lengths of single prompts.
    pub prompts: Vec<usize>,
    /// The memory for keys and values, in bytes.
    pub kv_bytes: usize,
    /// The effort for each figure.
    pub effort: Effort,
}

/// How often and how long each figure is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The minimum number of repetitions.
    pub min_repetitions: usize,
    /// The usual number of repetitions. A figure that is still under `short` gets up to five times
    /// as many. A figure past `long` ends once it has `min_repetitions`.
    pub repetitions: usize,
    /// Quick figures are repeated until they have taken this long.
    pub short: Duration,
    /// Slow figures are not repeated any more once they have taken this long.
    pub long: Duration,
    /// The maximum number of decode steps in a repetition, at most 16.
    pub steps: usize,
    /// The approximate duration of a repetition's decode steps. There are at least two steps.
    pub repetition: Duration,
}

impl Effort {
    /// The effort for published figures.
    pub const FULL: Effort = Effort {
        min_repetitions: 3,
        repetitions: 5,
        short: Duration::from_secs(1),
        long: Duration::from_secs(10),
        steps: MAX_STEPS,
        repetition: Duration::from_millis(800),
    };
    /// The effort for a first look.
    pub const QUICK: Effort = Effort {
        min_repetitions: 2,
        repetitions: 2,
        short: Duration::from_millis(200),
        long: Duration::from_secs(1),
        steps: 8,
        repetition: Duration::from_millis(300),
    };

    fn wants_more(&self, done: usize, spent: Duration) -> bool {
        done < self.min_repetitions
            || (done < self.repetitions && spent < self.long)
            || (done < 5 * self.repetitions && spent < self.short)
    }

    fn steps_of(&self, step: Duration) -> usize {
        let fitting = self.repetition.as_secs_f64() / step.as_secs_f64().max(1e-9);
        (fitting as usize).clamp(2, self.steps)
    }
}

impl Grid {
    /// Returns the number of figures.
    pub fn figures(&self) -> usize {
        self.streams.len() * self.depths.len() + self.prompts.len()
    }
}

/// Measures everything in `grid`. The limits are sampled between repetitions. For each limit, a
/// repetition uses the better of the two samples around it.
///
/// # Panics
/// If `model` takes fewer tokens per step than [`STEP_TOKENS`], or fewer rows of logits than there
/// are streams.
pub fn measure(
    model: &mut Subject,
    grid: &Grid,
    probe: &LimitsProbe,
    progress: &ProgressBar,
) -> Vec<Figure> {
    let mut figures = Figures {
        sizes: model.model.sizes(),
        probe,
        progress,
        figures: Vec::new(),
    };
    let mut random = Random::new(1);
    for &depth in &grid.depths {
        decodes(model, grid, depth, &mut figures, &mut random);
    }
    prefills(model, grid, &mut figures, &mut random);
    figures.figures
}

/// The figures so far, and how to measure the next one.
struct Figures<'a> {
    sizes: Sizes,
    probe: &'a LimitsProbe,
    progress: &'a ProgressBar,
    figures: Vec<Figure>,
}

impl Figures<'_> {
    fn add(&mut self, kind: FigureKind, measure: impl FnOnce(&LimitsProbe) -> Vec<Repetition>) {
        self.progress.set_message(kind.to_string());
        let repetitions = measure(self.probe);
        let measured = Measurement::of(&kind, &repetitions, &self.sizes);
        self.push(kind, FigureResult::Measured(measured));
    }

    fn skip(&mut self, kind: FigureKind, skipped: String) {
        self.push(kind, FigureResult::Skipped { skipped });
    }

    fn push(&mut self, kind: FigureKind, result: FigureResult) {
        self.figures.push(Figure { kind, result });
        self.progress.inc(1);
    }
}

/// A model that steps can leave out.
pub struct Subject {
    model: Model,
    is_left_out: bool,
}

impl Subject {
    /// Returns a subject whose steps run the model.
    pub fn new(model: Model) -> Subject {
        Subject {
            model,
            is_left_out: false,
        }
    }

    /// Returns the model.
    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }
}

impl Forward for Subject {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.model)
    }

    fn has_states(&self) -> bool {
        Forward::has_states(&self.model)
    }

    fn expert_use(&self) -> ExpertUse {
        self.model.expert_use()
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        if self.is_left_out {
            self.model.leave_out(batch, kv_store);
        } else {
            self.model.forward(batch, kv_store);
        }
        self.model.step_logits()
    }
}

/// Measures all numbers of streams at one depth.
fn decodes(
    subject: &mut Subject,
    grid: &Grid,
    depth: usize,
    figures: &mut Figures<'_>,
    random: &mut Random,
) {
    let longest = subject.model.config().max_position;
    let page_bytes = subject.model.kv_bytes_per_page();
    let problem = |streams: usize| {
        let bytes = DecodeStreams::pages(streams, depth) * page_bytes;
        if depth > longest {
            Some(too_long(longest))
        } else {
            (bytes > grid.kv_bytes).then(|| too_large(bytes, grid.kv_bytes))
        }
    };
    let feasible = grid.streams.iter().filter(|&&n| problem(n).is_none());
    let max = feasible.copied().max();
    let mut deep = max.map(|max| DecodeStreams::new(subject, max, depth, longest, random));
    for &streams in &grid.streams {
        let kind = FigureKind::Decode { streams, depth };
        match (problem(streams), &mut deep) {
            (None, Some(deep)) => figures.add(kind, |probe| {
                deep.decode(streams, &grid.effort, probe, random)
            }),
            (Some(problem), _) => figures.skip(kind, problem),
            (None, None) => unreachable!("streams without a problem are prepared"),
        }
    }
}

fn too_long(limit: usize) -> String {
    format!("longer than the model's context of {limit} tokens")
}

fn too_large(bytes: usize, limit: usize) -> String {
    let [bytes, limit] = [bytes, limit].map(|bytes| bytes as f64 / 1e9);
    format!("its keys and values need {bytes:.1} GB of memory; {limit:.1} GB are free")
}

/// Streams that decode at one depth.
struct DecodeStreams<'a> {
    direct: Direct<'a, Subject>,
    depth: usize,
    longest: usize,
    vocabulary: usize,
}

impl<'a> DecodeStreams<'a> {
    /// Returns the pages that the streams need while they decode.
    fn pages(streams: usize, depth: usize) -> usize {
        let decoded = DecodeStreams::steps_before(streams) + MAX_STEPS;
        streams * ((depth + decoded).div_ceil(PAGE_TOKENS) + 1)
    }

    /// The first group of streams decodes at most this many times before timing starts, the
    /// warm-up step included.
    fn steps_before(streams: usize) -> usize {
        streams.div_ceil(STARTED_AT_ONCE) + 1
    }

    fn new(
        subject: &'a mut Subject,
        max: usize,
        depth: usize,
        longest: usize,
        random: &mut Random,
    ) -> DecodeStreams<'a> {
        let pages = DecodeStreams::pages(max, depth);
        // Steps leave out the model while they compute prompts, so prompts have any length.
        let limits = untimed_limits(max, pages, (max * depth).max(STEP_TOKENS), longest);
        let limits = with_states(limits, subject);
        let vocabulary = subject.vocabulary();
        let mut direct = Direct::new(subject, limits, untimed_policy());
        direct.fill_pages(&random_tokens(random, PAGE_TOKENS, vocabulary));
        DecodeStreams {
            direct,
            depth,
            longest,
            vocabulary,
        }
    }

    /// Measures repetitions of some steps each. Their mean depth is the wanted one.
    fn decode(
        &mut self,
        streams: usize,
        effort: &Effort,
        probe: &LimitsProbe,
        random: &mut Random,
    ) -> Vec<Repetition> {
        let trial = self.repetition(streams, 2, random);
        let step = trial.steps.iter().map(|step| step.times.total()).min();
        let steps = effort.steps_of(step.unwrap_or_default());
        repeat(effort, probe, || self.repetition(streams, steps, random))
    }

    fn repetition(&mut self, streams: usize, steps: usize, random: &mut Random) -> Repetition {
        let decoded = DecodeStreams::steps_before(streams) + steps;
        let prompt = (self.depth - decoded.min(self.depth) / 2)
            .min(self.longest.saturating_sub(decoded + 1));
        for seed in 0..streams {
            let sampling = SamplingParams {
                seed: seed as u64,
                ..SamplingParams::default()
            };
            let tokens = random_tokens(random, prompt.max(1), self.vocabulary);
            self.direct
                .submit(tokens, decoded as u32 + 1, sampling)
                .expect("the limits allow it");
        }
        self.direct.model().is_left_out = true;
        loop {
            let step = self.direct.step().expect("the streams are not over");
            if (step.size.tokens, step.size.logits) == (streams, streams) {
                break;
            }
        }
        self.direct.model().is_left_out = false;
        self.direct.step().expect("the streams are not over"); // Warms up the caches.
        let repetition = run(&mut self.direct, steps);
        assert!(
            repetition
                .steps
                .iter()
                .all(|step| step.size.logits == streams),
            "all streams decode in all steps"
        );
        self.direct.clear();
        repetition
    }
}

/// Measures single prompts, each up to its first token.
fn prefills(subject: &mut Subject, grid: &Grid, figures: &mut Figures<'_>, random: &mut Random) {
    let longest = subject.model.config().max_position;
    let page_bytes = subject.model.kv_bytes_per_page();
    let vocabulary = subject.vocabulary();
    for &tokens in &grid.prompts {
        let kind = FigureKind::Prefill { tokens };
        let pages = (tokens + 1).div_ceil(PAGE_TOKENS) + 1;
        if tokens >= longest {
            figures.skip(kind, too_long(longest));
            continue;
        }
        if pages * page_bytes > grid.kv_bytes {
            figures.skip(kind, too_large(pages * page_bytes, grid.kv_bytes));
            continue;
        }
        let limits = untimed_limits(1, pages, STEP_TOKENS, longest);
        let limits = with_states(limits, subject);
        let mut direct = Direct::new(subject, limits, untimed_policy());
        direct.fill_pages(&random_tokens(random, PAGE_TOKENS, vocabulary));
        let mut once = |tokens: usize| {
            let prompt = random_tokens(random, tokens, vocabulary);
            direct
                .submit(prompt, 1, SamplingParams::default())
                .expect("the limits allow it");
            let repetition = run(&mut direct, usize::MAX);
            direct.clear();
            repetition
        };
        once(tokens.min(WARM_UP_TOKENS));
        figures.add(kind, |probe| repeat(&grid.effort, probe, || once(tokens)));
    }
}

/// Measures as many repetitions as the effort wants.
fn repeat(
    effort: &Effort,
    probe: &LimitsProbe,
    mut once: impl FnMut() -> Repetition,
) -> Vec<Repetition> {
    let mut spent = Duration::ZERO;
    let mut repetitions = Vec::new();
    let mut limits = probe.sample();
    while effort.wants_more(repetitions.len(), spent) {
        let started = Instant::now();
        let mut repetition = once();
        spent += started.elapsed();
        let before = std::mem::replace(&mut limits, probe.sample());
        repetition.limits = before.best(limits);
        repetitions.push(repetition);
    }
    repetitions
}

/// Runs `steps` steps, or all steps if there are fewer.
fn run(direct: &mut Direct<'_, Subject>, steps: usize) -> Repetition {
    let before = direct.model().model.profile();
    let mut repetition = Repetition::default();
    while repetition.steps.len() < steps
        && let Some(step) = direct.step()
    {
        repetition.steps.push(step);
    }
    let after = direct.model().model.profile();
    repetition.stages = Stage::ALL.map(|stage| after.spent(stage) - before.spent(stage));
    repetition
}
