//! The figures: decode steps at some numbers of streams and depths, and whole prompts, through the engine's own parts on this thread.
//!
//! Streams get to their depth without being computed: their pages hold keys and values already (those of another text), and the model
//! is left out until all of them decode. The scheduler never knows.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, PAGE_TOKENS};

use super::limits::{Limits, Probe};
use super::report::{Measured, Outcome, Row, What};
use super::seeded::Seeded;
use crate::engine::{
    Budget, CopyRow, Direct, DirectStep, Forward, Limits as SchedulerLimits, LogitRows, Policy,
    SamplingParams,
};
use crate::model::{KvStore, Model, Sizes, Stage, StepLogits};

/// Tokens of a step at most, as in a server by default.
pub const STEP_TOKENS: usize = 512;

/// Decode steps of a repetition at most.
const MOST_STEPS: usize = 16;
/// Tokens of a prompt that is computed before those that are timed.
const WARM_UP_TOKENS: usize = 128;

/// Prompts that begin to decode in the same step at least; see `scheduler/src/admission/load.rs`.
const STARTED_AT_ONCE: usize = 8;

/// Longer than anything takes, in microseconds.
const HOUR: u64 = 3_600_000_000;

/// What is measured, and how long.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Sequences that decode at the same time.
    pub streams: Vec<usize>,
    /// Tokens before each of them.
    pub depths: Vec<usize>,
    /// Tokens of single prompts.
    pub prompts: Vec<usize>,
    /// Memory that keys and values may take, in bytes.
    pub kv_bytes: usize,
    /// How often, how long.
    pub effort: Effort,
}

/// How much is done for a figure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Repetitions at least.
    pub least: usize,
    /// So many, unless they take longer than `long`; as many as fill `short`, up to five times as many, where they are quick.
    pub usual: usize,
    /// Time of a figure that is short.
    pub short: Duration,
    /// Time of a figure that is long.
    pub long: Duration,
    /// Decode steps of a repetition at most; no more than 16.
    pub steps: usize,
    /// Time of a repetition's decode steps, about, unless that is less than two.
    pub repetition: Duration,
}

impl Effort {
    /// For figures to be quoted.
    pub const FULL: Effort = Effort {
        least: 3,
        usual: 5,
        short: Duration::from_secs(1),
        long: Duration::from_secs(10),
        steps: MOST_STEPS,
        repetition: Duration::from_millis(800),
    };
    /// For a first look.
    pub const QUICK: Effort = Effort {
        least: 2,
        usual: 2,
        short: Duration::from_millis(200),
        long: Duration::from_secs(1),
        steps: 8,
        repetition: Duration::from_millis(300),
    };
    /// Everything once.
    pub const SMOKE: Effort = Effort {
        least: 1,
        usual: 1,
        short: Duration::ZERO,
        long: Duration::ZERO,
        steps: 2,
        repetition: Duration::ZERO,
    };

    fn wants_more(&self, done: usize, took: Duration) -> bool {
        done < self.least
            || (done < self.usual && took < self.long)
            || (done < 5 * self.usual && took < self.short)
    }

    fn steps_of(&self, step: Duration) -> usize {
        let fitting = self.repetition.as_secs_f64() / step.as_secs_f64().max(1e-9);
        (fitting as usize).clamp(2, self.steps)
    }
}

impl Grid {
    /// How many rows there will be.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.streams.len() * self.depths.len() + self.prompts.len()
    }
}

/// A repetition: its steps, and what the stages of their forward passes took.
#[derive(Clone, Debug, Default)]
pub struct Repetition {
    /// In their order.
    pub steps: Vec<DirectStep>,
    /// Of all steps together, in the order of [`Stage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
    /// The machine's, sampled right before and right after.
    pub limits: Limits,
}

/// The product's policy, but that no step is cut for want of time, and nothing is guessed: guesses are as good as the text, and text
/// made up by a benchmark repeats itself.
pub(super) fn unhurried() -> Policy {
    Policy {
        budget: Budget::Time {
            inter_token_target: HOUR,
            min_step: HOUR,
            max_step: HOUR,
        },
        max_draft: 0,
        ..Policy::default()
    }
}

/// Measures everything in `grid`, with limits sampled between any two repetitions; each has the better of those before and after it.
///
/// # Panics
/// If `model` takes fewer tokens a step than [`STEP_TOKENS`], or fewer rows of logits than there are streams.
pub fn measure(
    model: &mut Subject,
    grid: &Grid,
    probe: &Probe,
    progress: &ProgressBar,
) -> Vec<Row> {
    let mut figures = Figures {
        sizes: model.model.sizes(),
        probe,
        progress,
        rows: Vec::new(),
    };
    let mut seeded = Seeded::new(1);
    for &depth in &grid.depths {
        decodes(model, grid, depth, &mut figures, &mut seeded);
    }
    prefills(model, grid, &mut figures, &mut seeded);
    figures.rows
}

/// What was measured so far.
struct Figures<'a> {
    sizes: Sizes,
    probe: &'a Probe,
    progress: &'a ProgressBar,
    rows: Vec<Row>,
}

impl Figures<'_> {
    fn add(&mut self, what: What, measure: impl FnOnce(&Probe) -> Vec<Repetition>) {
        self.progress.set_message(what.to_string());
        let repetitions = measure(self.probe);
        let measured = Measured::of(&what, &repetitions, &self.sizes);
        self.push(what, Outcome::Measured(measured));
    }

    fn skip(&mut self, what: What, skipped: String) {
        self.push(what, Outcome::Skipped { skipped });
    }

    fn push(&mut self, what: What, outcome: Outcome) {
        self.rows.push(Row { what, outcome });
        self.progress.inc(1);
    }
}

/// A model that can be left out of steps.
pub struct Subject {
    model: Model,
    is_left_out: bool,
}

impl Subject {
    /// Of this model.
    #[must_use]
    pub fn new(model: Model) -> Subject {
        Subject {
            model,
            is_left_out: false,
        }
    }

    /// The model.
    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }
}

/// Logits, or zeros.
enum SubjectRows<'a> {
    Computed(StepLogits<'a>),
    LeftOut,
}

impl Forward for Subject {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.model)
    }

    fn new_kv_store(&self, pages: usize) -> KvStore {
        self.model.new_kv_store(pages)
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        if self.is_left_out {
            SubjectRows::LeftOut
        } else {
            self.model.forward(batch, kv_store);
            SubjectRows::Computed(self.model.step_logits())
        }
    }
}

impl LogitRows for SubjectRows<'_> {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        match self {
            SubjectRows::Computed(rows) => rows.copy_row(row, logits),
            SubjectRows::LeftOut => logits.fill(0.0),
        }
    }

    fn kernels(&self) -> Kernels {
        match self {
            SubjectRows::Computed(rows) => rows.kernels(),
            SubjectRows::LeftOut => Kernels::best(),
        }
    }

    fn workers(&self) -> usize {
        match self {
            SubjectRows::Computed(rows) => rows.workers(),
            SubjectRows::LeftOut => 1,
        }
    }

    fn share<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &CopyRow<'_>) + Sync,
    ) {
        match self {
            SubjectRows::Computed(rows) => rows.share(parts, work),
            SubjectRows::LeftOut => {
                parts.for_each(|part| work(part, &|_, logits: &mut [f32]| logits.fill(0.0)));
            }
        }
    }
}

/// All numbers of streams at one depth.
fn decodes(
    subject: &mut Subject,
    grid: &Grid,
    depth: usize,
    figures: &mut Figures<'_>,
    seeded: &mut Seeded,
) {
    let longest = subject.model.config().max_position;
    let page_bytes = subject.model.kv_bytes_per_page();
    let problem = |streams: usize| {
        let bytes = Deep::pages(streams, depth) * page_bytes;
        if depth > longest {
            Some(format!("the model was made for {longest} tokens"))
        } else {
            (bytes > grid.kv_bytes).then(|| too_large(bytes, grid.kv_bytes))
        }
    };
    let feasible = grid.streams.iter().filter(|&&n| problem(n).is_none());
    let most = feasible.copied().max();
    let mut deep = most.map(|most| Deep::new(subject, most, depth, longest, seeded));
    for &streams in &grid.streams {
        let what = What::Decode { streams, depth };
        match (problem(streams), &mut deep) {
            (None, Some(deep)) => figures.add(what, |probe| {
                deep.decode(streams, &grid.effort, probe, seeded)
            }),
            (Some(why), _) => figures.skip(what, why),
            (None, None) => unreachable!("what is feasible was prepared for"),
        }
    }
}

fn too_large(bytes: usize, room: usize) -> String {
    let [bytes, room] = [bytes, room].map(|bytes| bytes as f64 / 1e9);
    format!("its keys and values take {bytes:.1} GB, and there is room for {room:.1}")
}

/// Streams of one depth.
struct Deep<'a> {
    direct: Direct<'a, Subject>,
    depth: usize,
    longest: usize,
    vocabulary: usize,
}

impl<'a> Deep<'a> {
    /// Pages for so many streams, while they decode.
    fn pages(streams: usize, depth: usize) -> usize {
        let more = Deep::steps_before(streams) + MOST_STEPS;
        streams * ((depth + more).div_ceil(PAGE_TOKENS) + 1)
    }

    /// Steps until the last of the streams decodes, of which the first has decoded as often, and one to warm up.
    fn steps_before(streams: usize) -> usize {
        streams.div_ceil(STARTED_AT_ONCE) + 1
    }

    fn new(
        subject: &'a mut Subject,
        most: usize,
        depth: usize,
        longest: usize,
        seeded: &mut Seeded,
    ) -> Deep<'a> {
        let limits = SchedulerLimits {
            pages: Deep::pages(most, depth) as u32,
            max_running: most as u32,
            max_queued: most as u32,
            max_queued_time: u64::MAX,
            // The model is left out while prompts are computed, so they may be of any length.
            step_tokens: (most * depth).max(STEP_TOKENS) as u32,
            prefill_chunk: depth.max(STEP_TOKENS) as u32,
            max_sequence_tokens: longest as u32,
        };
        let vocabulary = subject.vocabulary();
        let mut direct = Direct::new(subject, limits, unhurried());
        direct.fill_pages(&seeded.tokens(PAGE_TOKENS, vocabulary));
        Deep {
            direct,
            depth,
            longest,
            vocabulary,
        }
    }

    /// Repetitions of some steps each, whose keys come to the depth on average.
    fn decode(
        &mut self,
        streams: usize,
        effort: &Effort,
        probe: &Probe,
        seeded: &mut Seeded,
    ) -> Vec<Repetition> {
        let trial = self.repetition(streams, 2, seeded);
        let step = trial.steps.iter().map(DirectStep::total).min();
        let steps = effort.steps_of(step.unwrap_or_default());
        repeat(effort, probe, || self.repetition(streams, steps, seeded))
    }

    fn repetition(&mut self, streams: usize, steps: usize, seeded: &mut Seeded) -> Repetition {
        let more = Deep::steps_before(streams) + steps;
        let prompt =
            (self.depth - more.min(self.depth) / 2).min(self.longest.saturating_sub(more + 1));
        for seed in 0..streams {
            let sampling = SamplingParams {
                seed: seed as u64,
                ..SamplingParams::default()
            };
            let tokens = seeded.tokens(prompt.max(1), self.vocabulary);
            self.direct
                .submit(tokens, more as u32 + 1, sampling)
                .expect("the limits were made for it");
        }
        self.direct.model().is_left_out = true;
        loop {
            let step = self.direct.step().expect("the streams are not over");
            if (step.tokens, step.logits) == (streams, streams) {
                break;
            }
        }
        self.direct.model().is_left_out = false;
        self.direct.step().expect("the streams are not over"); // Finds cold caches.
        let repetition = run(&mut self.direct, steps);
        assert!(
            repetition.steps.iter().all(|step| step.logits == streams),
            "all streams decode in all steps"
        );
        self.direct.clear();
        repetition
    }
}

/// Single prompts, each up to its first token.
fn prefills(subject: &mut Subject, grid: &Grid, figures: &mut Figures<'_>, seeded: &mut Seeded) {
    let longest = subject.model.config().max_position;
    let page_bytes = subject.model.kv_bytes_per_page();
    let vocabulary = subject.vocabulary();
    for &tokens in &grid.prompts {
        let what = What::Prefill { tokens };
        let pages = (tokens + 1).div_ceil(PAGE_TOKENS) + 1;
        if tokens >= longest {
            figures.skip(what, format!("the model was made for {longest} tokens"));
            continue;
        }
        if pages * page_bytes > grid.kv_bytes {
            figures.skip(what, too_large(pages * page_bytes, grid.kv_bytes));
            continue;
        }
        let limits = SchedulerLimits {
            pages: pages as u32,
            max_running: 1,
            max_queued: 1,
            max_queued_time: u64::MAX,
            step_tokens: STEP_TOKENS as u32,
            prefill_chunk: STEP_TOKENS as u32,
            max_sequence_tokens: longest as u32,
        };
        let mut direct = Direct::new(subject, limits, unhurried());
        direct.fill_pages(&seeded.tokens(PAGE_TOKENS, vocabulary));
        let mut once = |tokens: usize| {
            let prompt = seeded.tokens(tokens, vocabulary);
            direct
                .submit(prompt, 1, SamplingParams::default())
                .expect("the limits were made for it");
            let repetition = run(&mut direct, usize::MAX);
            direct.clear();
            repetition
        };
        once(tokens.min(WARM_UP_TOKENS));
        figures.add(what, |probe| repeat(&grid.effort, probe, || once(tokens)));
    }
}

/// As many repetitions as the effort asks for.
fn repeat(effort: &Effort, probe: &Probe, mut once: impl FnMut() -> Repetition) -> Vec<Repetition> {
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

/// So many steps, or all that there are.
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
