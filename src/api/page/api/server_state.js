// Watches whether the server accepts requests, and which model it serves.

import { checkReady, fetchAbilities, fetchModels } from './requests.js';

const CALM_MS = 10_000;
const WORRIED_MS = 2_000;
const NO_ABILITIES = { embeds: false, reasons: false };

/** Tells listeners of `change` what state the server is in. */
class ServerState extends EventTarget {
  /** `unknown`, `ready`, `loading`, `draining`, `failed` or `unreachable`. */
  state = 'unknown';
  /** The models that the key may use, as `/v1/models` lists them. */
  models = [];
  /** Whether the model embeds texts, and whether it can reason before it answers. */
  abilities = NO_ABILITIES;
  /** Why the models are unknown, or null. */
  problem = null;
  #timer = 0;
  #modelsAreKnown = false;

  /** The served model, or null. */
  get model() {
    return this.models[0] ?? null;
  }

  /** Starts to watch. A hidden page asks nothing. */
  watch() {
    document.addEventListener('visibilitychange', () => this.look());
    addEventListener('online', () => this.look());
    addEventListener('offline', () => this.look());
    this.look();
  }

  /** Asks now, for example after a request has failed. */
  async look() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const before = this.state;
    this.state = await this.#readiness();
    if (this.state === 'ready' && !this.#modelsAreKnown) await this.#fetchModels();
    // After a restart the server may serve another model.
    if (this.state !== 'ready' && this.state !== 'draining') this.#modelsAreKnown = false;
    if (this.state !== before) this.dispatchEvent(new Event('change'));
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.look(), this.state === 'ready' ? CALM_MS : WORRIED_MS);
  }

  /** Asks for the models again, because the key has changed. */
  async refreshModels() {
    this.#modelsAreKnown = false;
    await this.look();
    this.dispatchEvent(new Event('change'));
  }

  async #readiness() {
    try {
      await checkReady(AbortSignal.timeout(8000));
      return 'ready';
    } catch (error) {
      if (error.code === 'loading' || error.code === 'draining') return error.code;
      return error.code === 'engine_dead' ? 'failed' : 'unreachable';
    }
  }

  async #fetchModels() {
    try {
      const models = await fetchModels();
      // A proxy may let only the models through. Then the page offers what needs no ability.
      const abilities = models.length ? fetchAbilities().catch(() => NO_ABILITIES) : NO_ABILITIES;
      this.abilities = await abilities;
      this.models = models;
      this.problem = null;
    } catch (error) {
      this.models = [];
      this.problem = error;
    }
    this.#modelsAreKnown = true;
    this.dispatchEvent(new Event('change'));
  }
}

export const serverState = new ServerState();
