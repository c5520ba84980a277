// Starts the page: which view is shown, the bar above it, the keys and the state of the server.

import { serverState } from './api/server_state.js';
import { connectChatMenu } from './chat/chat_menu.js';
import { ChatView } from './chat/chat_view.js';
import { connectComposer } from './chat/composer.js';
import { followEnd } from './chat/follow.js';
import { sessions } from './chat/sessions.js';
import { connectSidebar } from './chat/sidebar.js';
import { store } from './chat/store.js';
import { toast } from './elements/announce.js';
import { byId, element, placeIcons } from './elements/element.js';
import { EmbedView } from './embed/embed_view.js';
import { ServerView } from './server/server_view.js';
import { openSettings } from './settings/settings_view.js';

const SERVER = '#/server';
const CHAT = '#/chat/';

/** What the page says about a server that does not accept requests. */
const BANNERS = {
  loading: ['The server is loading its model. It answers soon.', ''],
  draining: [
    'The server is shutting down. It finishes running answers and accepts no new ones.',
    '',
  ],
  failed: ['The server’s engine has failed. Only a restart of the server helps.', 'bad'],
  unreachable: ['The server is not reachable. The page tries again by itself.', 'bad'],
};
const STATES = {
  unknown: 'Connecting',
  ready: 'Ready',
  loading: 'Loading',
  draining: 'Shutting down',
  failed: 'Failed',
  unreachable: 'Not reachable',
};

placeIcons(document);
await store.open();
const { toEnd } = followEnd({
  scroller: byId('scroller'),
  content: byId('messages'),
  button: byId('jump'),
  isChat: () => sessions.current.head !== null,
});
const serverView = new ServerView();
new EmbedView();
const openNewChat = () => go('#/');
const chatView = new ChatView({
  toEnd,
  openSettings,
  newChat: openNewChat,
  send: text => {
    sessions.send(text);
    toEnd();
    byId('box').focus();
  },
});
connectComposer({ toEnd, editLast: () => chatView.editLast() });
connectSidebar();
connectChatMenu({ openNewChat, openChat: id => go(CHAT + id) });
connectKeys();
connectDrawer();

addEventListener('hashchange', showPlace);
sessions.addEventListener('run', () => {
  // The first message gives a conversation its address, so that a reload finds it.
  const address = CHAT + sessions.current.id;
  const isShown = sessions.current.head !== null && location.hash !== SERVER;
  if (isShown && location.hash !== address) history.replaceState(null, '', address);
  showBar();
});
store.addEventListener('change', ({ detail: { id, isFromOtherTab } }) => {
  const { current } = sessions;
  const concernsCurrent = isFromOtherTab && (id === null || id === current.id);
  if (concernsCurrent && !sessions.answerIn(current)) {
    if (store.all.has(current.id)) sessions.refresh();
    else sessions.open();
  }
  showBar();
});
store.addEventListener('failure', () =>
  toast('The browser could not store this chat. Export it to keep it.'),
);
serverState.addEventListener('change', showServerState);
serverState.addEventListener('change', showView);
for (const id of ['open-settings', 'open-settings-2']) {
  byId(id).addEventListener('click', () => {
    closeDrawer();
    openSettings();
  });
}
byId('new-chat').addEventListener('click', openNewChat);
document.querySelector('.skip').addEventListener('click', event => {
  event.preventDefault();
  byId('box').focus();
});

serverState.watch();
showPlace();
chatView.render();

// Opens a place by its address, also if the page is there already. It opens at once: after
// `location.hash = …` the event comes later, and would replace a chat whose message is sent before.
function go(address) {
  if (location.hash !== address) history.pushState(null, '', address);
  showPlace();
}

function showView() {
  const isServer = location.hash === SERVER;
  const { embeds } = serverState.abilities;
  document.body.classList.toggle('embeds', embeds);
  byId('chat-view').hidden = isServer || embeds;
  byId('embed-view').hidden = isServer || !embeds;
  byId('server-view').hidden = !isServer;
  showBar();
}

function showPlace() {
  closeDrawer();
  const isServer = location.hash === SERVER;
  byId('open-server').toggleAttribute('aria-current', isServer);
  if (isServer) serverView.show();
  else serverView.hide();
  if (!isServer) {
    const id = location.hash.startsWith(CHAT) ? location.hash.slice(CHAT.length) : null;
    if (id !== sessions.current.id || !store.all.has(id)) sessions.open(id);
  }
  showView();
  if (!isServer && matchMedia('(hover: hover)').matches) byId('box').focus();
}

function showBar() {
  const isServer = location.hash === SERVER;
  const { title, head } = sessions.current;
  const { embeds } = serverState.abilities;
  const text = isServer ? 'Live server' : embeds ? 'Compare texts' : title;
  byId('title').textContent = text;
  byId('chat-menu-button').hidden = isServer || !head;
  document.title = text === 'New chat' ? 'Sterna' : `${text} · Sterna`;
}

function showServerState() {
  const { state, model, problem } = serverState;
  const pill = byId('server-state');
  pill.dataset.state = state;
  const name = state === 'ready' && model ? model.id : STATES[state];
  pill.title = model ? `${STATES[state]}: ${model.id}` : STATES[state];
  pill.replaceChildren(
    element('span', { class: 'dot' }),
    element('span', { class: 'name' }, name),
    element('span', { class: 'visually-hidden' }, STATES[state]),
  );
  let [text, tone] = BANNERS[state] ?? ['', ''];
  if (state === 'ready' && problem?.code === 'invalid_api_key') {
    text = problem.hadKey
      ? 'This API key is not valid. Check it in the settings.'
      : 'This server requires an API key. Enter yours in the settings.';
  } else if (state === 'ready' && (problem || !model)) {
    text = problem?.message ?? 'Your API key may not use the model of this server.';
  }
  const banner = byId('banner');
  banner.hidden = !text;
  banner.dataset.tone = tone;
  if (banner.textContent !== text) banner.textContent = text;
}

function connectKeys() {
  addEventListener('keydown', event => {
    const isCommand = event.ctrlKey || event.metaKey;
    if (event.key === 'Escape' && !document.querySelector('dialog[open], :popover-open')) {
      if (document.body.classList.contains('sidebar-open')) closeDrawer();
      else sessions.answerIn(sessions.current)?.stop();
    } else if (isCommand && event.shiftKey && event.key.toLowerCase() === 'o') {
      event.preventDefault();
      openNewChat();
    } else if (isCommand && !event.shiftKey && event.key.toLowerCase() === 'k') {
      event.preventDefault();
      openDrawer();
      byId('search').focus();
    }
  });
}

// On a phone the list of chats is a drawer over the page.
function connectDrawer() {
  byId('open-sidebar').addEventListener('click', openDrawer);
  byId('close-sidebar').addEventListener('click', closeDrawer);
  byId('scrim').addEventListener('click', closeDrawer);
}

function openDrawer() {
  if (!isPhone()) return;
  document.body.classList.add('sidebar-open');
  byId('stage').inert = true;
  byId('open-sidebar').setAttribute('aria-expanded', 'true');
  byId('close-sidebar').focus();
}

function closeDrawer() {
  if (!document.body.classList.contains('sidebar-open')) return;
  document.body.classList.remove('sidebar-open');
  byId('stage').inert = false;
  byId('open-sidebar').setAttribute('aria-expanded', 'false');
  if (document.activeElement === document.body) byId('open-sidebar').focus();
}

function isPhone() {
  return matchMedia('(max-width: 52rem)').matches;
}
