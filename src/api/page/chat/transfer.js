// Export to a file and import from one.

import { addMessage, newConversation, path, wholeText } from './conversation.js';

const FORMAT = 'sterna-chats';

/** Offers the conversations as a file. */
export function download(conversations, name) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  offer(text, 'application/json', name, 'json');
}

/** Offers what the reader sees of a conversation as Markdown. */
export function downloadMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  const system = conversation.system.trim();
  if (system) parts.push('## System prompt', system);
  for (const message of path(conversation)) {
    parts.push(message.role === 'user' ? '## Question' : '## Answer');
    if (message.reasoning) {
      parts.push(message.reasoning.trim().replace(/^/gm, '> '));
    }
    parts.push(wholeText(message).trim());
  }
  offer(`${parts.join('\n\n')}\n`, 'text/markdown', conversation.title, 'md');
}

function offer(text, type, name, ending) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 60) || 'chat'}.${ending}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

/**
 * Returns the conversations of a file's text: an export of this page, or an array of messages as
 * the API takes it, alone or in the field `messages`. Throws an Error that says what is wrong.
 */
export function readConversations(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error('The file is not JSON.');
  }
  if (data?.format === FORMAT) {
    if (data.version !== 1) throw new Error('A newer version of this page has written the file.');
    if (!Array.isArray(data.conversations)) throw new Error('The file has no conversations.');
    return data.conversations.map(readConversation);
  }
  const messages = Array.isArray(data) ? data : data?.messages;
  if (!Array.isArray(messages)) throw new Error('The file holds no chats.');
  return [fromMessages(messages)];
}

function readConversation(data, index) {
  const broken = what => new Error(`Chat ${index + 1} of the file has ${what}.`);
  if (typeof data?.title !== 'string' || typeof data.messages !== 'object' || !data.messages) {
    throw broken('no title or no messages');
  }
  const conversation = newConversation(typeof data.system === 'string' ? data.system : '');
  for (const message of Object.values(data.messages)) {
    const { id, parent, role } = message ?? {};
    const isOwn = Number.isSafeInteger(id) && id > 0 && !(id in conversation.messages);
    const above = data.messages[parent];
    // Parents are older than their children, so a path cannot be a circle.
    const isBelow =
      parent === null
        ? role === 'user'
        : Number.isSafeInteger(parent) &&
          parent < id &&
          above?.id === parent &&
          above.role === (role === 'user' ? 'assistant' : 'user');
    if (!isOwn || !isBelow || !['user', 'assistant'].includes(role)) {
      throw broken('messages that do not follow each other');
    }
    conversation.messages[id] = readMessage(message);
    conversation.next = Math.max(conversation.next, id + 1);
  }
  const newest = Object.keys(conversation.messages).at(-1) ?? null;
  conversation.head = data.head in conversation.messages ? data.head : newest;
  conversation.title = data.title.slice(0, 200);
  conversation.hasOwnTitle = data.hasOwnTitle === true;
  if (Number.isFinite(data.created)) conversation.created = data.created;
  if (Number.isFinite(data.updated)) conversation.updated = data.updated;
  return conversation;
}

function readMessage({ id, parent, role, content, files, created, ...answer }) {
  const { reasoning, end, figures, model } = answer;
  const text = value => (typeof value === 'string' ? value : '');
  const message = { id, parent, role, content: text(content), created: Number(created) || 0 };
  if (Array.isArray(files)) {
    message.files = files.map(file => ({ name: text(file?.name), text: text(file?.text) }));
  }
  if (reasoning) message.reasoning = text(reasoning);
  if (end) message.end = text(end);
  if (model) message.model = text(model);
  if (figures && typeof figures === 'object') {
    const numbers = Object.entries(figures).filter(([, value]) => Number.isFinite(value));
    message.figures = Object.fromEntries(numbers);
  }
  return message;
}

function fromMessages(messages) {
  const conversation = newConversation('');
  for (const { role, content } of messages) {
    if (typeof content !== 'string') throw new Error('The file has a message without text.');
    const last = conversation.messages[conversation.head];
    if (role === 'system' || role === 'developer') {
      conversation.system = content;
    } else if (role === (last?.role === 'user' ? 'assistant' : 'user')) {
      addMessage(conversation, conversation.head, role, content);
    } else {
      throw new Error('In the file, user and assistant do not take turns.');
    }
  }
  return conversation;
}
