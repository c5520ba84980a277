// The open conversation: its messages, the answer that grows, or the questions to begin with.

import { serverState } from '../api/server_state.js';
import { announce } from '../elements/announce.js';
import { byId, element, icon } from '../elements/element.js';
import { path, showVersion, versions } from './conversation.js';
import { examplesFor } from './examples.js';
import { AnswerView, questionEditor, userMessage } from './message_view.js';
import { sessions } from './sessions.js';
import { Progress, countdownCard, problemCard } from './status_card.js';
import { store } from './store.js';

/** Shows the conversation in `#messages`. `actions` has `openSettings`, `newChat` and `toEnd`. */
export class ChatView {
  #list = byId('messages');
  #actions;
  #nodes = new Map(); // Elements of messages that do not change, by what they show.
  #live = null; // The growing answer: {answer, view, status}.
  #editing = null; // The id of the question that the user edits.
  #frame = 0;

  constructor(actions) {
    this.#actions = actions;
    sessions.addEventListener('open', () => this.#open());
    sessions.addEventListener('run', ({ detail }) => this.#onRun(detail));
    serverState.addEventListener('change', () => {
      if (!sessions.current.head) this.render();
    });
  }

  /** Shows the conversation as it is now. */
  render() {
    const conversation = sessions.current;
    const messages = path(conversation);
    const nodes = messages.length ? [] : [this.#emptyChat()];
    if (conversation.system.trim() && messages.length) nodes.push(this.#systemPrompt());
    const live = this.#liveAnswer(messages.at(-1));
    for (const message of messages) {
      if (live && message === live.message) continue;
      nodes.push(this.#nodeOf(conversation, message));
    }
    nodes.push(...this.#endNodes(conversation, messages, live));
    reconcile(this.#list, nodes);
  }

  /** Opens the editor of the last question. */
  editLast() {
    const question = path(sessions.current).findLast(message => message.role === 'user');
    if (question && !sessions.answerIn(sessions.current)) this.#edit(question);
  }

  #open() {
    this.#nodes.clear();
    this.#dropLive();
    this.#editing = null;
    this.render();
    if (sessions.current.head !== null) this.#actions.toEnd();
    else byId('scroller').scrollTop = 0;
  }

  #onRun({ conversation, ended }) {
    if (conversation !== sessions.current) return;
    this.render();
    if (ended?.content) announce(`The answer: ${ended.content}`);
    else if (!ended) announce('Waiting for the answer');
  }

  #liveAnswer(last) {
    if (!last) return null;
    const question = last.role === 'user' ? last : sessions.current.messages[last.parent];
    const answer = sessions.answerTo(sessions.current, question);
    return answer && (last === question || last === answer.message) ? answer : null;
  }

  #nodeOf(conversation, message) {
    const all = versions(conversation, message);
    const isEdited = this.#editing === message.id;
    const { id, end, content, problem } = message;
    const isLast = id === conversation.head;
    const key = [id, all.length, isEdited, isLast, end, content.length, problem].join(' ');
    if (!this.#nodes.has(key)) this.#nodes.set(key, this.#build(conversation, message, all));
    return this.#nodes.get(key);
  }

  #build(conversation, message, all) {
    if (message.role === 'user') {
      return this.#editing === message.id
        ? this.#editor(message)
        : userMessage(message, all, { edit: () => this.#edit(message), show: this.#show });
    }
    const isLive = this.#live?.answer.message === message;
    const view = isLive ? this.#live.view : new AnswerView();
    if (isLive) this.#dropLive();
    const regenerate = () => {
      if (!sessions.answerIn(conversation)) {
        sessions.regenerate(conversation.messages[message.parent]);
        this.#actions.toEnd();
      }
    };
    const resume = () => {
      if (sessions.answerIn(conversation)) return;
      sessions.resume(message);
      this.#actions.toEnd();
    };
    const actions = { regenerate, show: this.#show };
    if (message.id === conversation.head) actions.resume = resume;
    view.finish(message, all, actions, serverState.model?.max_model_len);
    return view.node;
  }

  // Returns what stands below the messages: the growing answer, or why there is none.
  #endNodes(conversation, messages, live) {
    if (live) return [this.#follow(live)];
    this.#dropLive();
    const last = messages.at(-1);
    if (last?.role !== 'user' || this.#editing === last.id) return [];
    const problem = sessions.problemOf(conversation, last);
    if (problem) announce(problem.message);
    return [problemCard(problem, messages.length === 1, action => this.#act(action, last))];
  }

  #act(action, question) {
    if (action === 'retry') sessions.regenerate(question);
    else if (action === 'edit') this.#edit(question);
    else if (action === 'key') this.#actions.openSettings('key');
    else this.#actions.newChat();
  }

  // Returns the element in which `answer` grows.
  #follow(answer) {
    if (this.#live?.answer !== answer) {
      this.#dropLive();
      const update = () => {
        cancelAnimationFrame(this.#frame);
        this.#frame = requestAnimationFrame(() => this.#update());
      };
      this.#live = { answer, view: new AnswerView(), status: null, phase: '', update };
      answer.addEventListener('change', update);
      this.#update();
    }
    return this.#live.view.node;
  }

  #update() {
    if (!this.#live) return;
    const { answer, view } = this.#live;
    if (answer.phase === 'ended') return; // `render` shows the end.
    view.grow(answer.content, answer.reasoning);
    if (answer.phase !== this.#live.phase) {
      this.#live.phase = answer.phase;
      this.#live.status?.remove();
      this.#live.status = this.#statusOf(answer, view);
    }
    if (answer.phase === 'streaming') view.showFigures(answer.figures());
  }

  #statusOf(answer, view) {
    if (answer.phase === 'waiting') {
      const progress = new Progress(answer);
      view.node.append(progress.node);
      return progress;
    }
    if (answer.phase !== 'refused') return null;
    const { node, title } = countdownCard(answer, () => answer.stop());
    announce(title);
    view.node.append(node);
    return node;
  }

  #dropLive() {
    this.#live?.answer.removeEventListener('change', this.#live.update);
    this.#live?.status?.remove();
    this.#live = null;
  }

  #show = version => {
    showVersion(sessions.current, version);
    store.save(sessions.current);
    this.render();
  };

  #edit(question) {
    if (sessions.answerIn(sessions.current)) return;
    this.#editing = question.id;
    this.render();
    this.#list.querySelector('.editor textarea')?.focus();
  }

  #editor(question) {
    const close = () => {
      this.#editing = null;
      this.#nodes.clear();
    };
    const onSend = text => {
      close();
      sessions.edit(question, text);
      this.#actions.toEnd();
      byId('box').focus();
    };
    const onCancel = () => {
      close();
      this.render();
      byId('box').focus();
    };
    return questionEditor(question.content, onSend, onCancel);
  }

  #systemPrompt() {
    const { system } = sessions.current;
    return element(
      'button',
      {
        type: 'button',
        class: 'system-prompt',
        title: system,
        on: { click: () => this.#actions.openSettings('system') },
      },
      icon('sliders'),
      element('span', {}, `System prompt: ${system}`),
    );
  }

  #emptyChat() {
    const model = serverState.model?.id;
    const examples = examplesFor(model).map(question =>
      element(
        'li',
        {},
        element(
          'button',
          {
            type: 'button',
            on: { click: () => this.#actions.send(question) },
          },
          element('span', {}, question),
          icon('up'),
        ),
      ),
    );
    return element(
      'section',
      { class: 'empty' },
      element(
        'div',
        {},
        element('div', { class: 'mark' }, icon('tern')),
        element('h2', {}, model ? `Talk to ${model}` : 'What would you like to ask?'),
        element('p', {}, 'It runs on this server. Chats stay in this browser.'),
      ),
      element('ul', { class: 'examples', 'aria-label': 'Questions to begin with' }, examples),
    );
  }
}

// Makes `nodes` the children of `parent`. A child that stays keeps its focus and its selection.
function reconcile(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}
