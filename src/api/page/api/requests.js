// Requests to the server, and their failures as `ApiProblem`.

import { apiKey } from '../settings/settings.js';

/** A request that failed. `code` is the API's, or `unreachable`, `lost` or `unknown`. */
export class ApiProblem extends Error {
  constructor({ status = 0, code = 'unknown', message, retryAfterMs = null, hadKey = false }) {
    super(message);
    Object.assign(this, { status, code, retryAfterMs, hadKey });
  }
}

/** Fetches `path`. Throws an `ApiProblem`, or an AbortError if `signal` aborts. */
async function send(path, { key = apiKey(), ...options } = {}) {
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, {
      ...options,
      cache: 'no-store',
      headers: { ...options.headers, ...authorization },
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiProblem({ code: 'unreachable', message: 'The server is not reachable.' });
  }
  if (!response.ok) throw await problemOf(response, Boolean(key));
  return response;
}

async function problemOf(response, hadKey) {
  const { status } = response;
  const after = retryAfterMs(response.headers);
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy may answer with something other than the API's JSON.
  }
  const message = error.message ?? `The server answered with status ${status}.`;
  return new ApiProblem({ status, code: error.code, message, retryAfterMs: after, hadKey });
}

function retryAfterMs(headers) {
  const exact = Number.parseFloat(headers.get('retry-after-ms'));
  const seconds = Number.parseFloat(headers.get('retry-after'));
  if (Number.isFinite(exact)) return exact;
  return Number.isFinite(seconds) ? seconds * 1000 : null;
}

/** Returns the models that the key may use. */
export async function fetchModels() {
  const response = await send('v1/models');
  return (await response.json()).data;
}

/**
 * Returns what the model can do: `embeds` texts instead of answering, or `reasons` before it
 * answers.
 */
export async function fetchAbilities() {
  const [info, props] = await Promise.all(['model_info', 'props'].map(path => send(path)));
  const { is_generation: answers } = await info.json();
  const { chat_template: template } = await props.json();
  // The templates of models that reason name the tags around the reasoning.
  return { embeds: !answers, reasons: /<\/?think>/.test(template) };
}

/** Returns the embeddings of `input`, an array of texts, as the API answers. */
export async function embed(input) {
  const response = await send('v1/embeddings', {
    method: 'POST',
    body: JSON.stringify({ input }),
    headers: { 'content-type': 'application/json' },
  });
  return response.json();
}

/** Returns the text of the metrics. `key` is the admin's, or the user's own if it is empty. */
export async function fetchMetrics(key, signal) {
  const response = await send('metrics', { signal, ...(key ? { key } : {}) });
  return response.text();
}

/** Returns the samples of the server's last minutes. `key` is as for `fetchMetrics`. */
export async function fetchRecentMetrics(key, signal) {
  const response = await send('metrics/recent', { signal, ...(key ? { key } : {}) });
  return (await response.json()).samples;
}

/** Fails unless the server accepts requests. Needs no key. */
export async function checkReady(signal) {
  await send('ready', { signal, key: '' });
}

/** Streams the answer to a chat: yields the chunks of the API. */
export async function* streamChat(body, signal) {
  const response = await send('v1/chat/completions', {
    method: 'POST',
    signal,
    body: JSON.stringify(body),
    headers: { 'content-type': 'application/json' },
  });
  for await (const data of eventData(response.body)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiProblem(chunk.error);
    yield chunk;
  }
  throw lost();
}

function lost() {
  return new ApiProblem({ code: 'lost', message: 'The connection ended before the answer did.' });
}

/** Yields the data of each server-sent event. Skips comments, which keep the connection open. */
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === 'AbortError' ? error : lost();
    }
    if (part.done) return;
    const events = (rest + part.value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith('data: ')) yield event.slice('data: '.length);
    }
  }
}
