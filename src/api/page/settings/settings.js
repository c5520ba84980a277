// What the user has chosen. It stays in this browser.

import { startingValues, validValues } from './sampling.js';

const SETTINGS = 'sterna-settings';
const KEY = 'sterna-key';
const ADMIN_KEY = 'sterna-admin-key';

export const REASONING = ['default', 'on', 'off'];

/** The current settings. Change them with `change`. */
export const settings = read();

function read() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    // Settings that cannot be read count as none.
  }
  return {
    theme: ['light', 'dark'].includes(stored.theme) ? stored.theme : 'system',
    model: typeof stored.model === 'string' ? stored.model : '',
    system: typeof stored.system === 'string' ? stored.system : '',
    reasoning: REASONING.includes(stored.reasoning) ? stored.reasoning : 'default',
    further: typeof stored.further === 'string' ? stored.further : '',
    sampling: stored.sampling ? validValues(stored.sampling) : startingValues(),
    keepKey: stored.keepKey === true,
  };
}

/** Returns the further fields of requests, or null if `text` is not a JSON object. */
export function furtherFields(text) {
  if (!text.trim()) return {};
  try {
    const fields = JSON.parse(text);
    return typeof fields === 'object' && !Array.isArray(fields) ? fields : null;
  } catch {
    return null;
  }
}

/** Changes some settings and stores them. */
export function change(changes) {
  Object.assign(settings, changes);
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // A browser that stores nothing keeps the settings until the page closes.
  }
  if ('theme' in changes) applyTheme();
}

function applyTheme() {
  const root = document.documentElement;
  if (settings.theme === 'system') delete root.dataset.theme;
  else root.dataset.theme = settings.theme;
}

// Keys live in the tab unless the user wants to keep theirs.
let keys = { user: '', admin: '' };
try {
  const user = localStorage.getItem(KEY) ?? sessionStorage.getItem(KEY) ?? '';
  keys = { user, admin: sessionStorage.getItem(ADMIN_KEY) ?? '' };
} catch {
  // Without storage the user enters the key again after a reload.
}

/** Returns the user's API key, or an empty string. */
export function apiKey() {
  return keys.user;
}

/** Returns the key that opens the metrics, or an empty string. */
export function adminKey() {
  return keys.admin;
}

/** Sets the API key. The browser forgets it with the tab unless `keep` is true. */
export function setApiKey(key, keep) {
  keys.user = key;
  change({ keepKey: keep });
  try {
    localStorage.removeItem(KEY);
    sessionStorage.removeItem(KEY);
    if (key) (keep ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    // See above.
  }
}

/** Sets the admin key, until the tab closes. */
export function setAdminKey(key) {
  keys.admin = key;
  try {
    sessionStorage.setItem(ADMIN_KEY, key);
  } catch {
    // See above.
  }
}
