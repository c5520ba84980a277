//! Finds the longest of many texts that ends at each place of a text: the automaton of Aho and
//! Corasick (1975).
//!
//! A node is a beginning of a text. The nodes are ordered by length and then by their bytes, so the
//! children of a node are neighbors.
//!
//! Invariant: the time for a text depends on its length, not on the lengths of the texts to find.

use std::collections::VecDeque;

pub(super) struct Automaton {
    last_bytes: Vec<u8>, // Of each node. Node 0 is the empty beginning.
    children: Vec<u32>,  // Where the children of each node begin, and the end of all.
    suffixes: Vec<u32>,  // The longest proper suffix of each node that is a node.
    longest: Vec<u32>,   // The length of the longest text with which each node ends, or 0.
}

impl Automaton {
    /// Returns the automaton that finds `texts`, none of which may be empty.
    pub(super) fn new(mut texts: Vec<Vec<u8>>) -> Automaton {
        texts.sort_unstable();
        texts.dedup();
        let mut nodes = Automaton {
            last_bytes: vec![0],
            children: Vec::new(),
            suffixes: vec![0],
            longest: vec![0],
        };
        // For each node without children so far: the longer texts that begin with it, its length.
        let mut open = VecDeque::from([(0..texts.len(), 0)]);
        while let Some((mut longer, len)) = open.pop_front() {
            let node = nodes.children.len();
            nodes.children.push(nodes.last_bytes.len() as u32);
            while !longer.is_empty() {
                let byte = texts[longer.start][len];
                let count = texts[longer.clone()].partition_point(|text| text[len] == byte);
                let is_text = texts[longer.start].len() == len + 1;
                // A suffix is shorter than its node, so the suffix has its children already.
                let suffix = match node {
                    0 => 0,
                    _ => nodes.next(nodes.suffixes[node], byte),
                };
                nodes.longest.push(match is_text {
                    true => len as u32 + 1,
                    false => nodes.longest[suffix as usize],
                });
                nodes.suffixes.push(suffix);
                nodes.last_bytes.push(byte);
                let end = longer.start + count;
                open.push_back((longer.start + usize::from(is_text)..end, len + 1));
                longer.start = end;
            }
        }
        nodes.children.push(nodes.last_bytes.len() as u32);
        nodes
    }

    /// Returns the length of the longest text that ends behind each byte of `text`; 0 if none does.
    pub(super) fn longest_ends(&self, text: &[u8]) -> impl Iterator<Item = usize> {
        text.iter().scan(0, |node, byte| {
            *node = self.next(*node, *byte);
            Some(self.longest[*node as usize] as usize)
        })
    }

    /// Returns the longest node with which `node` and `byte` end.
    fn next(&self, mut node: u32, byte: u8) -> u32 {
        loop {
            let from = self.children[node as usize];
            let children = from as usize..self.children[node as usize + 1] as usize;
            if let Ok(child) = self.last_bytes[children].binary_search(&byte) {
                return from + child as u32;
            }
            if node == 0 {
                return 0;
            }
            node = self.suffixes[node as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    #[test]
    fn it_finds_the_longest_text_at_each_place() {
        let mut random = Random::from_env();
        let word = |random: &mut Random, most: usize| {
            let len = 1 + random.index(most);
            (0..len).map(|_| b'a' + random.index(3) as u8).collect()
        };
        for _ in 0..300 {
            let count = random.index(30);
            let texts: Vec<Vec<u8>> = (0..count).map(|_| word(&mut random, 6)).collect();
            let text: Vec<u8> = word(&mut random, 60);
            let expected: Vec<usize> = (1..=text.len())
                .map(|end| {
                    let ends = |one: &&Vec<u8>| text[..end].ends_with(one);
                    texts.iter().filter(ends).map(Vec::len).max().unwrap_or(0)
                })
                .collect();
            let found: Vec<usize> = Automaton::new(texts.clone()).longest_ends(&text).collect();
            assert_eq!(found, expected, "{texts:?} {text:?}");
        }
    }
}
