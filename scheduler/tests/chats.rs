//! Chats of several turns with a model that keeps states: a turn computes what is new.

use std::collections::HashMap;

use sterna_scheduler::{
    Event, Limits, PAGE_TOKENS, Plan, Policy, Request, Sampled, Scheduler, SequenceId, StateLimits,
    TokenId,
};

const CHATS: usize = 16;
const TURNS: usize = 8;
const SYSTEM: usize = 300;
/// The tokens of a question and of an answer, neither a multiple of a page.
const QUESTION: usize = 45;
const ANSWER: u32 = 37;

const LIMITS: Limits = Limits {
    pages: 4096,
    max_running: CHATS as u32,
    max_queued: 64,
    max_queued_time: u64::MAX,
    step_tokens: 512,
    prefill_chunk: 512,
    max_sequence_tokens: 4096,
    states: Some(StateLimits {
        slabs: 3 * CHATS as u32 + 1,
        in_place_tokens: 1,
        trial_interval: 2048,
    }),
    diffusion: None,
};

/// Runs one turn of all chats, and appends the answers. Returns the prompt tokens that were
/// computed.
fn turn(scheduler: &mut Scheduler, now: &mut u64, chats: &mut [Vec<TokenId>]) -> usize {
    let mut chat_of: HashMap<SequenceId, usize> = HashMap::new();
    for (index, chat) in chats.iter().enumerate() {
        let request = Request {
            prompt: chat.clone(),
            max_new_tokens: ANSWER,
            ..Request::default()
        };
        let id = scheduler.submit(*now, request);
        chat_of.insert(id.expect("there is room"), index);
    }
    let (mut computed, mut ended) = (0, 0);
    while ended < chats.len() {
        let Plan::Step(step) = scheduler.plan(*now) else {
            panic!("a chat waits");
        };
        let mut sampled = Vec::new();
        for row in step.batch().rows() {
            let prompt = step.prompt_len(row.sequence);
            computed += row.end().min(prompt).saturating_sub(row.start as usize);
            if row.logits > 0 {
                let chat = &mut chats[chat_of[&row.sequence]];
                let token = (chat.len() * 31 % 97) as TokenId;
                chat.push(token);
                sampled.push(Sampled::Token(token));
            }
        }
        *now += 10_000;
        step.commit(*now, &sampled);
        scheduler.check();
        let ends = scheduler.events();
        ended += ends
            .filter(|event| matches!(event, Event::Finished { .. }))
            .count();
    }
    computed
}

#[test]
fn a_turn_of_a_chat_computes_only_what_is_new() {
    let mut scheduler = Scheduler::new(LIMITS, Policy::default());
    let mut now = 0;
    let system: Vec<TokenId> = (0..SYSTEM).map(|i| (i * 7 % 101) as TokenId).collect();
    let mut chats = vec![system; CHATS];
    for number in 0..TURNS {
        for (index, chat) in chats.iter_mut().enumerate() {
            let question = (0..QUESTION).map(|i| (100 + index * 13 + i * (number + 3)) as TokenId);
            chat.extend(question);
        }
        let computed = turn(&mut scheduler, &mut now, &mut chats);
        // The last token of an answer is drawn, but not computed.
        let new = match number {
            0 => SYSTEM + CHATS * QUESTION,
            _ => CHATS * (QUESTION + 1),
        };
        // In the first turn one chat computes the system message, and the others continue at its
        // last page border.
        let beyond = if number == 0 { CHATS * PAGE_TOKENS } else { 0 };
        let limit = 1.15 * new as f64 + beyond as f64;
        assert!(
            computed as f64 <= limit,
            "turn {number}: {computed} of {new}"
        );
    }
}
