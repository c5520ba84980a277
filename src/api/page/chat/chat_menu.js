// What the user can do with the open conversation: rename, export, delete.

import { toast } from '../elements/announce.js';
import { byId, element } from '../elements/element.js';
import { sessions } from './sessions.js';
import { store } from './store.js';
import { download, downloadMarkdown } from './transfer.js';

/** Connects the menu and the title. `openNewChat` shows an empty conversation. */
export function connectChatMenu({ openNewChat, openChat }) {
  const menu = byId('chat-menu');
  const onClick = (id, run) =>
    byId(id).addEventListener('click', () => {
      menu.hidePopover();
      run();
    });
  onClick('rename-chat', rename);
  onClick('export-chat', () => download([sessions.current], sessions.current.title));
  onClick('export-markdown', () => downloadMarkdown(sessions.current));
  onClick('delete-chat', () => {
    const conversation = sessions.current;
    sessions.answerIn(conversation)?.stop();
    store.remove(conversation.id);
    openNewChat();
    const run = () => {
      store.save(conversation);
      openChat(conversation.id);
    };
    toast('Chat deleted', { label: 'Undo', run });
  });
  byId('title').addEventListener('dblclick', rename);
}

function rename() {
  const conversation = sessions.current;
  if (!conversation.head) return;
  const title = byId('title');
  const field = element('input', {
    class: 'title-field',
    'aria-label': 'Title of this chat',
    maxlength: 200,
  });
  field.value = conversation.title;
  title.hidden = true;
  title.after(field);
  field.select();
  const end = isKept => {
    if (!field.isConnected) return;
    field.remove();
    title.hidden = false;
    const text = field.value.trim();
    if (!isKept || !text) return;
    Object.assign(conversation, { title: text, hasOwnTitle: true });
    store.save(conversation);
  };
  field.addEventListener('blur', () => end(true));
  field.addEventListener('keydown', event => {
    if (event.key !== 'Enter' && event.key !== 'Escape') return;
    event.stopPropagation();
    end(event.key === 'Enter');
    byId('box').focus();
  });
}
