// The conversations of this browser, in IndexedDB. Several tabs may show them at the same time.

const DATABASE = 'sterna';
const TABLE = 'conversations';

/** Tells listeners of `change` that the list or a conversation has changed. */
class Store extends EventTarget {
  /** All conversations by id. */
  all = new Map();
  /** Whether the browser keeps them. A private window may refuse. */
  isLasting = true;
  #database = null;
  #tabs = null;

  /** Reads all conversations. */
  async open() {
    try {
      this.#database = await openDatabase();
      const table = this.#database.transaction(TABLE).objectStore(TABLE);
      for (const conversation of await done(table.getAll())) {
        this.all.set(conversation.id, conversation);
      }
    } catch {
      this.isLasting = false;
      return;
    }
    if ('BroadcastChannel' in window) {
      this.#tabs = new BroadcastChannel(DATABASE);
      this.#tabs.addEventListener('message', ({ data }) => this.#readAgain(data));
    }
  }

  /** Returns the conversations, the newest first. */
  newestFirst() {
    return [...this.all.values()].sort((a, b) => b.updated - a.updated);
  }

  /** Keeps a conversation that has changed. */
  async save(conversation) {
    this.all.set(conversation.id, conversation);
    this.#changed(conversation.id);
    await this.#write(table => table.put(conversation), conversation.id);
  }

  /** Removes a conversation. */
  async remove(id) {
    this.all.delete(id);
    this.#changed(id);
    await this.#write(table => table.delete(id), id);
  }

  /** Removes all conversations. */
  async clear() {
    this.all.clear();
    this.#changed(null);
    await this.#write(table => table.clear(), null);
  }

  async #write(change, id) {
    if (!this.#database) return;
    try {
      await done(change(this.#database.transaction(TABLE, 'readwrite').objectStore(TABLE)));
      this.#tabs?.postMessage(id);
    } catch {
      this.isLasting = false; // The disk is full, for example.
      this.dispatchEvent(new Event('failure'));
    }
  }

  // Another tab has changed a conversation, or removed all.
  async #readAgain(id) {
    if (id === null) {
      this.all.clear();
    } else {
      const table = this.#database.transaction(TABLE).objectStore(TABLE);
      const conversation = await done(table.get(id));
      if (conversation) this.all.set(id, conversation);
      else this.all.delete(id);
    }
    this.#changed(id, true);
  }

  #changed(id, isFromOtherTab = false) {
    this.dispatchEvent(new CustomEvent('change', { detail: { id, isFromOtherTab } }));
  }
}

function openDatabase() {
  const opening = indexedDB.open(DATABASE, 1);
  opening.addEventListener('upgradeneeded', () => {
    opening.result.createObjectStore(TABLE, { keyPath: 'id' });
  });
  return done(opening);
}

/** Returns the result of a request of IndexedDB. */
function done(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener('success', () => resolve(request.result));
    request.addEventListener('error', () => reject(request.error));
  });
}

export const store = new Store();
