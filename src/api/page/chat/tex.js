// Reads formulas of TeX, as models write them, into a tree for MathML. It knows what is common in
// answers. A command that it does not know becomes its own text.
//
// A node is an array: the tag, the attributes, and then child nodes or one string.

const DEEPEST = 32; // What is nested deeper is left out.

// Names of commands and what they stand for.
const LETTERS = tableOf(`
  alpha α  beta β  gamma γ  delta δ  epsilon ϵ  varepsilon ε  zeta ζ  eta η  theta θ  vartheta ϑ
  iota ι  kappa κ  lambda λ  mu μ  nu ν  xi ξ  pi π  varpi ϖ  rho ρ  varrho ϱ  sigma σ  varsigma ς
  tau τ  upsilon υ  phi ϕ  varphi φ  chi χ  psi ψ  omega ω  Gamma Γ  Delta Δ  Theta Θ  Lambda Λ
  Xi Ξ  Pi Π  Sigma Σ  Upsilon Υ  Phi Φ  Psi Ψ  Omega Ω  hbar ℏ  ell ℓ  Re ℜ  Im ℑ  aleph ℵ
  partial ∂  infty ∞  emptyset ∅  varnothing ∅  imath ı  jmath ȷ  top ⊤  bot ⊥  degree °`);
const OPERATORS = tableOf(`
  times ×  div ÷  cdot ⋅  pm ±  mp ∓  ast ∗  star ⋆  circ ∘  bullet ∙  oplus ⊕  otimes ⊗  odot ⊙
  wedge ∧  land ∧  vee ∨  lor ∨  cap ∩  cup ∪  setminus ∖  neg ¬  lnot ¬  le ≤  leq ≤  leqslant ≤
  ge ≥  geq ≥  geqslant ≥  ne ≠  neq ≠  equiv ≡  approx ≈  sim ∼  simeq ≃  cong ≅  propto ∝  ll ≪
  gg ≫  prec ≺  succ ≻  in ∈  notin ∉  ni ∋  subset ⊂  subseteq ⊆  supset ⊃  supseteq ⊇  mid ∣
  nmid ∤  parallel ∥  perp ⊥  vdash ⊢  models ⊨  forall ∀  exists ∃  nexists ∄  nabla ∇  to →
  rightarrow →  leftarrow ←  gets ←  leftrightarrow ↔  Rightarrow ⇒  Leftarrow ⇐  Leftrightarrow ⇔
  implies ⟹  impliedby ⟸  iff ⟺  mapsto ↦  longrightarrow ⟶  longleftarrow ⟵  uparrow ↑
  downarrow ↓  hookrightarrow ↪  rightharpoonup ⇀  rightleftharpoons ⇌  ldots …  dots …  dotsc …
  cdots ⋯  dotsb ⋯  vdots ⋮  ddots ⋱  prime ′  angle ∠  triangle △  square □  therefore ∴
  because ∵  colon :  checkmark ✓  dagger †  langle ⟨  rangle ⟩  lfloor ⌊  rfloor ⌋  lceil ⌈
  rceil ⌉  lvert |  rvert |  vert |  lVert ‖  rVert ‖  Vert ‖  lbrace {  rbrace }  lbrack [
  rbrack ]  backslash \\  { {  } }  | ‖  % %  $ $  # #  & &  _ _`);
/** Operators with limits above and below them. */
const LARGE = tableOf(`
  sum ∑  prod ∏  coprod ∐  bigcup ⋃  bigcap ⋂  bigoplus ⨁  bigotimes ⨂  bigvee ⋁  bigwedge ⋀`);
const INTEGRALS = { int: '∫', iint: '∬', iiint: '∭', oint: '∮' };
const FUNCTIONS = new RegExp(
  '^(?:(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|log|ln|lg|exp|deg|dim|ker|hom|arg|Pr)$',
);
const LIMITS = /^(?:lim|liminf|limsup|max|min|sup|inf|det|gcd|argmax|argmin)$/;
const ACCENTS = tableOf(`
  hat ^  widehat ^  bar ¯  overline ¯  tilde ~  widetilde ~  vec →  overrightarrow →  dot ˙
  ddot ¨  overbrace ⏞`);
const ACCENTS_BELOW = { underline: '_', underbrace: '⏟' };
const SPACES = {
  ',': 0.17,
  ':': 0.22,
  '>': 0.22,
  ';': 0.28,
  '!': 0,
  ' ': 0.28,
  quad: 1,
  qquad: 2,
  thinspace: 0.17,
  enspace: 0.5,
};
/** Commands about looks that MathML decides by itself. */
const SKIPPED =
  /^(?:(?:display|text|script)style|(?:no)?limits|[bB]igg?[lrm]?|nonumber|notag|hline|middle)$/;
/** The first letters of an alphabet of Unicode: capitals, small letters and digits. */
const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, 0x1d7d8],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
  boldsymbol: [0x1d400, 0x1d41a, 0x1d7ce],
  bm: [0x1d400, 0x1d41a, 0x1d7ce],
  mathcal: [0x1d49c, 0x1d4b6, null],
  mathscr: [0x1d49c, 0x1d4b6, null],
  mathfrak: [0x1d504, 0x1d51e, null],
};
/** Letters that Unicode had before their alphabets. */
const EARLIER = {
  mathbb: { C: 'ℂ', H: 'ℍ', N: 'ℕ', P: 'ℙ', Q: 'ℚ', R: 'ℝ', Z: 'ℤ' },
  mathcal: { B: 'ℬ', E: 'ℰ', F: 'ℱ', H: 'ℋ', I: 'ℐ', L: 'ℒ', M: 'ℳ', R: 'ℛ', e: 'ℯ', g: 'ℊ' },
  mathfrak: { C: 'ℭ', H: 'ℌ', I: 'ℑ', R: 'ℜ', Z: 'ℨ' },
};
EARLIER.mathscr = EARLIER.mathcal;
const TEXTS =
  /^(?:text|textrm|textbf|textit|texttt|mathrm|mathsf|mathtt|mathit|operatorname|mbox|hbox)$/;
/** The brackets of environments of rows. Other environments have none. */
const BRACKETS = {
  pmatrix: ['(', ')'],
  bmatrix: ['[', ']'],
  Bmatrix: ['{', '}'],
  vmatrix: ['|', '|'],
  Vmatrix: ['‖', '‖'],
  cases: ['{', ''],
};
const TOKEN = /\\(?:(?:operatorname|tag|hspace|vspace)\*|[A-Za-z]+|[^])|\s+|\d+(?:[.,]\d+)*|[^]/gu;

/** Returns the nodes of a formula. */
export function parseTex(source) {
  return new Reader(source.match(TOKEN) ?? []).until(0, () => false);
}

function tableOf(text) {
  const words = text.trim().split(/\s+/);
  const pairs = words.flatMap((word, index) => (index % 2 ? [] : [[word, words[index + 1]]]));
  return Object.fromEntries(pairs);
}

const node = (tag, ...children) => [tag, {}, ...children];
const operator = (text, attributes = {}) => ['mo', attributes, text];
const row = nodes => (nodes.length === 1 ? nodes[0] : node('mrow', ...nodes));
const fence = text => operator(text, { fence: 'true', stretchy: 'true' });

function table(rows, kind) {
  const cell = nodes => node('mtd', ...nodes);
  return ['mtable', { class: kind }, ...rows.map(cells => node('mtr', ...cells.map(cell)))];
}

class Reader {
  #tokens;
  #at = 0;

  constructor(tokens) {
    this.#tokens = tokens;
  }

  /** Returns the nodes until `isEnd` is true of a token, and skips that one. */
  until(depth, isEnd) {
    const rows = this.#rows(depth, isEnd);
    return rows.length === 1 && rows[0].length === 1 ? rows[0][0] : [table(rows, 'align')];
  }

  // Reads cells until `isEnd` is true of a token, and skips that one.
  #rows(depth, isEnd) {
    const rows = [[[]]];
    for (;;) {
      const token = this.#peek();
      if (token === undefined) break;
      if (isEnd(token)) {
        this.#at += 1;
        break;
      }
      if (token === '&' || token === '\\\\' || token === '\\cr') {
        this.#at += 1;
        if (token === '&') {
          rows.at(-1).push([]);
        } else {
          rows.push([[]]);
          // The height of the row, as in `\\[6pt]`.
          const next = this.#tokens.slice(this.#at, this.#at + 8);
          if (next[0] === '[' && next.includes(']')) this.#at += next.indexOf(']') + 1;
        }
        continue;
      }
      rows
        .at(-1)
        .at(-1)
        .push(...this.#scripted(depth));
    }
    if (rows.length > 1 && rows.at(-1).flat().length === 0) rows.pop(); // After a last `\\`.
    return rows;
  }

  #peek() {
    while (/^\s/.test(this.#tokens[this.#at] ?? '')) this.#at += 1;
    return this.#tokens[this.#at];
  }

  #next() {
    const token = this.#peek();
    this.#at += 1;
    return token;
  }

  // Reads an atom with what stands above and below it. Returns no node or one.
  #scripted(depth) {
    const isBare = ['^', '_'].includes(this.#peek());
    const base = isBare ? node('mrow') : this.#atom(depth);
    const scripts = {};
    let primes = '';
    for (;;) {
      const mark = this.#peek();
      if (mark === "'") {
        this.#at += 1;
        primes += '′';
      } else if (mark === '\\limits' || mark === '\\nolimits') {
        this.#at += 1;
      } else if ((mark === '^' || mark === '_') && !scripts[mark]) {
        this.#at += 1;
        scripts[mark] = this.#argument(depth + 1);
      } else {
        break;
      }
    }
    if (primes) scripts['^'] = row([operator(primes), ...(scripts['^'] ? [scripts['^']] : [])]);
    const { '^': above, _: below } = scripts;
    if (!base) return [];
    if (!above && !below) return [base];
    const hasLimits = base[1].movablelimits || base[1].class === 'limits';
    const [both, over, under] = hasLimits
      ? ['munderover', 'mover', 'munder']
      : ['msubsup', 'msup', 'msub'];
    if (above && below) return [node(both, base, below, above)];
    return [above ? node(over, base, above) : node(under, base, below)];
  }

  // Reads what stands in braces, or one atom.
  #argument(depth) {
    const token = this.#peek();
    if (token === undefined || token === '}' || token === '&') return node('mrow');
    if (/^\d./.test(token)) {
      this.#tokens[this.#at] = token.slice(1); // Without braces, an argument is one digit.
      return node('mn', token[0]);
    }
    return this.#atom(depth) ?? node('mrow');
  }

  #atom(depth) {
    const token = this.#next();
    if (token === undefined) return null;
    if (depth > DEEPEST) return null;
    if (token === '{') return row(this.until(depth + 1, other => other === '}'));
    if (token === '~') return space(0.28);
    if (token === '}') return null;
    if (/^\d/.test(token)) return node('mn', token);
    if (/^\p{L}/u.test(token)) return node('mi', token);
    if (token[0] !== '\\') return operator(token === '-' ? '−' : token, flat(token));
    return this.#command(token.slice(1), depth + 1);
  }

  #command(full, depth) {
    const name = /^[A-Za-z]/.test(full) ? full.replace('*', '') : full;
    const known = table => (Object.hasOwn(table, name) ? table[name] : undefined);
    if (known(LETTERS)) return node('mi', LETTERS[name]);
    if (known(OPERATORS)) return operator(OPERATORS[name], flat(OPERATORS[name]));
    if (known(LARGE)) return operator(LARGE[name], { largeop: 'true', movablelimits: 'true' });
    if (known(INTEGRALS)) return operator(INTEGRALS[name], { largeop: 'true' });
    if (FUNCTIONS.test(name)) return node('mi', name);
    if (LIMITS.test(name)) return operator(name, { movablelimits: 'true' });
    if (known(SPACES) !== undefined) return space(SPACES[name]);
    if (SKIPPED.test(name)) return null;
    if (known(ACCENTS)) {
      const accent = operator(ACCENTS[name], { stretchy: String(name.length > 5) });
      const kind = name === 'overbrace' ? { class: 'limits' } : { accent: 'true' };
      return ['mover', kind, this.#argument(depth), accent];
    }
    if (known(ACCENTS_BELOW)) {
      const accent = operator(ACCENTS_BELOW[name], { stretchy: 'true' });
      return ['munder', { class: 'limits' }, this.#argument(depth), accent];
    }
    if (known(ALPHABETS)) return inAlphabet(this.#argument(depth), name);
    if (TEXTS.test(name)) return this.#text(name);
    return this.#structure(name, depth);
  }

  #structure(name, depth) {
    switch (name) {
      case 'frac':
      case 'dfrac':
      case 'tfrac':
      case 'cfrac':
        return node('mfrac', this.#argument(depth), this.#argument(depth));
      case 'binom':
        return node(
          'mrow',
          fence('('),
          ['mfrac', { linethickness: '0' }, this.#argument(depth), this.#argument(depth)],
          fence(')'),
        );
      case 'sqrt': {
        if (this.#peek() !== '[') return node('msqrt', this.#argument(depth));
        this.#at += 1;
        const index = row(this.until(depth, token => token === ']'));
        return node('mroot', this.#argument(depth), index);
      }
      case 'left': {
        const open = delimiter(this.#next());
        const inside = this.until(depth, token => token === '\\right');
        return node('mrow', fence(open), ...inside, fence(delimiter(this.#next())));
      }
      case 'overset':
      case 'stackrel': {
        const above = this.#argument(depth);
        return node('mover', this.#argument(depth), above);
      }
      case 'underset': {
        const below = this.#argument(depth);
        return node('munder', this.#argument(depth), below);
      }
      case 'boxed':
        return ['mrow', { class: 'boxed' }, this.#argument(depth)];
      case 'tag':
        return node('mtext', `\u2003(${this.#raw()})`);
      case 'label':
        this.#raw();
        return null;
      case 'pmod':
        return node(
          'mrow',
          operator('('),
          node('mi', 'mod'),
          space(0.28),
          this.#argument(depth),
          operator(')'),
        );
      case 'bmod':
      case 'mod':
        return node('mi', 'mod');
      case 'not':
        return operator(`${this.#argument(depth).at(-1)}\u0338`);
      case 'begin':
        return this.#environment(depth);
      case 'end':
        this.#raw();
        return null;
      default:
        return node('mtext', `\\${name}`);
    }
  }

  #environment(depth) {
    const name = this.#raw().replace('*', '');
    const brackets = Object.hasOwn(BRACKETS, name) ? BRACKETS[name] : ['', ''];
    if (name === 'array') this.#raw(); // The alignments of the columns.
    const rows = this.#rows(depth, token => token === '\\end');
    this.#raw();
    const isAligned = /^(?:align|split|gather|equation)/.test(name);
    const inside = table(rows, isAligned ? 'align' : name === 'cases' ? 'cases' : null);
    const [open, close] = brackets.map(bracket => (bracket ? [fence(bracket)] : []));
    return node('mrow', ...open, inside, ...close);
  }

  #text(name) {
    const text = this.#raw();
    if (name === 'operatorname') return node('mi', text);
    const kinds = { textbf: 'bold', textit: 'italic', texttt: 'mono', mathtt: 'mono' };
    return ['mtext', { class: kinds[name] ?? null }, text.replace(/^ | $/g, '\u00a0')];
  }

  // Returns the text in braces as it is.
  #raw() {
    if (this.#peek() !== '{') return this.#next() ?? '';
    this.#at += 1;
    let text = '';
    for (let open = 1; this.#at < this.#tokens.length; this.#at += 1) {
      const token = this.#tokens[this.#at];
      if (token === '{') open += 1;
      if (token === '}') open -= 1;
      if (open === 0) break;
      text += /^\\[^A-Za-z]/.test(token) ? token.slice(1) : token;
    }
    this.#at += 1;
    return text;
  }
}

// Brackets that nobody made larger keep their size.
function flat(text) {
  return /^[()[\]{}|‖⟨⟩⌊⌋⌈⌉/]$/.test(text) ? { stretchy: 'false' } : {};
}

function space(width) {
  return ['mspace', { width: `${width}em` }];
}

function delimiter(token = '.') {
  if (token === '.') return '';
  if (token[0] !== '\\') return token;
  const name = token.slice(1);
  return Object.hasOwn(OPERATORS, name) ? OPERATORS[name] : '';
}

// Returns the node with its letters in another alphabet.
function inAlphabet([tag, attributes, ...children], name) {
  const changed = children.map(child =>
    typeof child === 'string' ? lettersOf(child, name) : inAlphabet(child, name),
  );
  return [tag, attributes, ...changed];
}

function lettersOf(text, name) {
  const [capital, small, digit] = ALPHABETS[name];
  return text.replace(/[A-Za-z0-9]/g, letter => {
    const earlier = EARLIER[name]?.[letter];
    if (earlier) return earlier;
    const [first, base] = /[A-Z]/.test(letter)
      ? [capital, 'A']
      : /[a-z]/.test(letter)
        ? [small, 'a']
        : [digit, '0'];
    if (first === null) return letter;
    return String.fromCodePoint(first + letter.charCodeAt(0) - base.charCodeAt(0));
  });
}
