//! Draws among many of the most likely tokens of a row without sorting them.
//!
//! Top-k, top-p and min-p each keep the first tokens in the order of their logits, and the draw
//! walks along the same order. So each of them is a search for the place where a count or a sum is
//! reached. A histogram of the row tells in which bucket that place is, and only the tokens of that
//! bucket are compared with each other.
//!
//! Invariant: the draw is the same as after a full sort, and every sum has a fixed order.

use sterna_kernels::LogitScale;
use sterna_scheduler::TokenId;

use super::candidate::{Candidate, likelier_first};
use crate::fault::{self, Place};

/// The number of buckets. Of a usual row, each has less than 1 % of the tokens.
const BUCKETS: usize = 2048;

/// The largest number of tokens that are sorted to find a place among them.
const MAX_SORTED: usize = 64;

/// The number of bucket numbers that are compared at once.
const LANES: usize = 32;

/// The number of histograms that are filled in turn, because additions to the same bucket wait for
/// each other.
const HISTOGRAMS: usize = 2;

/// A row of logits and the weights of its tokens.
#[derive(Clone, Copy)]
pub(super) struct WeightedRow<'a> {
    pub(super) logits: &'a [f32],
    pub(super) weights: &'a [f32],
    pub(super) scale: LogitScale,
}

/// The tokens that a draw keeps.
#[derive(Clone, Copy)]
pub(super) struct Filters {
    /// The number of tokens that top-k keeps.
    pub(super) top_k: usize,
    pub(super) top_p: f32,
    /// The number of tokens that min-p keeps.
    pub(super) likely: usize,
}

/// Memory for one row at a time.
pub(super) struct RankedDraw {
    bucket_of: Vec<u16>, // By token.
    histogram: Vec<[TokenSum; HISTOGRAMS]>,
    contenders: Vec<Candidate>, // The tokens of one bucket.
}

/// Neighbouring tokens in the order of their logits.
#[derive(Clone, Copy)]
struct TokenSum {
    count: usize,
    mass: f64, // The sum of their weights.
}

impl TokenSum {
    const EMPTY: TokenSum = TokenSum {
        count: 0,
        mass: 0.0,
    };

    fn plus(self, next: TokenSum) -> TokenSum {
        TokenSum {
            count: self.count + next.count,
            mass: self.mass + next.mass,
        }
    }

    fn with(self, weight: f32) -> TokenSum {
        TokenSum {
            count: self.count + 1,
            mass: self.mass + f64::from(weight),
        }
    }
}

/// The tokens up to a place in the order of logits, and the token at that place.
struct Prefix {
    sum: TokenSum,
    last: TokenId,
}

impl RankedDraw {
    pub(super) fn with_capacity(vocabulary: usize) -> RankedDraw {
        RankedDraw {
            bucket_of: Vec::with_capacity(vocabulary),
            histogram: vec![[TokenSum::EMPTY; HISTOGRAMS]; BUCKETS],
            contenders: Vec::with_capacity(vocabulary),
        }
    }

    /// Draws a token at `point`, 0 to 1. The weights of the kept tokens lie end to end on a line of
    /// length 1, the most likely first.
    pub(super) fn draw(&mut self, row: WeightedRow<'_>, filters: Filters, point: f64) -> TokenId {
        self.divide(row);
        let mut kept = self.count(row);
        fault::pass(Place::TokensCounted);
        if filters.top_k < kept.count {
            kept = self.first(row, |sum| sum.count >= filters.top_k).sum;
        }
        if filters.top_p < 1.0 {
            let mass = f64::from(filters.top_p) * kept.mass;
            let is_end = |sum: TokenSum| sum.mass >= mass || sum.count >= kept.count;
            kept = self.first(row, is_end).sum;
        }
        if filters.likely < kept.count {
            kept = self.first(row, |sum| sum.count >= filters.likely).sum;
        }
        let target = point * kept.mass;
        let is_drawn = |sum: TokenSum| sum.mass > target || sum.count >= kept.count;
        let token = self.first(row, is_drawn).last;
        fault::pass(Place::TokenRanked);
        token
    }

    /// Gives each token a bucket. The buckets divide the range of the logits evenly, the largest
    /// first.
    fn divide(&mut self, row: WeightedRow<'_>) {
        /// Added to a small number, leaves it as an integer in the low bits.
        const INTEGER: f32 = (1 << 23) as f32;
        const LAST: f32 = (BUCKETS - 1) as f32;
        let largest = row.scale.largest;
        let tokens = row.logits.iter().zip(row.weights);
        let smallest = tokens.fold(largest, |smallest, (&logit, &weight)| {
            let is_smaller = (weight > 0.0) & (logit < smallest);
            if is_smaller { logit } else { smallest }
        });
        // Infinite if all logits are equal. The product with 0 is then NaN, which is the last
        // bucket for all.
        let per_logit = LAST / (largest - smallest);
        self.bucket_of.clear();
        self.bucket_of.extend(row.logits.iter().map(|&logit| {
            let place = (largest - logit) * per_logit;
            let place = if place < LAST { place } else { LAST };
            (place + INTEGER).to_bits() as u16
        }));
    }

    /// Counts the tokens of positive weight into their buckets. Returns all of them.
    fn count(&mut self, row: WeightedRow<'_>) -> TokenSum {
        self.histogram.fill([TokenSum::EMPTY; HISTOGRAMS]);
        let lanes = (0..HISTOGRAMS).cycle();
        for ((&bucket, &weight), lane) in self.bucket_of.iter().zip(row.weights).zip(lanes) {
            if weight > 0.0 {
                let sum = &mut self.histogram[bucket as usize % BUCKETS][lane];
                *sum = sum.with(weight);
            }
        }
        for [first, second] in &mut self.histogram {
            *first = first.plus(*second);
        }
        self.buckets().fold(TokenSum::EMPTY, TokenSum::plus)
    }

    fn buckets(&self) -> impl Iterator<Item = TokenSum> {
        self.histogram.iter().map(|lanes| lanes[0])
    }

    /// Returns the shortest prefix of which `is_reached` holds. It must hold of all tokens. If it
    /// holds of a prefix, it must hold of every longer one.
    fn first(&mut self, row: WeightedRow<'_>, is_reached: impl Fn(TokenSum) -> bool) -> Prefix {
        let mut before = TokenSum::EMPTY;
        let mut found = None;
        let filled = self.buckets().enumerate();
        for (index, bucket) in filled.filter(|(_, bucket)| bucket.count > 0) {
            found = Some((index, before));
            let upto = before.plus(bucket);
            if is_reached(upto) {
                break;
            }
            before = upto;
        }
        let (index, before) = found.expect("the most likely token weighs 1");
        self.collect(row, index as u16);
        first_among(&mut self.contenders, before, is_reached)
    }

    /// Collects the tokens of a bucket.
    fn collect(&mut self, row: WeightedRow<'_>, bucket: u16) {
        self.contenders.clear();
        for (first, buckets) in (0..).step_by(LANES).zip(self.bucket_of.chunks(LANES)) {
            // Usually none is the wanted bucket, and a comparison of whole vectors shows it.
            let is_any = |any, &own: &u16| any | (own == bucket);
            if !buckets.iter().fold(false, is_any) {
                continue;
            }
            for (token, _) in (first..).zip(buckets).filter(|(_, own)| **own == bucket) {
                let (logit, weight) = (row.logits[token], row.weights[token]);
                if weight > 0.0 {
                    self.contenders.push(Candidate {
                        token: token as TokenId,
                        logit,
                        weight,
                    });
                }
            }
        }
    }
}

/// Returns the shortest prefix that ends among `contenders` and of which `is_reached` holds, or the
/// longest one. `before` are the tokens before all contenders. Halves the contenders until few are
/// left.
fn first_among(
    mut contenders: &mut [Candidate],
    mut before: TokenSum,
    is_reached: impl Fn(TokenSum) -> bool,
) -> Prefix {
    while contenders.len() > MAX_SORTED {
        let middle = contenders.len() / 2;
        contenders.select_nth_unstable_by(middle, likelier_first);
        let (likelier, rest) = std::mem::take(&mut contenders).split_at_mut(middle);
        let weights = likelier.iter().map(|candidate| candidate.weight);
        let upto = weights.fold(before, TokenSum::with);
        if is_reached(upto) {
            contenders = likelier;
        } else {
            (contenders, before) = (rest, upto);
        }
    }
    contenders.sort_unstable_by(likelier_first);
    let mut prefixes = contenders.iter().scan(before, |sum, candidate| {
        *sum = sum.with(candidate.weight);
        Some(Prefix {
            sum: *sum,
            last: candidate.token,
        })
    });
    let mut found = prefixes.next();
    while let Some(prefix) = &found
        && !is_reached(prefix.sum)
        && let Some(next) = prefixes.next()
    {
        found = Some(next);
    }
    found.expect("the bucket has a token")
}
