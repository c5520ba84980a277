// Messages beside the conversation: for screen readers, and short notes with an undo button.

import { byId, element } from './element.js';

const TOAST_MS = 7000;

/** Lets a screen reader read `text` when it has time. */
export function announce(text) {
  const place = byId('announcer');
  if (place.textContent !== text) place.textContent = text;
}

/** Shows a note for some seconds, with at most one action such as "Undo". */
export function toast(text, action = null) {
  const note = element('div', { class: 'toast', role: 'status' }, element('span', {}, text));
  const remove = () => note.remove();
  if (action) {
    const run = () => {
      remove();
      action.run();
    };
    note.append(element('button', { type: 'button', on: { click: run } }, action.label));
  }
  byId('toasts').replaceChildren(note);
  setTimeout(remove, TOAST_MS);
}

/** Copies `text` and says so. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer the clipboard only to pages from https or from this machine.
    if (!copySelected(text)) {
      toast('The browser does not let this page copy. Select the text and copy it.');
      return false;
    }
  }
  announce('Copied');
  return true;
}

// The old way, which works on pages from http too.
function copySelected(text) {
  const { activeElement } = document;
  const field = element('textarea', { class: 'visually-hidden', 'aria-hidden': 'true' });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand('copy');
  field.remove();
  activeElement?.focus();
  return isCopied;
}
