// The settings, in a panel at the right.

import { serverState } from '../api/server_state.js';
import { sessions } from '../chat/sessions.js';
import { store } from '../chat/store.js';
import { download, readConversations } from '../chat/transfer.js';
import { toast } from '../elements/announce.js';
import { byId, element, iconButton, textButton } from '../elements/element.js';
import { DECODING, otherWay, ownName, ownNames } from './decoding.js';
import { parametersOf, startingValues, validValues } from './sampling.js';
import { REASONING, apiKey, change, furtherFields, setApiKey, settings } from './settings.js';

const SHORTCUTS = [
  ['Enter', 'Send the message'],
  ['Shift Enter', 'Start a new line'],
  ['Esc', 'Stop the answer'],
  ['↑', 'Edit the last question, from an empty box'],
  ['Ctrl Shift O', 'New chat'],
  ['Ctrl K', 'Search chats'],
];

/** Opens the settings. `place` is the field to show first: `key`, `system` or nothing. */
export function openSettings(place = null) {
  const dialog = byId('settings');
  const { embeds } = serverState.abilities;
  dialog.replaceChildren(
    element(
      'header',
      {},
      element('h2', { id: 'settings-title' }, 'Settings'),
      iconButton('close', 'Close the settings', () => dialog.close(), { class: 'icon-button' }),
    ),
    element(
      'div',
      { class: 'groups' },
      serverGroup(),
      ...(embeds ? [] : [systemGroup(), samplingGroup()]),
      appearanceGroup(),
      ...(embeds ? [] : [chatsGroup(), shortcutsGroup()]),
    ),
  );
  dialog.onclick = event => {
    if (event.target === dialog) dialog.close();
  };
  dialog.showModal();
  const field = place && byId(`setting-${place}`);
  field?.scrollIntoView({ block: 'center' });
  field?.focus();
}

function group(title, ...fields) {
  return element('fieldset', {}, element('legend', {}, title), ...fields);
}

// Returns a field with its label and its help, which a screen reader reads with the input.
function field(name, label, input, help) {
  const id = `setting-${name}`;
  input.id = id;
  if (help) input.setAttribute('aria-describedby', `${id}-help`);
  return element(
    'div',
    { class: 'field' },
    element('label', { for: id }, label),
    input,
    help ? element('p', { class: 'help', id: `${id}-help` }, help) : null,
  );
}

function checkbox(label, isOn, onChange) {
  const input = element('input', {
    type: 'checkbox',
    checked: isOn,
    on: { change: () => onChange(input.checked) },
  });
  return element(
    'label',
    { class: 'field inline' },
    input,
    element('span', { class: 'help' }, label),
  );
}

function select(values, chosen, onChange) {
  const options = values.map(([value, label]) =>
    element('option', { value, selected: value === chosen }, label),
  );
  const input = element('select', { on: { change: () => onChange(input.value) } }, options);
  return input;
}

// Returns the model, and how it decodes if the server lets requests choose.
function modelFields() {
  const fields = element('div');
  const ids = serverState.models.map(({ id }) => id);
  const show = () => {
    const name = ownName(settings.model || ids[0] || '', ids);
    const way = otherWay(name, ids);
    fields.replaceChildren(modelField(ids, show), way ? decodingField(name, way) : '');
  };
  show();
  return fields;
}

function modelField(ids, show) {
  const models = ownNames(ids).map(id => [id, id]);
  const served = ids.length ? `${ids[0]} (what the server serves)` : 'What the server serves';
  const chosen = settings.model && ownName(settings.model, ids);
  if (chosen && !models.some(([id]) => id === chosen)) {
    models.push([chosen, `${chosen} (not served)`]);
  }
  const model = select([['', served], ...models], chosen, value => {
    change({ model: value });
    show();
    byId('setting-model').focus();
  });
  return field('model', 'Model', model);
}

function decodingField(name, way) {
  const other = `${name}:${way}`;
  const usual = Object.keys(DECODING).find(known => known !== way);
  const ways = [
    [name, `${DECODING[usual]} (default)`],
    [other, DECODING[way]],
  ];
  const chosen = settings.model === other ? other : name;
  const input = select(ways, chosen, model => change({ model }));
  return field('decoding', 'Decoding', input, 'The ways give different answers.');
}

function serverGroup() {
  const key = element('input', { type: 'password', autocomplete: 'off', placeholder: 'None' });
  key.value = apiKey();
  let isKept = settings.keepKey;
  const apply = () => {
    setApiKey(key.value.trim(), isKept);
    serverState.refreshModels();
  };
  key.addEventListener('change', apply);
  return group(
    'Server',
    modelFields(),
    field('key', 'API key', key, 'Only servers with several tenants need one.'),
    checkbox(
      'Keep the key in this browser. Otherwise it is gone when the tab closes.',
      isKept,
      isOn => {
        isKept = isOn;
        apply();
      },
    ),
  );
}

function systemGroup() {
  const conversation = sessions.current;
  const text = element('textarea', { placeholder: 'For example: Answer in one sentence.' });
  text.value = conversation.system;
  const isForAll = () => settings.system !== '' && settings.system === conversation.system;
  const apply = forAll => {
    conversation.system = text.value.trim();
    change({ system: forAll ? conversation.system : '' });
    if (conversation.head) store.save(conversation);
    sessions.dispatchEvent(new CustomEvent('run', { detail: { conversation, ended: null } }));
  };
  const toAll = checkbox('New chats begin with it too.', isForAll(), apply);
  text.addEventListener('change', () => apply(toAll.querySelector('input').checked));
  return group(
    'System prompt',
    field(
      'system',
      'For this chat',
      text,
      'The model reads it before your first message. It says how to answer.',
    ),
    toAll,
  );
}

function samplingGroup() {
  const fields = element('div');
  const show = () => {
    const parameters = parametersOf(serverState.abilities.reasons);
    fields.replaceChildren(...parameters.map(samplingField), reasoningField(), furtherField());
  };
  const reset = textButton('Reset', () => {
    change({ sampling: startingValues(), reasoning: 'default', further: '' });
    show();
  });
  show();
  return group('How the model answers', fields, element('div', { class: 'buttons' }, reset));
}

function samplingField(parameter) {
  const { name, label, min, max, step, help, slider } = parameter;
  const id = `setting-${name}`;
  const value = settings.sampling[name];
  const input = element('input', {
    id,
    type: 'number',
    min,
    max,
    step,
    placeholder:
      typeof parameter.default === 'number' ? `${parameter.default} (default)` : parameter.default,
    'aria-describedby': `${id}-help`,
    inputmode: min < 0 ? null : 'decimal', // That keyboard has no minus on some phones.
  });
  input.value = value ?? '';
  const problem = element('p', { class: 'problem', role: 'status' });
  const range = slider
    ? element('input', { type: 'range', min, max, step, 'aria-label': label, tabindex: -1 })
    : null;
  if (range) range.value = value ?? parameter.default;
  const apply = text => {
    const number = text === '' ? undefined : Number(text);
    change({ sampling: validValues({ ...settings.sampling, [name]: number }) });
    const isSent = text === '' || name in settings.sampling;
    const kind = step < 1 ? 'number' : 'whole number';
    problem.textContent = isSent ? '' : `Not sent: it must be a ${kind} from ${min} to ${max}.`;
  };
  input.addEventListener('input', () => {
    apply(input.value);
    if (range) range.value = input.value === '' ? parameter.default : input.value;
  });
  range?.addEventListener('input', () => {
    input.value = range.value;
    apply(range.value);
  });
  return element(
    'div',
    { class: 'field' },
    element('div', { class: 'top' }, element('label', { for: id }, label), input),
    range,
    problem,
    element('p', { class: 'help', id: `${id}-help` }, help),
  );
}

function reasoningField() {
  const labels = { default: 'As the model does by default', on: 'On', off: 'Off' };
  const input = select(
    REASONING.map(value => [value, labels[value]]),
    settings.reasoning,
    value => change({ reasoning: value }),
  );
  return field(
    'reasoning',
    'Reasoning',
    input,
    'For models that can reason before they answer. Other models ignore it.',
  );
}

function furtherField() {
  const text = element('textarea', { placeholder: '{"stop": ["\\n"]}', spellcheck: 'false' });
  text.value = settings.further;
  const problem = element('p', { class: 'problem', role: 'status' });
  text.addEventListener('input', () => {
    const isValid = furtherFields(text.value) !== null;
    problem.textContent = isValid ? '' : 'This is not a JSON object, so the page does not use it.';
    if (isValid) change({ further: text.value });
  });
  const node = field(
    'further',
    'Further fields of the API',
    text,
    'A JSON object. Its fields are sent with each request, and take precedence over those above.',
  );
  node.append(problem);
  return node;
}

function appearanceGroup() {
  const choices = [
    ['system', 'System'],
    ['light', 'Light'],
    ['dark', 'Dark'],
  ].map(([value, label]) =>
    element(
      'label',
      {},
      element('input', {
        type: 'radio',
        name: 'theme',
        value,
        checked: settings.theme === value,
        on: { change: () => change({ theme: value }) },
      }),
      label,
    ),
  );
  return group(
    'Appearance',
    element(
      'div',
      { class: 'field' },
      element('div', { class: 'choices', role: 'radiogroup', 'aria-label': 'Theme' }, choices),
    ),
  );
}

function chatsGroup() {
  const file = element('input', {
    type: 'file',
    accept: '.json,application/json',
    hidden: true,
    on: { change: () => importFile(file) },
  });
  const remove = () => {
    const all = store.newestFirst();
    all.forEach(conversation => sessions.answerIn(conversation)?.stop());
    store.clear();
    sessions.open();
    const run = () => all.forEach(conversation => store.save(conversation));
    byId('settings').close();
    toast(`${all.length} chats deleted`, { label: 'Undo', run });
  };
  const none = store.all.size === 0;
  const exportAll = textButton('Export all', () => download(store.newestFirst(), 'sterna-chats'));
  const removeAll = textButton('Delete all', remove, 'danger');
  exportAll.disabled = none;
  removeAll.disabled = none;
  return group(
    'Chats',
    element('p', { class: 'field help' }, 'The chats of this browser. An import adds to them.'),
    file,
    element(
      'div',
      { class: 'buttons' },
      exportAll,
      textButton('Import…', () => file.click()),
      removeAll,
    ),
  );
}

async function importFile(input) {
  const [file] = input.files;
  input.value = '';
  if (!file) return;
  try {
    const conversations = readConversations(await file.text());
    for (const conversation of conversations) await store.save(conversation);
    toast(`${conversations.length} ${conversations.length === 1 ? 'chat' : 'chats'} imported`);
    byId('settings').close();
    if (conversations.length === 1) location.hash = `#/chat/${conversations[0].id}`;
  } catch (error) {
    toast(`Nothing imported. ${error.message}`);
    byId('settings').close();
  }
}

function shortcutsGroup() {
  const rows = SHORTCUTS.flatMap(([keys, meaning]) => [
    element(
      'dt',
      {},
      keys
        .split(' ')
        .flatMap((key, index) =>
          index ? [' ', element('kbd', {}, key)] : [element('kbd', {}, key)],
        ),
    ),
    element('dd', {}, meaning),
  ]);
  return group('Keys', element('dl', { class: 'keys' }, rows));
}
