//! The test model, and the gate at which its steps wait.

use std::io;
use std::sync::mpsc;
use std::time::Duration;

use sterna::engine::{Forward, LogitRows, TokenId};
use sterna_scheduler::{Batch, Limits, PAGE_TOKENS};

pub(crate) const VOCABULARY: usize = 100;

/// A timeout that only a hanging test reaches.
pub(crate) const GUARD: Duration = Duration::from_secs(60);

/// A step with a prompt that begins with this token panics.
pub(crate) const PANICS: TokenId = 90;

/// After a prompt that begins with this token, the logits of every later step are NaN.
pub(crate) const COMPUTES_NAN: TokenId = 91;

/// The second step of a prompt that begins with this token ends the engine thread.
pub(crate) const KILLS_THE_THREAD: TokenId = 92;

/// The first step with more than one row panics if a prompt begins with this token.
pub(crate) const PANICS_IN_COMPANY: TokenId = 93;

/// A model whose pages hold the tokens themselves. Each step waits at `gate`, if there is one.
pub(crate) struct Recorder {
    pub(crate) gate: Option<Gate>,
}

/// The model's side of a gate that lets steps pass one by one.
pub(crate) struct Gate {
    pub(crate) entered: mpsc::Sender<()>,
    pub(crate) pass: mpsc::Receiver<()>,
}

/// The test's side of a gate.
pub(crate) struct Steps {
    pub(crate) entered: mpsc::Receiver<()>,
    pub(crate) pass: mpsc::Sender<()>,
}

pub(crate) fn gate() -> (Gate, Steps) {
    let (entered, has_entered) = mpsc::channel();
    let (let_pass, pass) = mpsc::channel();
    (
        Gate { entered, pass },
        Steps {
            entered: has_entered,
            pass: let_pass,
        },
    )
}

impl Steps {
    /// Waits until the engine is inside a step.
    pub(crate) fn wait_inside(&self) {
        self.entered.recv_timeout(GUARD).expect("a step begins");
    }

    pub(crate) fn pass_one(&self) {
        self.pass.send(()).expect("the engine waits in a step");
    }

    /// Lets this step and all later ones pass.
    pub(crate) fn open(self) {}
}

/// A panic payload that panics again when the engine drops it.
pub(crate) struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("a bug outside forward and sampling");
        }
    }
}

pub(crate) struct Histories(pub(crate) Vec<Vec<TokenId>>);

impl Forward for Recorder {
    type KvStore = Vec<[TokenId; PAGE_TOKENS]>;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<Self::KvStore> {
        Ok(vec![[TokenId::MAX; PAGE_TOKENS]; limits.pages as usize])
    }

    fn forward(&mut self, batch: &Batch, pages: &mut Self::KvStore) -> impl LogitRows {
        if let Some(gate) = &self.gate {
            // Both channels are closed once the test has opened the gate.
            let _ = gate.entered.send(());
            let _ = gate.pass.recv();
        }
        for copy in batch.copies() {
            pages[copy.to.index()] = pages[copy.from.index()];
        }
        let mut histories = Vec::new();
        for row in batch.rows() {
            let table = batch.pages(row);
            for (position, &token) in (row.start as usize..).zip(batch.tokens(row)) {
                pages[table[position / PAGE_TOKENS].index()][position % PAGE_TOKENS] = token;
            }
            let end = row.start as usize + row.len();
            let history: Vec<TokenId> = (0..end)
                .map(|position| {
                    pages[table[position / PAGE_TOKENS].index()][position % PAGE_TOKENS]
                })
                .collect();
            match history[0] {
                PANICS => panic_half_way(batch, pages),
                PANICS_IN_COMPANY if batch.rows().len() > 1 => panic_half_way(batch, pages),
                KILLS_THE_THREAD if end > 2 => std::panic::panic_any(Bomb),
                _ => {}
            }
            let wanted = end - row.logits as usize..end;
            histories.extend(wanted.map(|position| history[..=position].to_vec()));
        }
        Histories(histories)
    }
}

/// Panics after wrong tokens were written wherever the batch may write.
pub(crate) fn panic_half_way(batch: &Batch, pages: &mut [[TokenId; PAGE_TOKENS]]) -> ! {
    for row in batch.rows() {
        for position in row.start as usize..row.end() {
            let page = batch.pages(row)[position / PAGE_TOKENS];
            pages[page.index()][position % PAGE_TOKENS] = TokenId::MAX;
        }
    }
    panic!("a prompt that makes the model panic");
}

impl LogitRows for Histories {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        let history = &self.0[row];
        if history[0] == COMPUTES_NAN && history.len() > 2 {
            return logits.fill(f32::NAN);
        }
        let hash = history
            .iter()
            .fold(0x1234_5678_9ABC_DEF1, |hash: u64, &token| {
                mix(hash ^ u64::from(token))
            });
        for (token, logit) in (0..).zip(logits) {
            *logit = (mix(hash ^ (token << 32)) >> 40) as f32 / (1 << 21) as f32;
        }
    }
}

pub(crate) fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits ^ (bits >> 29)
}
