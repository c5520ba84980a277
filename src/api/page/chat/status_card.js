// What stands in place of an answer: progress while there is no token yet, and problems.

import { explain } from '../api/problems.js';
import { fetchMetrics } from '../api/requests.js';
import { element, textButton } from '../elements/element.js';
import { duration } from '../elements/numbers.js';
import { adminKey } from '../settings/settings.js';
import { gauge, parseMetrics } from '../server/metrics.js';

const ASK_LOAD_AFTER_MS = 400;
const ASK_LOAD_EACH_MS = 1000;
/** What the server says about the time of the next attempt. */
const WHEN = / Retry (?:in [\d.]+ seconds|later)\.$/;

/** Shows that a request waits, for how long, and what the server does meanwhile. */
export class Progress {
  node;
  #clock = element('span', { class: 'clock' });
  #load = element('small');
  #timer = 0;
  #loadAt = 0;
  #answer;

  constructor(answer) {
    this.#answer = answer;
    const dots = element(
      'span',
      { class: 'dots', 'aria-hidden': 'true' },
      element('i'),
      element('i'),
      element('i'),
    );
    this.node = element(
      'div',
      { class: 'progress' },
      dots,
      element(
        'div',
        {},
        element('span', {}, 'Waiting for the first token '),
        this.#clock,
        this.#load,
      ),
    );
    this.#timer = setInterval(() => this.#tick(), 100);
  }

  /** Ends the clock. */
  remove() {
    clearInterval(this.#timer);
    this.node.remove();
  }

  #tick() {
    const waited = performance.now() - this.#answer.sentAt;
    this.#clock.textContent = waited < ASK_LOAD_AFTER_MS ? '' : duration(waited);
    if (waited < ASK_LOAD_AFTER_MS || performance.now() < this.#loadAt) return;
    this.#loadAt = performance.now() + ASK_LOAD_EACH_MS;
    this.#askLoad();
  }

  // Only the metrics tell what the engine does, and only the operator may let others read them.
  async #askLoad() {
    try {
      const series = parseMetrics(await fetchMetrics(adminKey(), AbortSignal.timeout(2000)));
      const running = gauge(series, 'vllm:num_requests_running');
      const waiting = gauge(series, 'vllm:num_requests_waiting');
      this.#load.textContent =
        waiting > 0
          ? `Queued or in prefill. On the server: ${running} running, ${waiting} queued.`
          : 'In prefill: nothing is queued, so the server is reading the prompt.';
    } catch {
      this.#load.textContent = 'Queued or in prefill. Only the operator can see which.';
      this.#loadAt = Infinity;
    }
  }
}

/** Returns the card of a refused request that the page sends again. Call `tick` to count down. */
export function countdownCard(answer, onStop) {
  const { title, detail: all } = explain(answer.problem, false);
  const detail = all.replace(WHEN, ''); // The countdown says when.
  const countdown = element('p', { class: 'countdown' });
  const node = element(
    'div',
    { class: 'card wait' },
    element('strong', {}, title),
    detail ? element('p', {}, detail) : null,
    countdown,
    element(
      'div',
      { class: 'buttons' },
      textButton('Send now', () => answer.retryNow()),
      textButton('Do not send again', onStop),
    ),
  );
  const tick = () => {
    if (!node.isConnected && node.dataset.shown) return clearInterval(timer);
    node.dataset.shown = true;
    const seconds = Math.max(0, Math.ceil((answer.retryAt - performance.now()) / 1000));
    const time = seconds < 100 ? `${seconds} s` : duration(seconds * 1000);
    countdown.textContent = `Sends again in ${time}.`;
  };
  const timer = setInterval(tick, 250);
  tick();
  return { node, title };
}

/** Returns the card of a question that has no answer. `act` runs one of its actions. */
export function problemCard(problem, isFirstMessage, act) {
  if (!problem) {
    return card('calm', 'This question has no answer', null, [
      textButton('Ask again', () => act('retry')),
    ]);
  }
  const { title, detail, actions } = explain(problem, isFirstMessage);
  const labels = { edit: 'Edit the message', key: 'Enter the API key', new: 'Start a new chat' };
  const buttons = actions.map((action, index) =>
    textButton(labels[action], () => act(action), index === 0 ? 'primary' : ''),
  );
  // A message that the server refuses for what it is would only be refused again.
  if (!actions.includes('edit')) buttons.push(textButton('Send again', () => act('retry')));
  return card('', title, detail, buttons);
}

function card(kind, title, detail, buttons) {
  return element(
    'div',
    { class: `card ${kind}`.trim() },
    element('strong', {}, title),
    detail ? element('p', {}, detail) : null,
    element('div', { class: 'buttons' }, buttons),
  );
}
