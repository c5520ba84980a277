// The view of a server that embeds texts: a form that ranks texts by how close they are to a query.

import { explain } from '../api/problems.js';
import { embed } from '../api/requests.js';
import { serverState } from '../api/server_state.js';
import { announce } from '../elements/announce.js';
import { byId, element, growWithText } from '../elements/element.js';
import { count, duration } from '../elements/numbers.js';

const MOST_TEXTS = 100;
const QUERY = 'How do birds find their way?';
const TEXTS = [
  'Arctic terns fly from pole to pole and back each year.',
  'Migrating birds follow the sun, the stars and the magnetic field of the Earth.',
  'The train from Bern to Milan takes three hours.',
].join('\n');

/** Shows the form in `#embed-view`. */
export class EmbedView {
  #heading = element('h2');
  #query = element('textarea', { id: 'embed-query', rows: 1 });
  #texts = element('textarea', { id: 'embed-texts', rows: 5 });
  #compare = element('button', { type: 'submit', class: 'button primary' }, 'Compare');
  #result = element('div', { class: 'result', role: 'status' });

  constructor() {
    this.#query.value = QUERY;
    this.#texts.value = TEXTS;
    const onSubmit = event => {
      event.preventDefault();
      this.#rank();
    };
    const field = (input, label) =>
      element('div', { class: 'field' }, element('label', { for: input.id }, label), input);
    byId('embed-view').append(
      element(
        'div',
        { class: 'embed' },
        this.#heading,
        element(
          'p',
          {},
          'It turns a text into numbers, so that texts with a similar meaning are close to each ',
          'other. Programs ask for them at ',
          element('code', {}, 'POST /v1/embeddings'),
          '.',
        ),
        element(
          'form',
          { on: { submit: onSubmit } },
          field(this.#query, 'Query'),
          field(this.#texts, 'Texts, one in each line'),
          element('div', { class: 'buttons' }, this.#compare),
        ),
        this.#result,
      ),
    );
    growWithText(this.#query);
    growWithText(this.#texts);
    serverState.addEventListener('change', () => this.#showModel());
  }

  #showModel() {
    const { model } = serverState;
    if (model) this.#heading.textContent = `${model.id} embeds texts`;
  }

  async #rank() {
    const query = this.#query.value.trim();
    const texts = this.#texts.value.split('\n').filter(line => line.trim());
    if (!query || !texts.length || texts.length > MOST_TEXTS) {
      const most = `Enter a query and 1 to ${MOST_TEXTS} texts.`;
      this.#result.replaceChildren(element('p', { class: 'problem' }, most));
      return;
    }
    this.#compare.disabled = true;
    const start = performance.now();
    try {
      const answer = await embed([query, ...texts]);
      this.#show(texts, answer, performance.now() - start);
    } catch (error) {
      const { title, detail } = explain(error, true);
      this.#result.replaceChildren(
        element('div', { class: 'card' }, element('strong', {}, title), element('p', {}, detail)),
      );
    }
    this.#compare.disabled = false;
  }

  #show(texts, { data, usage }, tookMs) {
    const [ofQuery, ...others] = data.map(({ embedding }) => embedding);
    // Embeddings have length 1, so the sum of products is the cosine of their angle.
    const similarity = other => other.reduce((sum, value, at) => sum + value * ofQuery[at], 0);
    const ranked = texts
      .map((text, index) => ({ text, similarity: similarity(others[index]) }))
      .sort((a, b) => b.similarity - a.similarity);
    const item = ({ text, similarity: value }) =>
      element(
        'li',
        {},
        element('b', {}, value.toFixed(3)),
        element('meter', { min: 0, max: 1, value, 'aria-hidden': 'true' }),
        element('span', {}, text),
      );
    const figures = [
      `${count(ofQuery.length)} dimensions`,
      `${count(usage.prompt_tokens)} tokens`,
      duration(tookMs),
    ];
    this.#result.replaceChildren(
      element('h3', {}, 'Cosine similarity to the query'),
      element('ol', {}, ranked.map(item)),
      element('p', { class: 'figures' }, figures.join(' · ')),
    );
    announce(`The closest text: ${ranked[0].text}`);
  }
}
