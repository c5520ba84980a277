// The list of conversations, and the search in it.

import { byId, element } from '../elements/element.js';
import { contains } from './conversation.js';
import { sessions } from './sessions.js';
import { store } from './store.js';

const DAY_MS = 24 * 3600 * 1000;

/** Keeps the list up to date. */
export function connectSidebar() {
  const search = byId('search');
  search.addEventListener('input', render);
  search.addEventListener('keydown', event => {
    if (event.key === 'Escape' && search.value) {
      event.stopPropagation();
      search.value = '';
      render();
    }
  });
  store.addEventListener('change', render);
  sessions.addEventListener('open', render);
  sessions.addEventListener('run', render);
  addEventListener('hashchange', render);
  render();
}

function render() {
  const text = byId('search').value.trim().toLowerCase();
  const found = store.newestFirst().filter(chat => !text || contains(chat, text));
  const place = byId('chats');
  const focused = document.activeElement?.getAttribute('href');
  const { scrollTop } = place;
  place.replaceChildren(...groups(found));
  place.scrollTop = scrollTop;
  if (!found.length) {
    const none = text ? 'No chat contains this.' : 'Your chats appear here.';
    place.append(element('p', { class: 'none' }, none));
  }
  if (!store.isLasting) {
    place.append(
      element(
        'p',
        { class: 'none' },
        'This browser keeps no chats: they are lost when the page closes.',
      ),
    );
  }
  // A list that changes must not take the focus from a keyboard user.
  if (focused) place.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
}

function groups(conversations) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const spans = [
    ['Today', midnight],
    ['Yesterday', midnight - DAY_MS],
    ['Last 7 days', midnight - 6 * DAY_MS],
    ['Older', -Infinity],
  ];
  let later = Infinity;
  return spans.flatMap(([name, from]) => {
    const own = conversations.filter(({ updated }) => updated >= from && updated < later);
    later = from;
    if (!own.length) return [];
    return [element('h2', {}, name), element('ul', { 'aria-label': name }, own.map(item))];
  });
}

function item(conversation) {
  const isOpen = conversation.id === sessions.current.id && location.hash !== '#/server';
  const isRunning = sessions.answerIn(conversation) !== null;
  return element(
    'li',
    {},
    element(
      'a',
      {
        href: `#/chat/${conversation.id}`,
        title: conversation.title,
        'aria-current': isOpen ? 'page' : null,
      },
      element('span', {}, conversation.title),
      isRunning ? element('span', { class: 'busy', role: 'img', 'aria-label': 'answering' }) : null,
    ),
  );
}
