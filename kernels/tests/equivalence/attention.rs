//! Attention, and storing keys and values.

use sterna_kernels::{
    AttentionState, Kernels, KvPage, PAGE_TOKENS, SPAN_TOKENS, Span, f16_from_f32, f32_from_f16,
};
use sterna_random::Random;

use crate::{F16_NAN, bits, each_isa, floats, scalar};

/// The queries of a group, and the pages of their KV head. Memory that no query may read is NaN.
struct AttentionCase {
    head_dim: usize,
    group: usize,
    keys: usize,
    queries: Vec<f32>,
    pages: Vec<(Vec<u16>, Vec<u16>)>,
}

impl AttentionCase {
    fn random(random: &mut Random, group: usize, head_dim: usize, keys: usize) -> AttentionCase {
        let sharpness = random.pick(&[1.0, 8.0, 100.0]);
        let queries = floats(random, group * head_dim)
            .iter()
            .map(|x| x * sharpness)
            .collect();
        let page = (
            vec![F16_NAN; PAGE_TOKENS * head_dim],
            vec![F16_NAN; PAGE_TOKENS * head_dim],
        );
        let mut pages = vec![page; keys.div_ceil(PAGE_TOKENS)];
        for token in 0..keys {
            let (k_page, v_page) = &mut pages[token / PAGE_TOKENS];
            let (key, value) = (floats(random, head_dim), floats(random, head_dim));
            scalar().store_kv(&key, &value, token % PAGE_TOKENS, k_page, v_page);
        }
        AttentionCase {
            head_dim,
            group,
            keys,
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
        let pages: Vec<KvPage> = self
            .pages
            .iter()
            .map(|(keys, values)| KvPage { keys, values })
            .collect();
        let positions = queries.len() / (self.group * self.head_dim);
        let mut state = AttentionState::new(self.group + 1, self.head_dim);
        state.reset(self.group, positions, self.head_dim);
        for (i, query) in queries.chunks(self.head_dim).enumerate() {
            state
                .query_mut(i / self.group, i % self.group)
                .copy_from_slice(query);
        }
        let pages = &pages[..(visible + positions - 1).div_ceil(PAGE_TOKENS)];
        let mut spans = pages.chunks(SPAN_TOKENS / PAGE_TOKENS).peekable();
        let mut before = 0;
        while let Some(pages) = spans.next() {
            let span = Span {
                pages,
                next: spans.peek().copied().unwrap_or(&[]),
                visible: SPAN_TOKENS.min(visible - before),
            };
            kernels.attention_span(span, &mut state);
            before += SPAN_TOKENS;
        }
        let mut out = vec![f32::NAN; queries.len()];
        kernels.attention_finish(&state, &mut out);
        out
    }

    /// Computes softmax attention by its formula, in f64.
    fn expected(&self, visible: usize) -> Vec<f64> {
        let d = self.head_dim;
        let key = |token: usize, i: usize| {
            f64::from(f32_from_f16(self.pages[token / 16].0[i * 16 + token % 16]))
        };
        let value = |token: usize, i: usize| {
            f64::from(f32_from_f16(self.pages[token / 16].1[token % 16 * d + i]))
        };
        let mut out = Vec::new();
        for query in self.queries.chunks(d) {
            let score = |token| {
                (0..d)
                    .map(|i| f64::from(query[i]) * key(token, i))
                    .sum::<f64>()
                    / (d as f64).sqrt()
            };
            let scores: Vec<f64> = (0..visible).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..d).map(|i| {
                (0..visible)
                    .map(|token| weights[token] * value(token, i))
                    .sum::<f64>()
                    / sum
            }));
        }
        out
    }

    fn check(&self, visible: usize) {
        let what = format!(
            "{} heads of {}, {visible} of {} keys",
            self.group, self.head_dim, self.keys
        );
        let scalar_out = self.run(scalar(), visible);
        for (value, exact) in scalar_out.iter().zip(self.expected(visible)) {
            assert!(
                (f64::from(*value) - exact).abs() < 1e-4,
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
    for group in 1..=9 {
        for head_dim in [16, 32, 64, 80, 128, 256] {
            let keys = 1 + random.index(SPAN_TOKENS);
            AttentionCase::random(&mut random, group, head_dim, keys).check(keys);
        }
    }
}

#[test]
fn attention_over_several_spans_is_softmax_over_all_keys() {
    let mut random = Random::from_env();
    for keys in [256, 257, 512, 600, 1025] {
        AttentionCase::random(&mut random, 4, 64, keys).check(keys);
    }
}

#[test]
fn attention_ignores_keys_beyond_the_visible_ones() {
    let mut random = Random::from_env();
    let long = AttentionCase::random(&mut random, 5, 32, 300);
    for visible in [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 299] {
        // The same sequence with fewer keys: the memory beyond them is NaN.
        let mut short = AttentionCase {
            keys: visible,
            queries: long.queries.clone(),
            pages: long.pages.clone(),
            ..long
        };
        for token in visible..short.pages.len() * PAGE_TOKENS {
            let (keys, values) = &mut short.pages[token / PAGE_TOKENS];
            keys.iter_mut()
                .skip(token % PAGE_TOKENS)
                .step_by(PAGE_TOKENS)
                .for_each(|key| *key = F16_NAN);
            values[token % PAGE_TOKENS * 32..][..32].fill(F16_NAN);
        }
        short.check(visible);
        for kernels in each_isa() {
            assert_eq!(
                bits(&short.run(kernels, visible)),
                bits(&long.run(kernels, visible)),
                "{visible} keys"
            );
        }
    }
}

#[test]
fn a_position_in_a_block_gives_the_same_bits_as_alone() {
    let mut random = Random::from_env();
    for _ in 0..80 {
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
        let mut case = AttentionCase::random(&mut random, group, head_dim, keys);
        let width = group * head_dim;
        let queries = floats(&mut random, positions * width);
        // Only its own position sees the last token. Multiplying it by zero would give NaN.
        let checked = if positions > 1 {
            let last = [f32::NAN, f32::INFINITY].map(|x| vec![x; head_dim]);
            let (k_page, v_page) = case.pages.last_mut().expect("there are keys");
            let slot = (keys - 1) % PAGE_TOKENS;
            scalar().store_kv(&last[0], &last[1], slot, k_page, v_page);
            positions - 1
        } else {
            1
        };
        for kernels in each_isa() {
            let together = case.run_block(kernels, &queries, before + 1);
            for (i, query) in queries.chunks(width).take(checked).enumerate() {
                let what = format!("{group} heads of {head_dim}, position {before} + {i}");
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
    let group = AttentionCase::random(&mut random, 7, 48, 100);
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
                "head {head}"
            );
        }
    }
}

#[test]
fn storing_a_token_writes_its_key_and_value_and_nothing_else() {
    let mut random = Random::from_env();
    for head_dim in [16, 24, 64, 128] {
        let scale = random.pick(&[1e-6, 1.0, 1e5]);
        let key: Vec<f32> = floats(&mut random, head_dim)
            .iter()
            .map(|x| x * scale)
            .collect();
        let value: Vec<f32> = floats(&mut random, head_dim)
            .iter()
            .map(|x| x * scale)
            .collect();
        let slot = random.index(PAGE_TOKENS);
        for kernels in each_isa() {
            let mut k_page = vec![F16_NAN; PAGE_TOKENS * head_dim];
            let mut v_page = k_page.clone();
            kernels.store_kv(&key, &value, slot, &mut k_page, &mut v_page);
            for i in 0..head_dim {
                for token in 0..PAGE_TOKENS {
                    let [k, v] = if token == slot {
                        [key[i], value[i]].map(f16_from_f32)
                    } else {
                        [F16_NAN; 2]
                    };
                    assert_eq!(k_page[i * PAGE_TOKENS + token], k, "{}", kernels.isa());
                    assert_eq!(v_page[token * head_dim + i], v, "{}", kernels.isa());
                }
            }
        }
    }
}
