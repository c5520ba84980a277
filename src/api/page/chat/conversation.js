// A conversation: a tree of messages. An edited question and a regenerated answer are siblings of
// what they replace, so nothing gets lost.
//
// Invariant: on each path, user and assistant take turns, and the user begins.

const LONGEST_TITLE = 60;

/** Returns an empty conversation. */
export function newConversation(system) {
  const now = Date.now();
  return {
    id: crypto.randomUUID?.() ?? randomId(),
    title: 'New chat',
    hasOwnTitle: false,
    created: now,
    updated: now,
    system,
    messages: {},
    head: null,
    next: 1,
  };
}

// Browsers have `randomUUID` only on pages from https or from this machine.
function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, byte => byte.toString(16).padStart(2, '0')).join('');
}

/** Returns the messages from the first one to the head. */
export function path(conversation) {
  const messages = [];
  let message = conversation.messages[conversation.head];
  while (message) {
    messages.unshift(message);
    message = conversation.messages[message.parent];
  }
  return messages;
}

/** Returns the last message of the path, or null. */
export function head(conversation) {
  return conversation.messages[conversation.head] ?? null;
}

/** Returns the versions of `message`, itself included, oldest first. */
export function versions(conversation, message) {
  const all = Object.values(conversation.messages);
  return all.filter(other => other.parent === message.parent).sort((a, b) => a.id - b.id);
}

/**
 * Adds a message below `parent` and makes it the head. `files` are `{name, text}`, which the model
 * reads before `content`.
 */
export function addMessage(conversation, parent, role, content, files = []) {
  const message = { id: conversation.next, parent, role, content, created: Date.now() };
  if (files.length) message.files = files;
  conversation.next += 1;
  conversation.messages[message.id] = message;
  conversation.head = message.id;
  if (role === 'user' && !conversation.hasOwnTitle && parent === null) {
    conversation.title = titleOf(content || (files[0]?.name ?? ''));
  }
  return message;
}

/** Adds a question. It replaces a last question that has no answer. */
export function ask(conversation, content, files) {
  const last = head(conversation);
  const parent = last?.role === 'user' ? last.parent : (last?.id ?? null);
  return addMessage(conversation, parent, 'user', content, files);
}

/** Returns the text of a message with its files, each as code under its name. */
export function wholeText({ content, files = [] }) {
  const blocks = files.map(({ name, text }) => {
    const runs = text.match(/`+/g) ?? [];
    const longest = runs.reduce((most, { length }) => Math.max(most, length), 2);
    const fence = '`'.repeat(longest + 1);
    return `${name}:\n\n${fence}\n${text.trimEnd()}\n${fence}`;
  });
  return [...blocks, ...(content ? [content] : [])].join('\n\n');
}

/** Shows `version` instead of its siblings, with the newest messages below it. */
export function showVersion(conversation, version) {
  const all = Object.values(conversation.messages);
  let message = version;
  for (;;) {
    const below = all.filter(other => other.parent === message.id);
    if (below.length === 0) break;
    message = below.reduce((a, b) => (a.id > b.id ? a : b));
  }
  conversation.head = message.id;
}

/** Removes a message that has none below it. */
export function removeLeaf(conversation, message) {
  delete conversation.messages[message.id];
  if (conversation.head === message.id) conversation.head = message.parent;
}

/** Returns the `messages` of a request whose last message is `last`. */
export function requestMessages(conversation, last) {
  const messages = path({ ...conversation, head: last.id }).map(message => ({
    role: message.role,
    content: wholeText(message),
  }));
  const system = conversation.system.trim();
  return system ? [{ role: 'system', content: system }, ...messages] : messages;
}

/** Returns whether the title or a message contains `text`, which is in lower case. */
export function contains(conversation, text) {
  const inText = value => value.toLowerCase().includes(text);
  return (
    inText(conversation.title) ||
    Object.values(conversation.messages).some(message => inText(message.content))
  );
}

function titleOf(content) {
  const line = content.trim().split('\n', 1)[0].replace(/\s+/g, ' ');
  return line.length <= LONGEST_TITLE ? line : `${line.slice(0, LONGEST_TITLE - 1).trimEnd()}…`;
}
