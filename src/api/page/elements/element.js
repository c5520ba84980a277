// Builds elements. A string always becomes a text node, so no text is ever read as HTML.

const SVG = 'http://www.w3.org/2000/svg';
const MATH = 'http://www.w3.org/1998/Math/MathML';

/** Returns an element. `on` holds listeners; null, undefined and false leave an attribute out. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns an element of a drawing. */
export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Returns an element of a formula. */
export function mathElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(MATH, tag), attributes, children);
}

function fill(node, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? '' : value);
  }
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}

/** Returns the element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

// The outlines of the icons, in a square of 24 units.
const OUTLINES = {
  check: 'M5 12.5l4.5 4.5L19 7.5',
  chart: 'M4 19.5h16M7 16v-5M12 16V5M17 16V9',
  chevron: 'M9 6l6 6-6 6',
  close: 'M6 6l12 12M18 6L6 18',
  copy: 'M9 9h10v10H9zM5 15V5h10',
  down: 'M12 5v14M6 13l6 6 6-6',
  download: 'M12 4v11M7 10.5l5 5 5-5M5 20h14',
  clip: 'M8 12.5l6-6a3 3 0 0 1 4.2 4.2l-8 8a4.6 4.6 0 0 1-6.5-6.5L12 4',
  file: 'M7 4h7l4 4v12H7zM14 4v4h4M10 13h5M10 16.5h5',
  menu: 'M4 7h16M4 12h16M4 17h16',
  more: 'M6 12h.01M12 12h.01M18 12h.01',
  next: 'M10 7l5 5-5 5',
  pencil: 'M5 19l1-4L16 5l3 3L9 18l-4 1zM14 7l3 3',
  plus: 'M12 5v14M5 12h14',
  previous: 'M14 7l-5 5 5 5',
  retry: 'M5 12a7 7 0 1 1 2.2 5.1M5 12V7M5 12h5',
  search: 'M11 5a6 6 0 1 1 0 12 6 6 0 0 1 0-12zM15.5 15.5L20 20',
  sliders: 'M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4',
  trash: 'M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7',
  up: 'M12 19V5M6 11l6-6 6 6',
  upload: 'M12 15.5V4.5M7 9l5-5 5 5M5 20h14',
};
const SHAPES = {
  square:
    'M7.5 6h9A1.5 1.5 0 0 1 18 7.5v9a1.5 1.5 0 0 1-1.5 1.5h-9A1.5 1.5 0 0 1 6 ' +
    '16.5v-9A1.5 1.5 0 0 1 7.5 6z',
  tern:
    'M1 6.8c5-.6 8.2 1.2 11 4.8 2.8-3.6 6-5.4 11-4.8-4 1.4-6.6 3.6-8 6.9l-1.4 6' +
    '-1.6-3.7-1.6 3.7-1.4-6C7.6 10.4 5 8.2 1 6.8z',
};

/** Returns an icon. A screen reader skips it, so its button needs a name. */
export function icon(name) {
  const shape = SHAPES[name];
  const attributes = { class: shape ? 'icon filled' : 'icon', viewBox: '0 0 24 24' };
  const path = svgElement('path', { d: shape ?? OUTLINES[name] });
  if (name === 'more') path.setAttribute('stroke-width', '2.75');
  return svgElement('svg', { ...attributes, 'aria-hidden': 'true', focusable: 'false' }, path);
}

/** Puts the icons into the elements that name one in `data-icon`. */
export function placeIcons(root) {
  for (const holder of root.querySelectorAll('[data-icon]')) {
    holder.prepend(icon(holder.dataset.icon));
    delete holder.dataset.icon;
  }
}

/** Returns a button with an icon and, for screen readers and as a tooltip, a name. */
export function iconButton(name, label, onClick, attributes = {}) {
  return element(
    'button',
    {
      type: 'button',
      class: 'icon-button small',
      'aria-label': label,
      title: label,
      on: { click: onClick },
      ...attributes,
    },
    icon(name),
  );
}

/** Makes a field as high as its text, in browsers whose style sheets cannot. */
export function growWithText(field) {
  if (CSS.supports('field-sizing', 'content')) return;
  const grow = () => {
    field.style.height = 'auto';
    field.style.height = `${field.scrollHeight}px`;
  };
  field.addEventListener('input', grow);
  requestAnimationFrame(grow);
}

/** Returns a button with a text. */
export function textButton(label, onClick, kind = '') {
  return element(
    'button',
    {
      type: 'button',
      class: `button ${kind}`.trim(),
      on: { click: onClick },
    },
    label,
  );
}
