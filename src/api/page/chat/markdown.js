// Reads Markdown into blocks and spans. HTML in the text has no meaning here: it is text.
//
// Blocks: `heading`, `code`, `formula`, `quote`, `list`, `table`, `rule` and `paragraph`. Spans:
// strings, and objects of the types `code`, `formula`, `strong`, `emphasis`, `both` (strong and
// emphasis), `deleted`, `link` and `break`.

const DEEPEST = 8; // Deeper quotes, lists and emphasis are text.
const FENCE = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const FORMULA = /^\s*(?:\$\$|\\\[)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;

/** Returns the blocks of `text`. Each has its `source`, so that a view can tell what changed. */
export function parseMarkdown(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, '\n').split('\n');
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = parseBlock(lines, at, depth);
    block.source = lines.slice(at, end).join('\n');
    blocks.push(block);
    at = end;
  }
  return blocks;
}

// Returns the block that begins at line `at`, and the line after it.
function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return parseCode(lines, at, fence);
  const formula = FORMULA.test(line) ? parseFormula(lines, at) : null;
  if (formula) return formula;
  const heading = HEADING.exec(line);
  if (heading) {
    const title = (heading[2] ?? '').trim().replace(/ #+$/, '');
    return [{ type: 'heading', level: heading[1].length, spans: parseSpans(title) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: 'rule' }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return parseQuote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return parseList(lines, at, depth);
  if (isTable(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at, depth);
}

function parseCode(lines, at, match) {
  const fence = match[1] ?? match[3];
  const [language] = (match[2] ?? match[4]).trim().split(/\s/, 1);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join('\n');
  return [{ type: 'code', language, text }, Math.min(end + 1, lines.length)];
}

// Returns a formula that fills its lines, or null. It has no empty line, its end is there, and no
// other one begins before it, so each line is looked at once.
function parseFormula(lines, at) {
  const isBracketed = lines[at].trimStart().startsWith('\\[');
  const close = isBracketed ? '\\]' : '$$';
  const own = [lines[at].trimStart().slice(2)];
  for (let end = at + 1; ; end += 1) {
    const last = own.at(-1);
    const found = last.indexOf(close);
    if (found >= 0) {
      const text = [...own.slice(0, -1), last.slice(0, found)].join('\n').trim();
      return text && !last.slice(found + 2).trim() ? [{ type: 'formula', text }, end] : null;
    }
    if (!lines[end]?.trim() || (isBracketed && FORMULA.test(lines[end]))) return null;
    own.push(lines[end]);
  }
}

function parseQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const text = lines
    .slice(at, end)
    .map(line => line.replace(QUOTE, ''))
    .join('\n');
  return [{ type: 'quote', blocks: parseMarkdown(text, depth + 1) }, end];
}

function parseList(lines, at, depth) {
  const [, blanks, marker] = ITEM.exec(lines[at]);
  const margin = widthOf(blanks);
  const isOrdered = /\d/.test(marker);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const start = ITEM.exec(lines[end]);
    const isOurs =
      start &&
      widthOf(start[1]) <= margin + 1 &&
      /\d/.test(start[2]) === isOrdered &&
      !RULE.test(lines[end]);
    if (!isOurs) break;
    const indent = start[0].length;
    const own = [lines[end].slice(indent)];
    end += 1;
    while (end < lines.length && continuesItem(lines, end, widthOf(start[1]))) {
      const before = lines[end].length - lines[end].trimStart().length;
      own.push(lines[end].slice(Math.min(before, indent)));
      end += 1;
    }
    items.push(parseItem(own.join('\n'), depth));
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next < lines.length && ITEM.test(lines[next])) end = next; // Blank lines between items.
  }
  return [{ type: 'list', isOrdered, first: Number.parseInt(marker, 10) || 1, items }, end];
}

// Returns the width of spaces and tabs.
function widthOf(blanks) {
  return blanks.replaceAll('\t', '    ').length;
}

// Returns whether a line belongs to the item that begins in column `margin`.
function continuesItem(lines, at, margin) {
  const isInside = line => widthOf(/^[ \t]*/.exec(line)[0]) > margin + 1;
  if (lines[at].trim()) {
    return isInside(lines[at]) || (lines[at - 1].trim() !== '' && isPlain(lines[at]));
  }
  return at + 1 < lines.length && lines[at + 1].trim() !== '' && isInside(lines[at + 1]);
}

function isPlain(line) {
  return ![FENCE, FORMULA, HEADING, RULE, QUOTE, ITEM].some(start => start.test(line));
}

function parseItem(text, depth) {
  const task = /^\[([ xX])\] /.exec(text);
  const blocks = parseMarkdown(task ? text.slice(4) : text, depth + 1);
  return { isDone: task ? task[1] !== ' ' : null, blocks };
}

function isTable(lines, at) {
  if (!lines[at].includes('|') || !lines[at + 1]?.includes('-')) return false;
  const delimiters = cells(lines[at + 1]);
  return (
    delimiters.every(cell => /^:?-+:?$/.test(cell)) && delimiters.length === cells(lines[at]).length
  );
}

function parseTable(lines, at) {
  const alignments = cells(lines[at + 1]).map(cell => {
    if (cell.endsWith(':')) return cell.startsWith(':') ? 'center' : 'right';
    return 'left';
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes('|')) end += 1;
  const row = line => alignments.map((_, index) => parseSpans(cells(line)[index] ?? ''));
  const rows = lines.slice(at + 2, end).map(row);
  return [{ type: 'table', alignments, header: row(lines[at]), rows }, end];
}

function cells(line) {
  const inner = line
    .trim()
    .replace(/^\|/, '')
    .replace(/(?<!\\)\|$/, '');
  return inner.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll('\\|', '|'));
}

function parseParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  const text = lines
    .slice(at, end)
    .map(line => line.trimStart())
    .join('\n')
    .trimEnd();
  return [{ type: 'paragraph', spans: parseSpans(text) }, end];
}

function interrupts(lines, at, depth) {
  const line = lines[at];
  const nests = depth < DEEPEST && (QUOTE.test(line) || /^ *(?:[-*+]|1[.)]) +\S/.test(line));
  const isOther = [FENCE, FORMULA, HEADING, RULE].some(start => start.test(line));
  return nests || isOther || isTable(lines, at);
}

const ESCAPED = /[!-/:-@[-`{-~]/;
const LINK =
  /\[([^[\]\n]{1,500})\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"\n]*")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`|\\]+[^\s<>"'`|\\.,;:!?)\]}*_~]/y;
const PLAIN = /[^\\\n`[!h*_~$]+|([`*_~$])\1*|[^]/y;
const MARKS = [
  ['***', 'both'],
  ['**', 'strong'],
  ['__', 'strong'],
  ['~~', 'deleted'],
  ['*', 'emphasis'],
  ['_', 'emphasis'],
];

/** Returns the spans of the text of a paragraph. */
export function parseSpans(text, depth = 0) {
  const spans = [];
  const unclosed = new Set(); // Marks that have no end from here on, so nobody searches again.
  let plain = '';
  let at = 0;
  const take = (span, end) => {
    if (plain) spans.push(plain);
    plain = '';
    spans.push(span);
    at = end;
  };
  while (at < text.length) {
    const found = parseSpan(text, at, depth, unclosed);
    if (found) {
      take(found.span, found.end);
    } else if (text[at] === '\\' && ESCAPED.test(text[at + 1] ?? '')) {
      plain += text[at + 1];
      at += 2;
    } else {
      PLAIN.lastIndex = at;
      plain += PLAIN.exec(text)[0];
      at = PLAIN.lastIndex;
    }
  }
  if (plain) spans.push(plain);
  return spans;
}

function parseSpan(text, at, depth, unclosed) {
  switch (text[at]) {
    case '\n':
      return { span: { type: 'break' }, end: at + 1 };
    case '`':
      return parseCodeSpan(text, at, unclosed);
    case '$':
      return parseDollars(text, at, unclosed);
    case '\\':
      return parseBracketed(text, at, unclosed);
    case '[':
      return parseLink(text, at, depth);
    case '!':
      return text[at + 1] === '[' ? parseLink(text, at + 1, depth) : null;
    case 'h':
      return parseAddress(text, at);
    case '*':
    case '_':
    case '~':
      return parseMarked(text, at, depth, unclosed);
    default:
      return null;
  }
}

function parseCodeSpan(text, at, unclosed) {
  let length = 1;
  while (text[at + length] === '`') length += 1;
  const fence = '`'.repeat(length);
  if (unclosed.has(fence)) return null;
  let end = text.indexOf(fence, at + length);
  while (end >= 0 && text[end + length] === '`') {
    let skip = end;
    while (text[skip] === '`') skip += 1;
    end = text.indexOf(fence, skip);
  }
  if (end < 0) {
    unclosed.add(fence);
    return null;
  }
  const code = text.slice(at + length, end).replaceAll('\n', ' ');
  const isPadded = /^ .*[^ ].* $/.test(code);
  return { span: { type: 'code', text: isPadded ? code.slice(1, -1) : code }, end: end + length };
}

// `$x$` and `$$x$$`. As in Pandoc, text stands close to the dollars, and no digit follows, so that
// prices stay text. A code span between single dollars has a dollar of its own, such as `$PATH`.
function parseDollars(text, at, unclosed) {
  const mark = text[at + 1] === '$' ? '$$' : '$';
  if (unclosed.has(mark)) return null;
  const start = at + mark.length;
  if (mark === '$' && !/\S/.test(text[start] ?? ' ')) return null;
  for (let end = text.indexOf(mark, start); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isEnd = mark === '$$' || (/[^\s\\]/.test(text[end - 1]) && !/\d/.test(text[end + 1]));
    if (!isEnd) continue;
    const formula = text.slice(start, end);
    return mark === '$' && formula.includes('`') ? null : formulaSpan(formula, end + mark.length);
  }
  unclosed.add(mark);
  return null;
}

// `\(x\)` and `\[x\]`.
function parseBracketed(text, at, unclosed) {
  const close = { '(': '\\)', '[': '\\]' }[text[at + 1]];
  if (!close || unclosed.has(close)) return null;
  const end = text.indexOf(close, at + 2);
  if (end >= 0) return formulaSpan(text.slice(at + 2, end), end + 2);
  unclosed.add(close);
  return null;
}

function formulaSpan(text, end) {
  return text.trim() ? { span: { type: 'formula', text: text.trim() }, end } : null;
}

// An image becomes a link, because the page loads nothing from other hosts.
function parseLink(text, at, depth) {
  LINK.lastIndex = at;
  const match = depth < DEEPEST ? LINK.exec(text) : null;
  const address = match && safeAddress(match[2]);
  if (!address) return null;
  const spans = parseSpans(match[1], DEEPEST);
  return { span: { type: 'link', address, spans }, end: LINK.lastIndex };
}

function parseAddress(text, at) {
  if (at > 0 && /\w/.test(text[at - 1])) return null;
  ADDRESS.lastIndex = at;
  const address = ADDRESS.exec(text)?.[0];
  if (!address || !safeAddress(address)) return null;
  return { span: { type: 'link', address, spans: [address] }, end: at + address.length };
}

/** Returns the address if following it can run no script, otherwise null. */
function safeAddress(address) {
  try {
    const { protocol, href } = new URL(address);
    return ['http:', 'https:', 'mailto:'].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

function parseMarked(text, at, depth, unclosed) {
  if (depth >= DEEPEST) return null;
  for (const [mark, type] of MARKS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const start = at + mark.length;
    const isWordInside = mark[0] === '_' && at > 0 && /\w/.test(text[at - 1]);
    if (isWordInside || !/\S/.test(text[start] ?? ' ') || text[start] === mark[0]) continue;
    const end = closingMark(text, start, mark);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    return {
      span: { type, spans: parseSpans(text.slice(start, end), depth + 1) },
      end: end + mark.length,
    };
  }
  return null;
}

function closingMark(text, start, mark) {
  for (let end = text.indexOf(mark, start); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isLonger = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const isInWord = mark[0] === '_' && /\w/.test(text[end + mark.length] ?? ' ');
    if (
      end > start &&
      /\S/.test(text[end - 1]) &&
      text[end - 1] !== '\\' &&
      !isLonger &&
      !isInWord
    ) {
      return end;
    }
  }
  return -1;
}
