// One answer: the request, its stream, its figures, and its new attempts while the server is full.

import { isPassing } from '../api/problems.js';
import { streamChat } from '../api/requests.js';

/** After this many refusals the page asks the user before it tries again. */
const MOST_ATTEMPTS = 8;
/** A rate over a shorter time says more about the network than about the server. */
const SHORTEST_MEASURE_MS = 100;

/**
 * Tells listeners of `change` about a new phase or new text. Phases, in their order: `waiting` for
 * the first token, `streaming` and `ended`; or, after a refusal, `refused` with `retryAt` and then
 * `waiting` again.
 */
export class Answer extends EventTarget {
  phase = 'waiting';
  content = '';
  reasoning = '';
  /** When the request was sent, in milliseconds. */
  sentAt = 0;
  /** When the page sends the request again, or null. */
  retryAt = null;
  /** Why there is no answer, or not all of it: an `ApiProblem` or null. */
  problem = null;
  /** `stop`, `length`, `stopped` by the user, `lost`, or null before the end. */
  end = null;
  model = '';
  usage = null;
  /** The message that keeps the text, once there is some. */
  message;
  #body;
  #before; // The figures of the message that this answer continues.
  #abort = new AbortController();
  #first = null; // When the first token came, and how many tokens came with it.
  #lastAt = 0;
  #wake = () => {};

  /** Answers `body`. `continued` is the message whose text the answer continues, or null. */
  constructor(body, continued) {
    super();
    this.#body = body;
    this.message = continued;
    this.content = continued?.content ?? '';
    this.reasoning = continued?.reasoning ?? '';
    this.#before = continued?.figures ?? {};
  }

  /** Runs until the answer has ended, in one way or another. */
  async run() {
    for (let attempt = 1; ; attempt += 1) {
      try {
        await this.#attempt();
        break;
      } catch (error) {
        if (this.#abort.signal.aborted) break;
        this.problem = error;
        if (this.#first || !isPassing(error) || attempt === MOST_ATTEMPTS) break;
        await this.#waitToRetry(error.retryAfterMs);
        if (this.#abort.signal.aborted) break;
      }
    }
    this.end ??= this.#abort.signal.aborted ? 'stopped' : 'lost';
    this.#enter('ended');
  }

  /** Ends the answer. The server notices that the client has left and frees its memory. */
  stop() {
    this.#abort.abort();
    this.#wake();
  }

  /** Sends a refused request again, now. */
  retryNow() {
    this.#wake();
  }

  /**
   * Returns the figures of the answer: times in milliseconds, tokens, tokens per second. The tokens
   * of a continued answer are all of its tokens.
   */
  figures() {
    const figures = { ...this.#before };
    if (this.#first) figures.firstTokenMs = this.#first.at - this.sentAt;
    if (!this.usage) return figures;
    const { prompt_tokens: prompt, completion_tokens: completion } = this.usage;
    const cached = this.usage.prompt_tokens_details?.cached_tokens;
    const earlier = this.#before.completionTokens ?? 0;
    figures.promptTokens = this.#before.promptTokens ?? prompt;
    figures.completionTokens = earlier + completion;
    if (cached !== undefined && !earlier) figures.cachedTokens = cached;
    if (!this.#first) return figures;
    const duringMs = this.#lastAt - this.#first.at;
    figures.totalMs = this.#lastAt - this.sentAt;
    if (duringMs >= SHORTEST_MEASURE_MS && completion > this.#first.tokens) {
      figures.tokensPerSecond = (completion - this.#first.tokens) / (duringMs / 1000);
    } else if (this.end && figures.totalMs > 0) {
      figures.tokensPerSecond = completion / (figures.totalMs / 1000);
    }
    return figures;
  }

  async #attempt() {
    this.problem = null;
    this.sentAt = performance.now();
    this.#enter('waiting');
    for await (const chunk of streamChat(this.#body, this.#abort.signal)) this.#take(chunk);
  }

  #take(chunk) {
    // The page shows one choice. The usage at the end comes without any.
    const choice = chunk.choices.find(({ index }) => index === 0);
    const text = choice?.delta?.content ?? '';
    const reasoning = choice?.delta?.reasoning_content ?? '';
    this.model = chunk.model ?? this.model;
    this.usage = chunk.usage ?? this.usage;
    this.end = choice?.finish_reason ?? this.end;
    if (!text && !reasoning) return;
    this.#lastAt = performance.now();
    this.#first ??= { at: this.#lastAt, tokens: this.usage?.completion_tokens ?? 1 };
    this.content += text;
    this.reasoning += reasoning;
    this.#enter('streaming');
  }

  async #waitToRetry(afterMs) {
    this.retryAt = performance.now() + afterMs;
    this.#enter('refused');
    await new Promise(resolve => {
      this.#wake = resolve;
      setTimeout(resolve, afterMs);
    });
    this.retryAt = null;
    this.#wake = () => {};
  }

  #enter(phase) {
    this.phase = phase;
    this.dispatchEvent(new Event('change'));
  }
}
