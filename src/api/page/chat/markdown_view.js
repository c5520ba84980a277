// Shows Markdown as elements. It builds nodes and never reads text as HTML.

import { copy } from '../elements/announce.js';
import { element, icon, mathElement } from '../elements/element.js';
import { highlight } from './highlight.js';
import { parseMarkdown } from './markdown.js';
import { parseTex } from './tex.js';

/** A text that may grow. Blocks that did not change keep their elements, and so a selection. */
export class MarkdownView {
  node = element('div', { class: 'markdown' });
  #sources = [];

  /** Shows `text`. */
  show(text) {
    const blocks = parseMarkdown(text);
    const same = blocks.findIndex((block, index) => block.source !== this.#sources[index]);
    const kept = same < 0 ? blocks.length : same;
    while (this.node.children.length > kept) this.node.lastChild.remove();
    this.node.append(...blocks.slice(kept).map(buildBlock));
    this.#sources = blocks.map(block => block.source);
  }
}

function buildBlock(block) {
  switch (block.type) {
    // The page has headings of the first two levels.
    case 'heading':
      return element(`h${Math.min(block.level + 2, 6)}`, {}, buildSpans(block.spans));
    case 'code':
      return buildCode(block);
    case 'formula':
      return buildFormula(block);
    case 'quote':
      return element('blockquote', {}, block.blocks.map(buildBlock));
    case 'list':
      return buildList(block);
    case 'table':
      return buildTable(block);
    case 'rule':
      return element('hr');
    default:
      return element('p', {}, buildSpans(block.spans));
  }
}

function buildSpans(spans) {
  return spans.map(span => {
    if (typeof span === 'string') return span;
    switch (span.type) {
      case 'break':
        return element('br');
      case 'code':
        return element('code', {}, span.text);
      case 'formula':
        return formula(span.text, 'inline');
      case 'link':
        return element(
          'a',
          {
            href: span.address,
            target: '_blank',
            rel: 'noopener noreferrer nofollow',
          },
          buildSpans(span.spans),
        );
      case 'both':
        return element('strong', {}, element('em', {}, buildSpans(span.spans)));
      default:
        return element(
          { strong: 'strong', emphasis: 'em', deleted: 'del' }[span.type],
          {},
          buildSpans(span.spans),
        );
    }
  });
}

function buildList({ isOrdered, first, items }) {
  const start = isOrdered && first !== 1 ? { start: first } : {};
  return element(
    isOrdered ? 'ol' : 'ul',
    start,
    items.map(({ isDone, blocks }) => {
      const item = element('li');
      if (isDone !== null) {
        const label = isDone ? 'Done' : 'Not done';
        item.append(
          element('input', {
            type: 'checkbox',
            disabled: true,
            checked: isDone,
            'aria-label': label,
          }),
        );
      }
      // A paragraph alone would stand apart from its bullet.
      for (const block of blocks) {
        item.append(
          ...(block.type === 'paragraph' ? buildSpans(block.spans) : [buildBlock(block)]),
        );
      }
      return item;
    }),
  );
}

function buildTable({ alignments, header, rows }) {
  const row = (cells, tag) =>
    element(
      'tr',
      {},
      cells.map((spans, column) => element(tag, { class: alignments[column] }, buildSpans(spans))),
    );
  const table = element(
    'table',
    {},
    element('thead', {}, row(header, 'th')),
    element(
      'tbody',
      {},
      rows.map(cells => row(cells, 'td')),
    ),
  );
  return element(
    'div',
    { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Table' },
    table,
  );
}

function buildFormula({ text }) {
  return element(
    'div',
    { class: 'formula' },
    element(
      'div',
      { tabindex: 0, role: 'region', 'aria-label': 'Formula' },
      formula(text, 'block'),
    ),
    copyButton(text, 'Copy this formula'),
  );
}

// A longer formula is shown as its text: it is none, or would make the page slow.
const MAX_FORMULA = 20_000;

function formula(text, display) {
  if (text.length > MAX_FORMULA) return element('code', {}, text);
  const build = ([tag, attributes, ...children]) =>
    mathElement(
      tag,
      attributes,
      ...children.map(child => (typeof child === 'string' ? child : build(child))),
    );
  return mathElement('math', { display }, ...parseTex(text).map(build));
}

function buildCode({ language, text }) {
  const pieces = highlight(text, language).map(({ kind, text: piece }) =>
    kind ? element('span', { class: kind }, piece) : piece,
  );
  const pre = element(
    'pre',
    { tabindex: 0, role: 'region', 'aria-label': 'Code' },
    element('code', {}, pieces),
  );
  return element(
    'div',
    { class: 'code' },
    element(
      'header',
      {},
      element('span', {}, language || 'text'),
      copyButton(text, 'Copy this code'),
    ),
    pre,
  );
}

function copyButton(text, name) {
  const label = element('span');
  // The name has the visible text, so that who speaks to the browser can say what they see.
  const show = (visible, full) => {
    label.textContent = visible;
    button.setAttribute('aria-label', full);
  };
  const onClick = async () => {
    if (!(await copy(text))) return;
    show('Copied', 'Copied');
    setTimeout(() => show('Copy', name), 1500);
  };
  const button = element('button', { type: 'button', on: { click: onClick } }, icon('copy'), label);
  show('Copy', name);
  return button;
}
