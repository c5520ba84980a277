// One message of the conversation, with what the reader can do to it.

import { copy, toast } from '../elements/announce.js';
import { element, growWithText, icon, iconButton, textButton } from '../elements/element.js';
import { wholeText } from './conversation.js';
import { figureList } from './figures.js';
import { MarkdownView } from './markdown_view.js';

/** Why an answer ended before the model's own end. */
const END_NOTES = {
  length: 'The answer is cut off: it reached the longest answer or the end of the context.',
  stopped: 'You stopped this answer.',
  lost: 'The connection ended before the answer did.',
  reload: 'Not complete: the page that asked has closed, or another tab still receives the answer.',
};

/** Returns the element of a question. `actions` has `edit` and `show`. */
export function userMessage(message, versions, actions) {
  const buttons = element(
    'div',
    { class: 'actions' },
    iconButton('copy', 'Copy the question', () => copyMessage(wholeText(message))),
    iconButton('pencil', 'Edit the question', () => actions.edit(message)),
  );
  return element(
    'article',
    { class: 'message user', 'data-id': message.id },
    element('h2', { class: 'visually-hidden' }, 'You'),
    element('div', { class: 'bubble' }, (message.files ?? []).map(attachedFile), message.content),
    buttons,
    versionSwitch(message, versions, actions.show),
  );
}

function attachedFile({ name, text }) {
  return element(
    'details',
    { class: 'file' },
    element('summary', {}, icon('file'), name),
    element('pre', { tabindex: 0, role: 'region', 'aria-label': name }, text),
  );
}

/** An answer, finished or growing. */
export class AnswerView {
  node = element(
    'article',
    { class: 'message assistant' },
    element('h2', { class: 'visually-hidden' }, 'Answer'),
  );
  #markdown = new MarkdownView();
  #reasoning = null;
  #hasText = false;
  #liveFigures = null;

  /** Shows the text so far. */
  grow(content, reasoning) {
    if (reasoning) this.#showReasoning(reasoning, !content);
    if (!content) return;
    if (!this.#hasText) {
      this.node.append(this.#markdown.node);
      if (this.#liveFigures) this.node.append(this.#liveFigures);
    }
    this.#hasText = true;
    this.#markdown.show(content);
  }

  /** Shows the figures so far. */
  showFigures(figures) {
    const foot = element('div', { class: 'foot' }, figureList(figures));
    if (this.#liveFigures) this.#liveFigures.replaceWith(foot);
    else this.node.append(foot);
    this.#liveFigures = foot;
  }

  /**
   * Shows a whole answer, with its figures and actions. `actions` has `regenerate`, `show` and,
   * for the last answer of the chat, `resume`.
   */
  finish(message, versions, actions, context) {
    this.node.dataset.id = message.id;
    this.#liveFigures?.remove();
    this.grow(message.content, message.reasoning);
    const note = endNote(message, context);
    if (note) this.node.append(element('p', { class: 'note' }, note));
    const buttons = endButtons(message, actions, context);
    if (buttons.length) this.node.append(element('div', { class: 'buttons' }, buttons));
    this.node.append(
      element(
        'div',
        { class: 'foot' },
        element(
          'div',
          { class: 'actions' },
          iconButton('copy', 'Copy the answer', () => copyMessage(message.content)),
          iconButton('retry', 'Regenerate the answer', () => actions.regenerate(message)),
        ),
        versionSwitch(message, versions, actions.show),
        figureList(message.figures ?? {}),
      ),
    );
  }

  // Folded, with its end in view while the model still reasons.
  #showReasoning(text, isReasoning) {
    if (!this.#reasoning) {
      const label = element('span');
      const view = new MarkdownView();
      const node = element(
        'details',
        { class: 'reasoning' },
        element('summary', {}, icon('chevron'), label),
        view.node,
      );
      this.#reasoning = { label, view };
      this.node.querySelector('h2').after(node);
    }
    this.#reasoning.label.textContent = isReasoning ? 'Reasoning…' : 'Reasoning';
    this.#reasoning.view.show(text);
  }
}

function endNote({ end, figures, problem }, context) {
  if (problem) return `The answer is not complete. ${problem}`;
  if (end !== 'length') return END_NOTES[end];
  if (!context || !usedTokens(figures)) return END_NOTES.length;
  return usedTokens(figures) >= context
    ? 'The answer is cut off: this chat fills the model’s context. Start a new chat.'
    : 'The answer is cut off: it reached the longest answer of the settings.';
}

// Returns what helps if the last answer of the chat is not complete.
function endButtons(message, { resume, regenerate }, context) {
  const { content, end, figures, problem } = message;
  if (!resume || (end === 'stop' && !problem)) return [];
  const buttons = [];
  // Reasoning alone is no text that a model could continue.
  const isFull = context && usedTokens(figures) >= context;
  if (content && !isFull && (end in END_NOTES || problem)) {
    buttons.push(textButton('Continue', () => resume(message), 'primary'));
  }
  if (problem || end === 'lost' || end === 'reload') {
    buttons.push(textButton('Send again', () => regenerate(message)));
  }
  return buttons;
}

function usedTokens(figures) {
  return (figures?.promptTokens ?? 0) + (figures?.completionTokens ?? 0);
}

function versionSwitch(message, versions, show) {
  if (versions.length < 2) return null;
  const at = versions.findIndex(version => version.id === message.id);
  const step = (name, label, to) =>
    iconButton(name, label, () => show(versions[to]), {
      disabled: to < 0 || to >= versions.length,
    });
  return element(
    'div',
    { class: 'versions', role: 'group', 'aria-label': 'Versions' },
    step('previous', 'Previous version', at - 1),
    element('span', {}, `${at + 1} / ${versions.length}`),
    step('next', 'Next version', at + 1),
  );
}

async function copyMessage(text) {
  if (await copy(text)) toast('Copied');
}

/** Returns an editor for a question. `onSend` gets the new text. */
export function questionEditor(text, onSend, onCancel) {
  const field = element('textarea', { 'aria-label': 'Edit the question', rows: 2 });
  field.value = text;
  growWithText(field);
  const send = () => {
    if (field.value.trim()) onSend(field.value.trim());
  };
  field.addEventListener('keydown', event => {
    if (event.key === 'Escape') {
      event.stopPropagation();
      onCancel();
    } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  return element(
    'div',
    { class: 'editor' },
    field,
    element(
      'div',
      { class: 'buttons' },
      textButton('Cancel', onCancel),
      textButton('Send', send, 'primary'),
    ),
  );
}
