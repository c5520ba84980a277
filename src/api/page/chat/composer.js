// The message box with its files, its Send and Stop buttons, and how full the context is.

import { serverState } from '../api/server_state.js';
import { toast } from '../elements/announce.js';
import { byId, element, growWithText, icon, iconButton } from '../elements/element.js';
import { count } from '../elements/numbers.js';
import { path } from './conversation.js';
import { sessions } from './sessions.js';

/** The server takes bodies of 2 MiB, and a body has the whole chat. */
const MOST_FILE_BYTES = 1024 * 1024;

const drafts = new Map(); // Unsent texts and files by conversation: `{text, files}`.

/** Connects the message box. `toEnd` scrolls to the newest message, `editLast` edits a question. */
export function connectComposer({ toEnd, editLast }) {
  const [form, box, send, stop] = ['composer', 'box', 'send', 'stop'].map(byId);
  let drafted = sessions.current.id;
  let files = []; // `{name, text}`.
  growWithText(box);

  function update() {
    const isRunning = sessions.answerIn(sessions.current) !== null;
    const hadFocus = document.activeElement === send || document.activeElement === stop;
    send.hidden = isRunning;
    stop.hidden = !isRunning;
    send.disabled = !box.value.trim() && !files.length;
    if (hadFocus && document.activeElement === document.body) box.focus();
    showContext();
  }

  form.addEventListener('submit', event => {
    event.preventDefault();
    const text = box.value.trim();
    if ((!text && !files.length) || sessions.answerIn(sessions.current)) return;
    const sent = files;
    box.value = '';
    attach([]);
    box.dispatchEvent(new Event('input'));
    sessions.send(text, sent);
    toEnd();
  });
  function attach(now) {
    files = now;
    byId('attached').replaceChildren(
      ...files.map(file =>
        element(
          'span',
          { class: 'attachment' },
          icon('file'),
          element('span', {}, file.name),
          iconButton('close', `Remove ${file.name}`, () => {
            attach(files.filter(other => other !== file));
            box.focus();
          }),
        ),
      ),
    );
    update();
  }
  const chooser = byId('attach-file');
  byId('attach').addEventListener('click', () => chooser.click());
  chooser.addEventListener('change', async () => {
    const conversation = drafted;
    const chosen = [...chooser.files];
    chooser.value = '';
    const read = (await Promise.all(chosen.map(readText))).filter(file => file !== null);
    if (drafted === conversation) attach(read.reduce(withFile, files));
    box.focus();
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
    drafts.set(drafted, { text: box.value, files });
    drafted = sessions.current.id;
    const draft = drafts.get(drafted) ?? { text: '', files: [] };
    box.value = draft.text;
    attach(draft.files);
  });
  serverState.addEventListener('change', update);
  update();
}

// Returns a file with its text, or null if it is no text or too large. Then a note says so.
async function readText(file) {
  const { name, size } = file;
  if (size > MOST_FILE_BYTES) {
    toast(`${name} is larger than 1 MiB, so it is not attached.`);
    return null;
  }
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes('\0')) return { name, text };
  } catch {
    // Bytes that are not UTF-8.
  }
  toast(`${name} is not a text file, so it is not attached.`);
  return null;
}

/** Returns `files` with one more, if a body has room for all of them. */
function withFile(files, file) {
  const size = [...files, file].reduce((sum, { text }) => sum + new Blob([text]).size, 0);
  if (size <= MOST_FILE_BYTES) return [...files, file];
  toast(`With ${file.name}, the files are larger than 1 MiB, so it is not attached.`);
  return files;
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
