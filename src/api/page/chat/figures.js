// The figures of an answer.

import { element } from '../elements/element.js';
import { count, duration, rate } from '../elements/numbers.js';

/** Returns the list of an answer's figures. */
export function figureList(figures) {
  const entry = (value, text, meaning) =>
    element('li', { title: meaning }, element('b', {}, value), text);
  const entries = [];
  if (figures.firstTokenMs !== undefined) {
    entries.push(
      entry(
        duration(figures.firstTokenMs),
        ' to first token',
        'Time from sending the question to the first token, as this browser saw it.',
      ),
    );
  }
  if (figures.tokensPerSecond !== undefined) {
    entries.push(
      entry(
        rate(figures.tokensPerSecond),
        ' tokens/s',
        'Tokens a second after the first one. For a short answer, tokens divided by all its time.',
      ),
    );
  }
  if (figures.completionTokens !== undefined) {
    entries.push(entry(count(figures.completionTokens), ' tokens', 'Tokens of the answer.'));
  }
  if (figures.promptTokens !== undefined) {
    const cached =
      figures.cachedTokens === undefined ? '' : `, ${count(figures.cachedTokens)} cached`;
    entries.push(
      entry(
        count(figures.promptTokens),
        ` in the prompt${cached}`,
        'Tokens of the chat so far. The server had computed the cached ones before.',
      ),
    );
  }
  return element('ul', { class: 'figures', 'aria-label': 'Figures of this answer' }, entries);
}
