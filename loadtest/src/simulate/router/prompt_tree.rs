//! The prompts that a router has sent, as a radix tree whose nodes know which machines have
//! received their text.
//!
//! It follows the tree of SGLang's router, which vllm-router and SMG have too. Theirs forgets old
//! text of a machine beyond 33,554,432 characters; this one keeps all.
//!
//! Invariant: a machine that has received a node's text has received the text of its parent, unless
//! the machine has failed in between.

use std::collections::HashMap;

/// The root has no text.
const ROOT: usize = 0;

/// The tree.
pub(super) struct PromptTree {
    nodes: Vec<PromptNode>,
    received: Vec<u64>, // Tokens in the nodes of each machine.
}

#[derive(Default)]
struct PromptNode {
    text: Vec<u32>,
    children: HashMap<u32, usize>, // By the first token of their text.
    machines: Vec<u32>,            // The last one has received the text last.
}

impl PromptTree {
    /// Creates the tree of this many machines, which have received nothing.
    pub(super) fn new(machines: usize) -> PromptTree {
        PromptTree {
            nodes: vec![PromptNode::default()],
            received: vec![0; machines],
        }
    }

    /// Returns how many tokens at the beginning of `prompt` some machine has received, and the
    /// machine that has received them last. The machine is `None` if there are no such tokens, or
    /// if the machines that received them have failed.
    pub(super) fn longest(&self, prompt: &[u32]) -> (usize, Option<usize>) {
        let (mut at, mut matched) = (ROOT, 0);
        while let Some(&child) = prompt
            .get(matched)
            .and_then(|token| self.nodes[at].children.get(token))
        {
            let text = &self.nodes[child].text;
            let same = common(text, &prompt[matched..]);
            at = child;
            matched += same;
            if same < text.len() {
                break;
            }
        }
        let last = self.nodes[at].machines.last();
        (matched, last.map(|machine| *machine as usize))
    }

    /// Returns the number of tokens in the nodes of a machine.
    pub(super) fn received(&self, machine: usize) -> u64 {
        self.received[machine]
    }

    /// Records that a machine receives a prompt.
    pub(super) fn insert(&mut self, prompt: &[u32], machine: usize) {
        let (mut at, mut done) = (ROOT, 0);
        while let Some(token) = prompt.get(done) {
            let child = match self.nodes[at].children.get(token).copied() {
                Some(child) => {
                    let same = common(&self.nodes[child].text, &prompt[done..]);
                    self.split(child, same)
                }
                None => {
                    let child = self.nodes.len();
                    self.nodes[at].children.insert(*token, child);
                    self.nodes.push(PromptNode {
                        text: prompt[done..].to_vec(),
                        ..PromptNode::default()
                    });
                    child
                }
            };
            done += self.nodes[child].text.len();
            self.touch(child, machine);
            at = child;
        }
    }

    /// Shortens a node to `len` tokens. The rest becomes its only child. Returns the node.
    fn split(&mut self, node: usize, len: usize) -> usize {
        if len < self.nodes[node].text.len() {
            let rest = self.nodes[node].text.split_off(len);
            let child = self.nodes.len();
            let first = rest[0];
            let upper = &mut self.nodes[node];
            let lower = PromptNode {
                text: rest,
                children: std::mem::take(&mut upper.children),
                machines: upper.machines.clone(),
            };
            upper.children.insert(first, child);
            self.nodes.push(lower);
        }
        node
    }

    fn touch(&mut self, node: usize, machine: usize) {
        let PromptNode { machines, text, .. } = &mut self.nodes[node];
        match machines
            .iter()
            .rposition(|&known| known as usize == machine)
        {
            Some(at) => machines[at..].rotate_left(1),
            None => {
                machines.push(machine as u32);
                self.received[machine] += text.len() as u64;
            }
        }
    }

    /// Forgets what a machine has received.
    pub(super) fn forget(&mut self, machine: usize) {
        for node in &mut self.nodes {
            node.machines.retain(|&known| known as usize != machine);
        }
        self.received[machine] = 0;
    }
}

/// Returns the length of the longest common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
