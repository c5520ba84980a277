// The open conversation, and the answers that run in it and in others.

import { serverState } from '../api/server_state.js';
import { parametersOf } from '../settings/sampling.js';
import { furtherFields, settings } from '../settings/settings.js';
import { addMessage, ask, newConversation, requestMessages } from './conversation.js';
import { Answer } from './answer.js';
import { store } from './store.js';

const SAVE_EACH_MS = 1000;

/** Tells listeners of `open` about another conversation, and of `run` about answers. */
class Sessions extends EventTarget {
  /** The open conversation. A new one is stored with its first message. */
  current = newConversation(settings.system);
  #running = new Map(); // Answers by conversation and question.
  #problems = new Map(); // Why a question has no answer, by the same.

  /** Opens a conversation, or a new one without `id`. */
  open(id = null) {
    this.current = store.all.get(id) ?? newConversation(settings.system);
    this.dispatchEvent(new Event('open'));
  }

  /** Takes what another tab has stored of the open conversation. */
  refresh() {
    this.current = store.all.get(this.current.id) ?? this.current;
    this.#changed(this.current);
  }

  /** Sends a question of the open conversation. */
  send(text, files = []) {
    const question = ask(this.current, text, files);
    this.#answer(this.current, question);
  }

  /** Sends another version of a question. */
  edit(message, text) {
    const { parent, files } = message;
    this.#answer(this.current, addMessage(this.current, parent, 'user', text, files));
  }

  /** Asks for another answer to a question. */
  regenerate(question) {
    this.current.head = question.id;
    this.#answer(this.current, question);
  }

  /** Lets the model continue the text of an answer. */
  resume(message) {
    this.#answer(this.current, this.current.messages[message.parent], message);
  }

  /** Returns the running answer to `question`, or null. */
  answerTo(conversation, question) {
    return this.#running.get(keyOf(conversation, question)) ?? null;
  }

  /** Returns why `question` has no answer, or null. */
  problemOf(conversation, question) {
    return this.#problems.get(keyOf(conversation, question)) ?? null;
  }

  /** Returns a running answer of `conversation`, or null. */
  answerIn(conversation) {
    const prefix = `${conversation.id} `;
    const found = [...this.#running].find(([key]) => key.startsWith(prefix));
    return found?.[1] ?? null;
  }

  async #answer(conversation, question, continued = null) {
    const key = keyOf(conversation, question);
    this.#problems.delete(key);
    const answer = new Answer(requestBody(conversation, question, continued), continued);
    this.#running.set(key, answer);
    conversation.updated = Date.now();
    store.save(conversation);
    this.#changed(conversation);
    const keeper = keepWhileGrowing(conversation, question, answer);
    answer.addEventListener('change', () => {
      if (answer.phase === 'refused') serverState.look();
    });
    await answer.run();
    keeper.finish();
    this.#running.delete(key);
    if (answer.problem && !answer.message) this.#problems.set(key, answer.problem);
    if (answer.problem) serverState.look();
    conversation.updated = Date.now();
    // The user may have deleted the conversation meanwhile.
    if (store.all.has(conversation.id)) store.save(conversation);
    this.#changed(conversation, answer);
  }

  #changed(conversation, ended = null) {
    this.dispatchEvent(new CustomEvent('run', { detail: { conversation, ended } }));
  }
}

function keyOf(conversation, question) {
  return `${conversation.id} ${question.id}`;
}

// Keeps the text in the conversation, so that a reload in the middle loses at most a second.
function keepWhileGrowing(conversation, question, answer) {
  let savedAt = Date.now();
  const keep = () => {
    if (!answer.message) {
      const { head } = conversation;
      answer.message = addMessage(conversation, question.id, 'assistant', '');
      // The user may look at another branch by now.
      if (head !== question.id) conversation.head = head;
    }
    const { message, content, reasoning, model } = answer;
    Object.assign(message, {
      content,
      model,
      figures: answer.figures(),
      end: answer.end ?? 'reload',
    });
    if (reasoning) message.reasoning = reasoning;
    if (answer.problem) message.problem = answer.problem.message;
    else delete message.problem;
  };
  answer.addEventListener('change', () => {
    const isDue = Date.now() - savedAt >= SAVE_EACH_MS && answer.phase === 'streaming';
    if (!isDue || !store.all.has(conversation.id)) return;
    savedAt = Date.now();
    keep();
    store.save(conversation);
  });
  const finish = () => {
    const isWhole = answer.end !== 'stopped' && answer.end !== 'lost';
    if (isWhole || answer.content || answer.reasoning) keep();
  };
  return { finish };
}

function requestBody(conversation, question, continued) {
  const sent = parametersOf(serverState.abilities.reasons).map(({ name }) => name);
  const values = Object.entries(settings.sampling).filter(([name]) => sent.includes(name));
  const body = Object.fromEntries(values);
  if (settings.model) body.model = settings.model;
  if (settings.reasoning !== 'default') {
    body.chat_template_kwargs = { enable_thinking: settings.reasoning === 'on' };
  }
  return {
    ...body,
    ...furtherFields(settings.further),
    messages: requestMessages(conversation, continued ?? question),
    ...(continued ? { continue_final_message: true } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

export const sessions = new Sessions();
