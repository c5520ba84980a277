// The message box, its Send and Stop buttons, and how full the context is.

import { serverState } from '../api/server_state.js';
import { byId, element, growWithText } from '../elements/element.js';
import { count } from '../elements/numbers.js';
import { path } from './conversation.js';
import { sessions } from './sessions.js';

const drafts = new Map(); // Unsent texts by conversation.

/** Connects the message box. `toEnd` scrolls to the newest message, `editLast` edits a question. */
export function connectComposer({ toEnd, editLast }) {
  const [form, box, send, stop] = ['composer', 'box', 'send', 'stop'].map(byId);
  let drafted = sessions.current.id;
  growWithText(box);

  function update() {
    const isRunning = sessions.answerIn(sessions.current) !== null;
    const hadFocus = document.activeElement === send || document.activeElement === stop;
    send.hidden = isRunning;
    stop.hidden = !isRunning;
    send.disabled = !box.value.trim();
    if (hadFocus && document.activeElement === document.body) box.focus();
    showContext();
  }

  form.addEventListener('submit', event => {
    event.preventDefault();
    const text = box.value.trim();
    if (!text || sessions.answerIn(sessions.current)) return;
    box.value = '';
    box.dispatchEvent(new Event('input'));
    sessions.send(text);
    toEnd();
  });
  box.addEventListener('input', update);
  box.addEventListener('keydown', event => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === 'ArrowUp' && !box.value) {
      event.preventDefault();
      editLast();
    }
  });
  stop.addEventListener('click', () => {
    sessions.answerIn(sessions.current)?.stop();
    box.focus();
  });
  sessions.addEventListener('run', update);
  sessions.addEventListener('open', () => {
    drafts.set(drafted, box.value);
    drafted = sessions.current.id;
    box.value = drafts.get(drafted) ?? '';
    update();
  });
  serverState.addEventListener('change', update);
  update();
}

function showContext() {
  const figures = path(sessions.current).findLast(message => message.figures)?.figures;
  const used = (figures?.promptTokens ?? 0) + (figures?.completionTokens ?? 0);
  const limit = serverState.model?.max_model_len;
  const place = byId('context');
  place.replaceChildren();
  if (!used || !limit) return;
  const text = `${count(used)} of ${count(limit)} tokens`;
  const attributes = { min: 0, max: limit, high: limit * 0.85, value: used };
  place.title = 'How much of the model’s context this chat fills';
  place.append(
    element('meter', { ...attributes, 'aria-label': 'Context', 'aria-hidden': 'true' }),
    text,
  );
}
