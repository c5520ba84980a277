//! Attention over keys and values in every number format. `storing.rs` tests what is stored.

use sterna_kernels::{
    AttentionState, Kernels, KvDtype, PAGE_TOKENS, SPAN_TOKENS, SavedSpans, Span,
};
use sterna_random::Random;

use crate::{NAN_BYTE, bits, each_isa, floats, scalar};

/// The queries of a group, and the pages of their KV head. Memory that no query may read is NaN.
struct AttentionCase {
    dtype: KvDtype,
    head_dim: usize,
    group: usize,
    keys: usize,
    /// The most keys that a query sees.
    window: usize,
    queries: Vec<f32>,
    pages: Vec<Vec<u8>>,
}

/// The number format, the heads of a group, the values of a head and the keys of a random case.
type Shape = (KvDtype, usize, usize, usize);

impl AttentionCase {
    fn random(random: &mut Random, (dtype, group, head_dim, keys): Shape) -> AttentionCase {
        let sharpness = random.pick(&[1.0, 8.0, 100.0]);
        let queries = floats(random, group * head_dim)
            .iter()
            .map(|x| x * sharpness)
            .collect();
        let page = vec![NAN_BYTE; dtype.page_bytes(head_dim)];
        let mut pages = vec![page; keys.div_ceil(PAGE_TOKENS)];
        for token in 0..keys {
            let page = &mut pages[token / PAGE_TOKENS];
            let (key, value) = (floats(random, head_dim), floats(random, head_dim));
            scalar().store_kv(dtype, &key, &value, token % PAGE_TOKENS, page);
        }
        AttentionCase {
            dtype,
            head_dim,
            group,
            keys,
            window: keys,
            queries,
            pages,
        }
    }

    /// Returns the output for queries that see the first `visible` keys.
    fn run(&self, kernels: Kernels, visible: usize) -> Vec<f32> {
        self.run_block(kernels, &self.queries, visible)
    }

    /// Returns the output for queries `[position][head][head_dim]` of neighbouring positions. The
    /// first position sees `visible` keys, each further one sees one more, all in one span.
    fn run_block(&self, kernels: Kernels, queries: &[f32], visible: usize) -> Vec<f32> {
        self.run_parts(kernels, queries, visible, &[])
    }

    /// Returns the same. A state of its own computes the spans from each of the `cuts` on, and the
    /// first state resumes with what it has saved.
    fn run_parts(
        &self,
        kernels: Kernels,
        queries: &[f32],
        visible: usize,
        cuts: &[usize],
    ) -> Vec<f32> {
        let pages: Vec<&[u8]> = self.pages.iter().map(|page| &page[..]).collect();
        let positions = queries.len() / (self.group * self.head_dim);
        let new_part = || {
            let mut state = AttentionState::new(self.group + 1, self.head_dim);
            state.reset(self.group, positions, self.head_dim);
            for (i, query) in queries.chunks(self.head_dim).enumerate() {
                state
                    .query_mut(i / self.group, i % self.group)
                    .copy_from_slice(query);
            }
            (
                state,
                SavedSpans::new(5, self.group * positions, self.head_dim),
            )
        };
        let mut parts = vec![new_part()];
        let pages = &pages[..(visible + positions - 1).div_ceil(PAGE_TOKENS)];
        let mut spans = pages.chunks(SPAN_TOKENS / PAGE_TOKENS).peekable();
        let mut before = 0;
        let hidden = visible as isize - self.window as isize;
        while let Some(pages) = spans.next() {
            let span = Span {
                pages,
                next: spans.peek().copied().unwrap_or(&[]),
                visible: SPAN_TOKENS.min(visible - before),
                hidden: hidden - before as isize,
            };
            if cuts.contains(&(before / SPAN_TOKENS)) {
                parts.push(new_part());
            }
            before += SPAN_TOKENS;
            if hidden < before as isize {
                match &mut parts[..] {
                    [(state, _)] => kernels.attention_span(self.dtype, span, state),
                    [.., (state, saved)] => {
                        kernels.attention_span_apart(self.dtype, span, state, saved);
                    }
                    [] => unreachable!("there is a first part"),
                }
            }
        }
        let (mut state, _) = parts.remove(0);
        for (_, saved) in &parts {
            kernels.attention_resume(&mut state, saved);
        }
        let mut out = vec![f32::NAN; queries.len()];
        kernels.attention_finish(&state, &mut out);
        out
    }

    /// Computes softmax attention by its formula, in f64. The queries of 8-bit integers are
    /// integers too.
    fn expected(&self, visible: usize) -> Vec<f64> {
        let d = self.head_dim;
        let token = |token: usize| {
            let [mut key, mut value] = [(); 2].map(|()| vec![0.0; d]);
            let page = &self.pages[token / PAGE_TOKENS];
            (self.dtype).load(page, token % PAGE_TOKENS, &mut key, &mut value);
            [key, value]
        };
        let tokens: Vec<[Vec<f32>; 2]> = (0..visible).map(token).collect();
        let key = |token: usize, i: usize| f64::from(tokens[token][0][i]);
        let value = |token: usize, i: usize| f64::from(tokens[token][1][i]);
        let mut out = Vec::new();
        for query in self.queries.chunks(d) {
            let largest = query.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            let query: Vec<f64> = if self.dtype == KvDtype::Int8 {
                let integer = |x: &f32| (x * (127.0 / largest)).round_ties_even();
                (query.iter().map(integer))
                    .map(|q| f64::from(q) * f64::from(largest) / 127.0)
                    .collect()
            } else {
                query.iter().map(|&x| f64::from(x)).collect()
            };
            let score =
                |token| (0..d).map(|i| query[i] * key(token, i)).sum::<f64>() / (d as f64).sqrt();
            let first = visible.saturating_sub(self.window);
            let scores: Vec<f64> = (first..visible).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..d).map(|i| {
                let weighted = weights.iter().zip(first..);
                let weighted = weighted.map(|(weight, token)| weight * value(token, i));
                weighted.sum::<f64>() / sum
            }));
        }
        out
    }

    fn check(&self, visible: usize) {
        let what = format!(
            "{}, {} heads of {}, {visible} of {} keys, window {}",
            self.dtype, self.group, self.head_dim, self.keys, self.window
        );
        // Weights of 14 bits are off by up to 1/32766 of the largest.
        let tolerance = if self.dtype == KvDtype::Int8 {
            1e-3
        } else {
            1e-4
        };
        let scalar_out = self.run(scalar(), visible);
        for (value, exact) in scalar_out.iter().zip(self.expected(visible)) {
            assert!(
                (f64::from(*value) - exact).abs() < tolerance,
                "{what}: {value} instead of {exact}"
            );
        }
        for kernels in each_isa() {
            assert_eq!(
                bits(&self.run(kernels, visible)),
                bits(&scalar_out),
                "{}: {what}",
                kernels.isa()
            );
        }
    }
}

#[test]
fn attention_is_softmax_and_equal_on_every_isa() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        for group in 1..=9 {
            for head_dim in [16, 32, 64, 80, 128, 256] {
                let keys = 1 + random.index(SPAN_TOKENS);
                AttentionCase::random(&mut random, (dtype, group, head_dim, keys)).check(keys);
            }
        }
    }
}

#[test]
fn attention_over_several_spans_is_softmax_over_all_keys() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        for keys in [256, 257, 512, 600, 1025] {
            AttentionCase::random(&mut random, (dtype, 4, 64, keys)).check(keys);
        }
    }
}

#[test]
fn spans_in_several_parts_give_the_same_bits_as_in_one() {
    let mut random = Random::from_env();
    for round in 0..60 {
        let dtype = KvDtype::ALL[round % 5];
        let (group, head_dim) = (1 + random.index(17), random.pick(&[16, 32, 80, 128, 256]));
        let keys = 257 + random.index(1000);
        let case = AttentionCase::random(&mut random, (dtype, group, head_dim, keys));
        let whole = bits(&case.run(scalar(), keys));
        let cuts: Vec<usize> = (1..=4).filter(|_| random.index(2) == 0).collect();
        for kernels in each_isa() {
            let parts = case.run_parts(kernels, &case.queries, keys, &cuts);
            let isa = kernels.isa();
            assert_eq!(
                bits(&parts),
                whole,
                "{isa}: {dtype}, {keys} keys, cuts {cuts:?}"
            );
        }
    }
}

#[test]
#[should_panic(expected = "no room for another span")]
fn more_spans_than_there_is_room_for_are_not_saved() {
    let case = AttentionCase::random(&mut Random::from_env(), (KvDtype::F16, 1, 16, 7 * 256));
    case.run_parts(scalar(), &case.queries, 7 * 256, &[1]);
}

#[test]
fn attention_over_a_window_is_softmax_over_its_keys() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        for window in [1, 15, 16, 17, 100, 255, 256, 257, 512] {
            let keys = 1 + random.index(700);
            let mut case = AttentionCase::random(&mut random, (dtype, 3, 48, keys));
            case.window = window;
            case.check(keys);
        }
    }
}

#[test]
fn attention_ignores_keys_beyond_the_visible_ones() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        let long = AttentionCase::random(&mut random, (dtype, 5, 32, 300));
        for visible in [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 299] {
            // The same sequence with fewer keys: the memory beyond them is NaN.
            let mut short = AttentionCase {
                keys: visible,
                queries: long.queries.clone(),
                pages: long.pages.clone(),
                ..long
            };
            for token in visible..short.pages.len() * PAGE_TOKENS {
                let page = &mut short.pages[token / PAGE_TOKENS];
                let nan = vec![f32::NAN; 32];
                scalar().store_kv(dtype, &nan, &nan, token % PAGE_TOKENS, page);
            }
            short.check(visible);
            for kernels in each_isa() {
                assert_eq!(
                    bits(&short.run(kernels, visible)),
                    bits(&long.run(kernels, visible)),
                    "{dtype}, {visible} keys"
                );
            }
        }
    }
}

#[test]
fn a_number_that_is_not_finite_reaches_every_query_that_sees_it() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (in_key, at) in [(true, 40), (false, 40), (false, 299)] {
                let mut case = AttentionCase::random(&mut random, (dtype, 3, 32, 300));
                let [mut key, mut value] = [(); 2].map(|()| floats(&mut random, 32));
                // A key that is zero elsewhere does not depend on the signs of the query.
                if in_key {
                    key.fill(f32::NAN);
                }
                [&mut key, &mut value][usize::from(!in_key)][7] = poison;
                let (page, slot) = (&mut case.pages[at / PAGE_TOKENS], at % PAGE_TOKENS);
                scalar().store_kv(dtype, &key, &value, slot, page);
                for kernels in each_isa() {
                    let what = format!("{}, {dtype}, {poison} at {at}", kernels.isa());
                    assert!(
                        case.run(kernels, at).iter().all(|x| x.is_finite()),
                        "{what}"
                    );
                    for head in case.run(kernels, at + 1).chunks(32) {
                        assert!(!head[7].is_finite(), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_that_is_not_finite_gives_nan_in_eight_bit_integers() {
    let mut random = Random::from_env();
    for poison in [f32::NAN, f32::INFINITY] {
        let mut case = AttentionCase::random(&mut random, (KvDtype::Int8, 2, 32, 40));
        case.queries[5] = poison;
        for kernels in each_isa() {
            let out = case.run(kernels, 40);
            assert!(out[..32].iter().all(|x| x.is_nan()), "{}", kernels.isa());
            assert!(out[32..].iter().all(|x| x.is_finite()), "{}", kernels.isa());
        }
    }
}

#[test]
fn a_position_in_a_block_gives_the_same_bits_as_alone() {
    let mut random = Random::from_env();
    for round in 0..200 {
        let dtype = KvDtype::ALL[round % 5];
        let (group, head_dim) = (
            1 + random.index(9),
            random.pick(&[16, 32, 48, 80, 128, 256]),
        );
        let (positions, before) = (1 + random.index(PAGE_TOKENS), random.index(600));
        let before = match before % SPAN_TOKENS + positions {
            in_span if in_span > SPAN_TOKENS => before / SPAN_TOKENS * SPAN_TOKENS,
            _ => before,
        };
        let keys = before + positions;
        let mut case = AttentionCase::random(&mut random, (dtype, group, head_dim, keys));
        // A window must begin in the same span for all positions.
        let window = PAGE_TOKENS + random.index(keys);
        let first = |position: usize| (position + 1).saturating_sub(window) / SPAN_TOKENS;
        if round % 2 == 0 && first(before) == first(keys - 1) {
            case.window = window;
        }
        let width = group * head_dim;
        let queries = floats(&mut random, positions * width);
        // Only its own position sees the last token. Multiplying it by zero would give NaN.
        let checked = if positions > 1 {
            let last = [f32::NAN, f32::INFINITY].map(|x| vec![x; head_dim]);
            let page = case.pages.last_mut().expect("there are keys");
            let slot = (keys - 1) % PAGE_TOKENS;
            scalar().store_kv(dtype, &last[0], &last[1], slot, page);
            positions - 1
        } else {
            1
        };
        for kernels in each_isa() {
            let together = case.run_block(kernels, &queries, before + 1);
            for (i, query) in queries.chunks(width).take(checked).enumerate() {
                let what = format!("{dtype}, {group} heads of {head_dim}, position {before} + {i}");
                let alone = bits(&case.run_block(scalar(), query, before + 1 + i));
                let isa = kernels.isa();
                assert_eq!(
                    bits(&together[i * width..][..width]),
                    alone,
                    "{isa}: {what}"
                );
            }
        }
    }
}

#[test]
fn a_head_in_a_group_gives_the_same_bits_as_alone() {
    let mut random = Random::from_env();
    for dtype in KvDtype::ALL {
        let group = AttentionCase::random(&mut random, (dtype, 7, 48, 100));
        for kernels in each_isa() {
            let together = group.run(kernels, 100);
            for (head, query) in group.queries.chunks(48).enumerate() {
                let alone = AttentionCase {
                    group: 1,
                    queries: query.to_vec(),
                    pages: group.pages.clone(),
                    ..group
                };
                assert_eq!(
                    bits(&alone.run(kernels, 100)),
                    bits(&together[head * 48..][..48]),
                    "{dtype}, head {head}"
                );
            }
        }
    }
}

#[test]
fn the_largest_numbers_overflow_no_sum() {
    for dtype in KvDtype::ALL {
        for (q, k, v) in [(1.0, 1.0, 1.0), (-1.0, 1.0, -1.0), (1.0, -1.0, 1.0)] {
            let mut page = vec![NAN_BYTE; dtype.page_bytes(256)];
            for slot in 0..PAGE_TOKENS {
                scalar().store_kv(dtype, &[k; 256], &[v; 256], slot, &mut page);
            }
            let case = AttentionCase {
                dtype,
                head_dim: 256,
                group: 4,
                keys: SPAN_TOKENS,
                window: SPAN_TOKENS,
                queries: vec![q; 4 * 256],
                pages: vec![page; SPAN_TOKENS / PAGE_TOKENS],
            };
            // All weights are equal, and so are all values.
            for kernels in each_isa() {
                for x in case.run(kernels, SPAN_TOKENS) {
                    assert!((x - v).abs() < 0.01, "{}, {dtype}: {x}", kernels.isa());
                }
            }
            case.check(SPAN_TOKENS);
        }
    }
}
