//! A screened head gives the wanted logits with the same bits, whether it computes all rows or only
//! the rows that can have them.

use std::cmp::Ordering;
use std::sync::Arc;

use sterna_kernels::{
    AttentionState, DenseMatrix, DrawNoise, Isa, Kernels, PANEL_ROWS, SavedSpans, f16_from_f32,
};
use sterna_random::Random;

use super::known::EXACT_ROWS;
use super::likely::SEEN_TOKENS;
use super::narrow::MAX_INPUTS;
use super::{OutputHead, ScreenedHead};
use crate::model::inputs::Inputs;
use crate::model::options::HeadChoice;
use crate::model::pool::Pool;
use crate::model::recurrent_head::RecurrentScratch;
use crate::model::wanted::{Deciding, LogitChange, WantedDraw, WantedLogits};
use crate::model::workers::{Scratch, ScratchSizes, Workers};

/// What happened to a step that wanted some logits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Computed {
    AllRows,
    LikelyRows,
}

/// A head with its workers.
struct Bench {
    workers: Workers,
    head: OutputHead,
    rows: usize,
}

impl Bench {
    fn new(isa: Isa, threads: usize, rows: usize, exact: DenseMatrix) -> Bench {
        let (columns, max_tokens) = (exact.columns(), MAX_INPUTS + 1);
        let kernels = Kernels::new(isa).unwrap();
        let mut pool = Pool::new(threads, false);
        let exact = Arc::new(exact);
        let choice = HeadChoice::LikelyRows;
        let head = ScreenedHead::new(kernels, &mut pool, exact, max_tokens, None, choice);
        let sizes = ScratchSizes {
            max_width: columns,
            max_tokens,
            factors: 1,
            has_corrections: false,
            expert_width: 0,
        };
        let scratch = (0..threads).map(|_| {
            let attention = (AttentionState::new(1, 32), SavedSpans::new(1, 1, 32));
            Scratch::new(sizes, attention, RecurrentScratch::new(None))
        });
        let scratch = scratch.collect();
        Bench {
            head: OutputHead::Screened(Box::new(head)),
            workers: Workers {
                kernels,
                pool,
                scratch,
            },
            rows,
        }
    }

    /// Returns the logits of each input, by row.
    fn multiply(&mut self, x: &[Vec<f32>], wanted: &WantedLogits) -> Vec<Vec<f32>> {
        let format = self.head.input_format();
        let mut inputs = Inputs::new(MAX_INPUTS + 1, std::iter::once(format));
        inputs.fill(&mut self.workers, &format, x.len(), |token, row, _| {
            row.copy_from_slice(&x[token]);
        });
        let mut logits = vec![f32::NAN; self.head.padded_rows() * x.len()];
        (self.head).multiply(&mut self.workers, &inputs, wanted, &mut logits);
        let panels = logits.chunks(x.len() * PANEL_ROWS);
        let of_token = |token: usize| -> Vec<f32> {
            let rows = panels
                .clone()
                .flat_map(|panel| &panel[token * PANEL_ROWS..][..PANEL_ROWS]);
            rows.copied().take(self.rows).collect()
        };
        (0..x.len()).map(of_token).collect()
    }

    /// Builds the copy in 4 bits, for inputs like `x`.
    fn prepare(&mut self, x: &[Vec<f32>]) {
        assert!(
            !self.head.prepare(&mut self.workers),
            "no step has wanted it"
        );
        for token in 0..SEEN_TOKENS {
            let input = token % x.len();
            self.multiply(&x[input..input + 1], &wanting(&[Deciding::Largest(1)]));
        }
        while self.head.prepare(&mut self.workers) {}
    }

    /// Checks that as many of the largest logits of `x` are the same as if all were wanted, and
    /// says how they were computed.
    fn check(&mut self, x: &[Vec<f32>], wanted: &[u32]) -> Computed {
        let wanted: Vec<_> = wanted.iter().copied().map(Deciding::Largest).collect();
        self.check_wanted(x, &wanting(&wanted))
    }

    /// Checks that the wanted logits of `x` are the same as if all were wanted, and says how they
    /// were computed.
    fn check_wanted(&mut self, x: &[Vec<f32>], wanted: &WantedLogits) -> Computed {
        let all = self.multiply(x, &WantedLogits::default());
        let some = self.multiply(x, wanted);
        let mut computed = Computed::AllRows;
        for ((all, some), (deciding, changes)) in all.iter().zip(&some).zip(wanted.tokens()) {
            let decided = |logits: &[f32]| {
                let mut logits = logits.to_vec();
                for change in changes {
                    let logit = &mut logits[change.token as usize];
                    *logit = change.apply(*logit);
                }
                match deciding {
                    Deciding::Largest(count) => {
                        let mut rows = by_rank(&logits);
                        rows.truncate(*count as usize);
                        rows
                    }
                    Deciding::Draw(draw) => vec![drawn(&logits, draw)],
                }
            };
            assert_eq!(decided(some), decided(all), "{deciding:?}, {changes:?}");
            if some
                .iter()
                .zip(all)
                .any(|(some, all)| some.to_bits() != all.to_bits())
            {
                computed = Computed::LikelyRows;
            }
            let is_lower =
                |(some, all): (&f32, &f32)| *some == f32::MIN || some.to_bits() == all.to_bits();
            assert!(some.iter().zip(all).all(is_lower));
        }
        computed
    }
}

/// Returns the rows and the bits of their logits, the largest logit first.
fn by_rank(logits: &[f32]) -> Vec<(u32, u32)> {
    let mut rows: Vec<_> = (0..)
        .zip(logits.iter().map(|logit| logit.to_bits()))
        .collect();
    let key = |row: &(u32, u32)| f32::from_bits(row.1);
    rows.sort_by(|a, b| key(b).total_cmp(&key(a)).then(a.0.cmp(&b.0)));
    rows
}

/// Returns the row that a draw takes, and the bits of its logit.
fn drawn(logits: &[f32], draw: &WantedDraw) -> (u32, u32) {
    let rows = by_rank(logits);
    let scores = draw.scores(f32::from_bits(rows[0].1));
    let weight = |row: &(u32, u32)| f64::from(scores.scale.weight(f32::from_bits(row.1)));
    let mass: f64 = rows.iter().map(weight).sum();
    let mut before = 0.0;
    let kept = rows.iter().enumerate().filter(|(rank, row)| {
        let is_in = before == 0.0 || draw.top_p >= 1.0 || before < f64::from(draw.top_p) * mass;
        before += weight(row);
        let has_place = draw.top_k == 0 || *rank < draw.top_k as usize;
        is_in && has_place && weight(row) >= f64::from(draw.min_p.min(1.0))
    });
    let score = |row: &(u32, u32)| scores.of(f32::from_bits(row.1), row.0);
    let kept = kept.map(|(_, row)| *row);
    let best = kept.reduce(|best, row| match score(&row).total_cmp(&score(&best)) {
        Ordering::Greater => row,
        Ordering::Equal if row.0 < best.0 => row,
        _ => best,
    });
    best.unwrap()
}

/// Wants what decides, without changes.
fn wanting(deciding: &[Deciding]) -> WantedLogits {
    let mut wanted = WantedLogits::default();
    (deciding.iter()).for_each(|deciding| wanted.push(*deciding, &[]));
    wanted
}

/// Returns random changes of a head of `rows` rows: none, or few or many. Some row stays allowed.
fn any_changes(random: &mut Random, rows: usize) -> Vec<LogitChange> {
    let share = random.pick(&[0, 0, 0, 1, 5]);
    let changed = (1..rows as u32).filter(|_| random.percent(share));
    let changed: Vec<u32> = changed.collect();
    let change = |token: u32| LogitChange {
        token,
        bias: random.pick(&[0.0, 0.0, 5.0, -5.0, 100.0, 1e38, -1e38, f32::NEG_INFINITY]),
        penalty: random.pick(&[1.0, 1.1, 2.0, 0.5]),
        minus: random.pick(&[0.0, 0.5, 2.0, -2.0]),
    };
    changed.into_iter().map(change).collect()
}

/// Returns a random draw.
fn any_draw(random: &mut Random) -> WantedDraw {
    let top_k = random.pick(&[0, 0, 0, 5, 100]);
    WantedDraw {
        noise: DrawNoise::new([(); 3].map(|()| random.next_u64() as u32)),
        temperature: random.pick(&[1e-45, 1e-3, 0.3, 1.0, 1.0, 3.0, 3e38]),
        top_k,
        top_p: match top_k {
            0 => random.pick(&[1.0, 1.0, 0.95, 0.8, 0.3, 0.0]),
            _ => 1.0,
        },
        min_p: random.pick(&[0.0, 0.0, 0.05, 0.5, 2.0]),
    }
}

fn normal(random: &mut Random) -> f32 {
    (0..12).map(|_| random.fraction_f32()).sum::<f32>() - 6.0
}

/// Rows of normally distributed numbers.
fn matrix(random: &mut Random, rows: usize, columns: usize) -> Vec<Vec<f32>> {
    let mut row = || (0..columns).map(|_| normal(random)).collect();
    (0..rows).map(|_| row()).collect()
}

fn dense(random: &mut Random, rows: &[Vec<f32>]) -> DenseMatrix {
    let (count, columns) = (rows.len(), rows[0].len());
    if random.percent(50) {
        return DenseMatrix::from_f32(count, columns, rows.concat());
    }
    let halves: Vec<u16> = rows.concat().into_iter().map(f16_from_f32).collect();
    DenseMatrix::from_f16(count, columns, halves)
}

/// Inputs near some of the rows, as those of a trained model: one row stands out.
fn inputs(random: &mut Random, rows: &[Vec<f32>], count: usize) -> Vec<Vec<f32>> {
    let mut input = || {
        let near = &rows[random.index(rows.len())];
        near.iter()
            .map(|weight| 0.5 * weight + normal(random))
            .collect()
    };
    (0..count).map(|_| input()).collect()
}

#[test]
fn likely_rows_have_the_wanted_logits_of_all_rows() {
    let mut random = Random::from_env();
    for isa in Isa::available() {
        let columns = random.pick(&[64, 100, 256]);
        let count = 3000 + random.index(100);
        let rows = matrix(&mut random, count, columns);
        let exact = dense(&mut random, &rows);
        let mut bench = Bench::new(isa, 1 + random.index(3), count, exact);
        let first = inputs(&mut random, &rows, 1);
        bench.prepare(&first);
        for tokens in 1..=MAX_INPUTS {
            let x = inputs(&mut random, &rows, tokens);
            let computed = bench.check(&x, &vec![1; tokens]);
            assert_eq!(computed, Computed::LikelyRows, "{isa}");
        }
        // These may leave too many rows.
        for largest in [2, 5, 20, EXACT_ROWS as u64] {
            let tokens = 1 + random.index(MAX_INPUTS);
            let x = inputs(&mut random, &rows, tokens);
            let wanted = (0..tokens).map(|_| 1 + random.below(largest) as u32);
            bench.check(&x, &wanted.collect::<Vec<_>>());
        }
    }
}

#[test]
fn likely_rows_decide_the_draws_of_all_rows() {
    let mut random = Random::from_env();
    for isa in Isa::available() {
        let columns = random.pick(&[64, 100, 256]);
        let count = 3000 + random.index(100);
        let rows = matrix(&mut random, count, columns);
        let exact = dense(&mut random, &rows);
        let mut bench = Bench::new(isa, 1 + random.index(3), count, exact);
        bench.prepare(&inputs(&mut random, &rows, 1));
        let mut used = 0;
        for _ in 0..200 {
            let tokens = 1 + random.index(MAX_INPUTS);
            let scale = random.pick(&[1.0, 0.3, 0.1]);
            let mut x = inputs(&mut random, &rows, tokens);
            x.iter_mut().flatten().for_each(|x| *x *= scale);
            let mut wanted = WantedLogits::default();
            for _ in 0..tokens {
                let deciding = match random.percent(20) {
                    true => Deciding::Largest(1 + random.below(EXACT_ROWS as u64) as u32),
                    false => Deciding::Draw(any_draw(&mut random)),
                };
                wanted.push(deciding, &any_changes(&mut random, count));
            }
            used += usize::from(bench.check_wanted(&x, &wanted) == Computed::LikelyRows);
        }
        assert!(used >= 20, "{used} of 200, {isa}");
    }
}

/// Large columns of the input, and rows with a common part, as trained models have them.
#[test]
fn large_columns_and_a_common_part_change_nothing() {
    let mut random = Random::from_env();
    let (count, columns) = (2500, 128);
    let common = matrix(&mut random, 1, columns).remove(0);
    let mut rows = matrix(&mut random, count, columns);
    for row in &mut rows {
        for (weight, common) in row.iter_mut().zip(&common) {
            *weight += 3.0 * common;
        }
    }
    let exact = dense(&mut random, &rows);
    let mut bench = Bench::new(Isa::best(), 2, count, exact);
    let large: Vec<usize> = (0..8).map(|_| random.index(columns)).collect();
    let mut uneven = |count| {
        let mut x = matrix(&mut random, count, columns);
        for row in &mut x {
            large.iter().for_each(|column| row[*column] *= 30.0);
        }
        x
    };
    bench.prepare(&uneven(SEEN_TOKENS));
    let computed: Vec<_> = (0..20).map(|_| bench.check(&uneven(2), &[1, 3])).collect();
    assert!(computed.contains(&Computed::LikelyRows));
}

/// Many rows whose logits are equal, or whose order the rounding to 8 bits changes: which of them
/// are computed from the floats decides.
#[test]
fn rows_around_the_last_exact_one_keep_their_logits() {
    let mut random = Random::from_env();
    let (count, columns) = (2000, 96);
    let mut used = 0;
    for spread in [0.0, 1e-4, 1e-3, 1e-2, 0.03] {
        for close in [EXACT_ROWS - 1, EXACT_ROWS + 1, 100, 200] {
            let mut rows = matrix(&mut random, count, columns);
            let top = matrix(&mut random, 1, columns).remove(0);
            for _ in 0..close {
                let row = random.index(count);
                rows[row] = top
                    .iter()
                    .map(|x| x + spread * normal(&mut random))
                    .collect();
            }
            let exact = dense(&mut random, &rows);
            let mut bench = Bench::new(Isa::best(), 1, count, exact);
            bench.prepare(std::slice::from_ref(&top));
            let x: Vec<f32> = top.iter().map(|x| x + 0.1 * normal(&mut random)).collect();
            for wanted in [1, 2, 10, 40, EXACT_ROWS as u32] {
                let computed = bench.check(std::slice::from_ref(&x), &[wanted]);
                used += usize::from(computed == Computed::LikelyRows);
            }
            for _ in 0..5 {
                let mut wanted = WantedLogits::default();
                let draw = Deciding::Draw(any_draw(&mut random));
                wanted.push(draw, &any_changes(&mut random, count));
                bench.check_wanted(std::slice::from_ref(&x), &wanted);
            }
        }
    }
    assert!(used >= 50, "{used} of 100");
}

/// Heads of fewer rows than are computed from the floats, or than are wanted.
#[test]
fn small_heads_have_the_wanted_logits() {
    let mut random = Random::from_env();
    for count in [1, 2, 31, 33, EXACT_ROWS - 1, EXACT_ROWS, EXACT_ROWS + 1] {
        let columns = random.pick(&[1, 3, 8, 40]);
        let rows = matrix(&mut random, count, columns);
        let exact = dense(&mut random, &rows);
        let mut bench = Bench::new(Isa::best(), 2, count, exact);
        let x = inputs(&mut random, &rows, 2);
        bench.prepare(&x);
        for wanted in [1, 5, EXACT_ROWS as u32] {
            bench.check(&x, &[wanted, 1]);
            let mut wanted = WantedLogits::default();
            let draw = Deciding::Draw(any_draw(&mut random));
            wanted.push(draw, &any_changes(&mut random, count));
            wanted.push(Deciding::Largest(1), &any_changes(&mut random, count));
            bench.check_wanted(&x, &wanted);
        }
    }
}

#[test]
fn a_draw_without_an_allowed_row_goes_through_all_rows() {
    let mut random = Random::from_env();
    let (count, columns) = (100, 40);
    let rows = matrix(&mut random, count, columns);
    let exact = dense(&mut random, &rows);
    let mut bench = Bench::new(Isa::best(), 1, count, exact);
    let x = inputs(&mut random, &rows, 1);
    bench.prepare(&x);
    let forbidden = (0..count as u32).map(|token| LogitChange {
        token,
        bias: f32::NEG_INFINITY,
        penalty: 1.0,
        minus: 0.0,
    });
    let mut wanted = WantedLogits::default();
    let draw = Deciding::Draw(any_draw(&mut random));
    wanted.push(draw, &forbidden.collect::<Vec<_>>());
    let all = bench.multiply(&x, &WantedLogits::default());
    assert_eq!(bench.multiply(&x, &wanted), all);
}

#[test]
fn inputs_of_zeros_and_rows_of_zeros_change_nothing() {
    let mut random = Random::from_env();
    let (count, columns) = (300, 40);
    let mut rows = matrix(&mut random, count, columns);
    for row in rows.iter_mut().step_by(3) {
        row.fill(0.0);
    }
    for rows in [rows, vec![vec![0.0; columns]; count]] {
        let exact = dense(&mut random, &rows);
        let mut bench = Bench::new(Isa::best(), 2, count, exact);
        let x = inputs(&mut random, &rows, 2);
        bench.prepare(&x);
        bench.check(&x, &[1, 7]);
        let zeros = [vec![0.0; columns], vec![-0.0; columns]];
        bench.check(&zeros, &[5, 64]);
        let draws = [(); 2].map(|()| Deciding::Draw(any_draw(&mut random)));
        bench.check_wanted(&zeros, &wanting(&draws));
    }
}

#[test]
fn numbers_that_are_not_finite_or_overflow_go_through_all_rows() {
    let mut random = Random::from_env();
    let (count, columns) = (400, 64);
    let rows = matrix(&mut random, count, columns);
    let finite = inputs(&mut random, &rows, 1);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38, -1e38] {
        let exact = dense(&mut random, &rows);
        let mut bench = Bench::new(Isa::best(), 1, count, exact);
        bench.prepare(&finite);
        assert_eq!(bench.check(&finite, &[1]), Computed::LikelyRows);
        let mut x = finite.clone();
        x[0][random.index(columns)] = odd;
        assert_eq!(
            bench.check(&x, &[1]),
            Computed::AllRows,
            "an input of {odd}"
        );

        let mut rows = rows.clone();
        rows[random.index(count)][random.index(columns)] = odd;
        let exact = DenseMatrix::from_f32(count, columns, rows.concat());
        let mut bench = Bench::new(Isa::best(), 1, count, exact);
        bench.prepare(&finite);
        assert_eq!(
            bench.check(&finite, &[1]),
            Computed::AllRows,
            "a row with {odd}"
        );
    }
}

#[test]
fn a_step_that_wants_more_goes_through_all_rows() {
    let mut random = Random::from_env();
    let (count, columns) = (400, 64);
    let rows = matrix(&mut random, count, columns);
    let exact = dense(&mut random, &rows);
    let mut bench = Bench::new(Isa::best(), 1, count, exact);
    let x = inputs(&mut random, &rows, MAX_INPUTS + 1);
    bench.prepare(&x);
    let many = vec![1; MAX_INPUTS + 1];
    assert_eq!(bench.check(&x, &many), Computed::AllRows);
    assert_eq!(
        bench.check(&x[..2], &[1, EXACT_ROWS as u32 + 1]),
        Computed::AllRows
    );
    assert_eq!(bench.check(&x[..2], &[1, 1]), Computed::LikelyRows);
}

#[test]
fn a_step_with_too_many_likely_rows_goes_through_all_rows() {
    let mut random = Random::from_env();
    let (count, columns) = (2000, 64);
    let mut rows = matrix(&mut random, count, columns);
    let alike = rows[0].clone();
    for row in &mut rows[..1500] {
        *row = alike
            .iter()
            .map(|x| x + 1e-3 * normal(&mut random))
            .collect();
    }
    let exact = dense(&mut random, &rows);
    let mut bench = Bench::new(Isa::best(), 2, count, exact);
    let other = rows[1700].clone();
    bench.prepare(std::slice::from_ref(&other));
    for _ in 0..2 {
        let computed = bench.check(std::slice::from_ref(&other), &[1]);
        assert_eq!(computed, Computed::LikelyRows);
        let computed = bench.check(std::slice::from_ref(&alike), &[1]);
        assert_eq!(computed, Computed::AllRows);
        let computed = bench.check(&[other.clone(), alike.clone()], &[1, 1]);
        assert_eq!(computed, Computed::AllRows);
    }
}
