// Colours code by what most languages have in common: comments, strings, numbers and keywords.

const LONGEST = 20_000;
const HASH =
  'bash|sh|shell|zsh|python|py|ruby|rb|yaml|yml|toml|r|perl|make|makefile|dockerfile|elixir';
const DASHES = 'sql|lua|haskell|hs|ada|elm';
const NONE = 'text|txt|markdown|md|output|log|csv|diff';

const KEYWORDS = `abstract and as assert async await bool boolean break case catch char class const
  continue crate def default defer del delete do double elif else elsif end enum except export
  extends false final finally float fn for foreach from func function global go goto if impl import
  in include instanceof int interface is lambda let local long loop match mod module move
  mut new nil
  none None not null nullptr of or package pass print private protected pub public raise record ref
  require return self Self short signed sizeof static string struct super switch template then this
  throw throws trait true True False try type typedef typeof union unless unsafe unsigned until use
  using val var virtual void volatile when where while with yield
  SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP
  BY ORDER LIMIT HAVING AS AND OR NOT NULL DISTINCT UNION PRIMARY KEY ALTER DROP INDEX
  select insert update table join group order echo fi done esac`.split(/\s+/);

const KINDS = ['comment', 'string', 'number', 'keyword'];
const STRING = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|` + '`(?:[^`\\\\]|\\\\.)*`?';
const NUMBER = String.raw`\b0[xX][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b`;
const WORDS = String.raw`\b(?:${KEYWORDS.join('|')})\b`;

function commentsOf(language) {
  const is = names => new RegExp(`^(?:${names})$`).test(language);
  if (is(HASH)) return String.raw`(?<!\S)#[^\n]*|"""[\s\S]*?(?:"""|$)`;
  if (is(DASHES)) return String.raw`--[^\n]*|/\*[\s\S]*?(?:\*/|$)`;
  if (/^(?:html|xml|svg|vue)$/.test(language)) return String.raw`<!--[\s\S]*?(?:-->|$)`;
  if (language === 'json') return '(?!)';
  return String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`;
}

/** Returns `code` in pieces `{kind, text}`; `kind` is a class of the style sheet or null. */
export function highlight(code, language) {
  const name = language.toLowerCase();
  const isPlain = !name || new RegExp(`^(?:${NONE})$`).test(name) || code.length > LONGEST;
  if (isPlain) return [{ kind: null, text: code }];
  const groups = [commentsOf(name), STRING, NUMBER, WORDS].map(pattern => `(${pattern})`);
  const pieces = [];
  let end = 0;
  for (const match of code.matchAll(new RegExp(groups.join('|'), 'g'))) {
    if (match.index > end) pieces.push({ kind: null, text: code.slice(end, match.index) });
    const group = match.slice(1).findIndex(text => text !== undefined);
    pieces.push({ kind: KINDS[group], text: match[0] });
    end = match.index + match[0].length;
  }
  if (end < code.length) pieces.push({ kind: null, text: code.slice(end) });
  return pieces;
}
