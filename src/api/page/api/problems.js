// What a failed request means for the reader, and what they can do.

/** The codes after which the same request may succeed later. */
const PASSING = new Set([
  'rate_limit_exceeded',
  'concurrency_limit',
  'engine_overloaded',
  'too_many_connections',
  'loading',
  'draining',
]);

/** Returns whether the page may send the request again by itself. */
export function isPassing(problem) {
  return PASSING.has(problem.code) && problem.retryAfterMs !== null;
}

/**
 * Returns the title and the details of a problem, and which of the actions `edit`, `key` and `new`
 * help beside sending the request again.
 */
export function explain(problem, isFirstMessage) {
  const detail = problem.message;
  switch (problem.code) {
    case 'invalid_api_key':
      return problem.hadKey
        ? {
            title: 'This API key is not valid',
            detail: 'Check it in the settings.',
            actions: ['key'],
          }
        : {
            title: 'This server requires an API key',
            detail: 'Enter yours in the settings.',
            actions: ['key'],
          };
    case 'tenant_key_required':
    case 'model_not_allowed':
      return { title: 'Your API key may not do this', detail, actions: ['key'] };
    case 'context_length_exceeded':
      return isFirstMessage
        ? { title: 'This message is too long for the model', detail, actions: ['edit'] }
        : {
            title: 'This chat no longer fits into the model’s context',
            detail,
            actions: ['edit', 'new'],
          };
    case 'request_too_large':
      return { title: 'This message is too large for the server', detail, actions: ['edit'] };
    case 'rate_limit_exceeded':
      return { title: 'Your rate limit is used up', detail, actions: [] };
    case 'concurrency_limit':
      return { title: 'You have too many requests at once', detail, actions: [] };
    case 'engine_overloaded':
    case 'too_many_connections':
      return { title: 'The server is full', detail, actions: [] };
    case 'loading':
      return { title: 'The server is loading its model', detail, actions: [] };
    case 'draining':
      return { title: 'The server is shutting down', detail, actions: [] };
    case 'deadline_exceeded':
      return { title: 'The answer took too long', detail, actions: [] };
    case 'unreachable':
      return {
        title: 'The server is not reachable',
        detail: 'Check that it runs, then send the message again.',
        actions: [],
      };
    case 'lost':
      return {
        title: 'The connection was lost',
        detail: 'It ended before the server sent a token.',
        actions: [],
      };
    default:
      return {
        title: 'The server refused this request',
        detail,
        actions: problem.status === 400 ? ['edit'] : [],
      };
  }
}
