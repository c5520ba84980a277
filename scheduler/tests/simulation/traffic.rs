//! The random requests of a world, and what became of those that were submitted.

use std::collections::BTreeSet;

use sterna_random::Random;
use sterna_scheduler::{Band, PAGE_TOKENS, Request, SequenceId, SubTenant, TenantId, TokenId};

/// Output lengths of a world: mixed, or so long that memory runs out after the admission.
pub(crate) const OUTPUT_LENGTHS: [[u32; 6]; 2] =
    [[1, 2, 15, 16, 17, 60], [1, 80, 120, 160, 200, 240]];

/// The parts of which prompts are made, and the random choices that differ between worlds.
pub(crate) struct Traffic {
    pub(crate) has_blocks: bool, // Some requests want block diffusion.
    pub(crate) alphabet: u64,    // Different tokens.
    pub(crate) blocks: Vec<Vec<TokenId>>, // The parts of prompts; few, so that many begin alike.
    pub(crate) ended: Vec<(SequenceId, Vec<TokenId>)>, // The last conversations, to be continued.
    pub(crate) tenants: u64,
    pub(crate) load: u64, // The chance of one more request in a turn, in percent.
    pub(crate) output_lengths: [u32; 6], // To pick from.
    pub(crate) longest_prompt: u64, // In blocks.
    pub(crate) latest: Option<(Request, usize)>, // With its number of choices.
}

impl Traffic {
    /// Returns one block of random tokens.
    pub(crate) fn block(random: &mut Random, alphabet: u64) -> Vec<TokenId> {
        let tokens = (0..PAGE_TOKENS).map(|_| random.below(alphabet) as TokenId);
        tokens.collect()
    }

    /// Remembers an ended conversation. A later request may continue it.
    pub(crate) fn remember(&mut self, id: SequenceId, conversation: Vec<TokenId>) {
        if self.ended.len() == 4 {
            self.ended.remove(0);
        }
        self.ended.push((id, conversation));
    }

    /// Returns a random prompt: blocks or an ended conversation, then up to 40 random tokens.
    pub(crate) fn prompt(&self, random: &mut Random) -> Vec<TokenId> {
        let mut prompt = Vec::new();
        if !self.ended.is_empty() && random.percent(25) {
            prompt.extend_from_slice(&self.ended[random.index(self.ended.len())].1);
        } else {
            for _ in 0..=random.below(self.longest_prompt) {
                prompt.extend_from_slice(&self.blocks[random.index(self.blocks.len())]);
            }
        }
        match random.below(4) {
            0 => {}
            1 => drop(prompt.pop()),
            2 => prompt.push(random.below(self.alphabet) as TokenId),
            _ => {
                for _ in 0..random.below(40) {
                    prompt.push(random.below(self.alphabet) as TokenId);
                }
            }
        }
        if prompt.is_empty() {
            prompt.push(0);
        }
        prompt
    }

    /// Returns a random request and its number of choices. Most requests fit in
    /// `longest_sequence(tenant)` tokens. The deadlines of a world with slow steps are
    /// `deadline_factor` times as long.
    pub(crate) fn request(
        &self,
        random: &mut Random,
        longest_sequence: impl Fn(TenantId) -> usize,
        deadline_factor: u64,
    ) -> (Request, usize) {
        let mut prompt = self.prompt(random);
        let tenant = TenantId(random.below(self.tenants) as u32);
        let longest = longest_sequence(tenant);
        let mut max_new_tokens = random.pick(&self.output_lengths);
        if random.percent(95) {
            prompt.truncate((longest - 1).max(1));
            max_new_tokens = max_new_tokens
                .min((longest.saturating_sub(prompt.len())) as u32)
                .max(1);
        }
        let is_diffused = self.has_blocks && random.percent(40);
        let request = Request {
            prompt,
            max_new_tokens,
            is_length_given: max_new_tokens.is_multiple_of(2),
            min_new_tokens: random.below(30) as u32,
            stop_tokens: vec![0; usize::from(random.percent(30))],
            scores_prompt: !is_diffused && random.percent(8),
            is_diffused,
            draw_time: random.pick(&[0, 0, 0, 100_000, 4_000_000]),
            tenant,
            sub_tenant: random.percent(30).then(|| SubTenant(random.below(3))),
            band: random
                .percent(10)
                .then(|| random.pick(&[Band::Interactive, Band::Standard, Band::Batch])),
            first_token_within: random
                .percent(4)
                .then(|| random.below(20_000) * deadline_factor),
            ends_within: random
                .percent(4)
                .then(|| random.below(60_000) * deadline_factor),
        };
        let choices = if random.percent(10) {
            random.between(2, 3) as usize
        } else {
            1
        };
        (request, choices)
    }
}

/// A short request that always fits.
pub(crate) fn small_request() -> Request {
    Request {
        prompt: vec![0],
        max_new_tokens: 1,
        ..Request::default()
    }
}

/// What became of the requests, by their number in the order of generation.
#[derive(Default)]
pub(crate) struct Submissions {
    pub(crate) generated: u64,
    pub(crate) accepted: u64,
    pub(crate) refused: BTreeSet<u64>,
    pub(crate) skipped: BTreeSet<u64>, // Numbers of requests that are not to be submitted.
}
