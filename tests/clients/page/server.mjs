// Servers for the checks: the program on a free port, its metrics, and requests that keep it busy.

import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const PROGRAM = process.env.STERNA;
const START_SECONDS = 60;
const children = new Set();
const folder = mkdtempSync(join(tmpdir(), 'sterna-page-'));

/** Ends all servers and removes their files. */
export function cleanUp() {
  for (const child of children) child.kill('SIGKILL');
  rmSync(folder, { recursive: true, force: true });
}

/** Waits until `look` returns a true value, and returns it. `what` is a text or returns one. */
export async function until(what, look, seconds = 20) {
  const deadline = Date.now() + seconds * 1000;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > deadline)
      throw new Error(`not within ${seconds} s: ${what.call ? what() : what}`);
    await new Promise(resolve => setTimeout(resolve, 50));
  }
}

/** Starts a server and waits until it is ready. */
export async function startServer(...flags) {
  const child = spawn(PROGRAM, ['--port', '0', '--kv-memory', '64MiB', ...flags]);
  children.add(child);
  let log = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', data => {
      log += data;
    });
  }
  const exited = new Promise(resolve => child.on('exit', resolve));
  let isOver = false;
  exited.then(() => {
    isOver = true;
    children.delete(child);
  });
  const url = await until(
    () => `the server starts; its log:\n${log}`,
    async () => {
      if (isOver) throw new Error(`the server exited during its start:\n${log}`);
      const address = /http:\/\/127\.0\.0\.1:\d+/.exec(log)?.[0];
      const isReady =
        address &&
        (await fetch(`${address}/ready`).then(
          ({ ok }) => ok,
          () => false,
        ));
      return isReady && address;
    },
    START_SECONDS,
  );
  return new Server(child, url, exited);
}

class Server {
  constructor(child, url, exited) {
    Object.assign(this, { child, url, exited });
  }

  /** Begins to drain. */
  drain() {
    this.child.kill('SIGTERM');
  }

  /** Ends the server at once. */
  async stop() {
    this.child.kill('SIGKILL');
    await this.exited;
  }

  /** Returns the sum of the series of `name` whose labels contain `label`. */
  async metric(name, label = '') {
    const text = await (await fetch(`${this.url}/metrics`)).text();
    const lines = text
      .split('\n')
      .filter(
        line =>
          (line.startsWith(`${name} `) || line.startsWith(`${name}{`)) && line.includes(label),
      );
    if (!lines.length) throw new Error(`/metrics has no ${name} ${label}`);
    return lines.reduce((sum, line) => sum + Number(line.split(' ').at(-1)), 0);
  }

  /** Sends a request of many long answers. The returned function ends it. */
  keepBusy() {
    const abort = new AbortController();
    const body = {
      messages: [{ role: 'user', content: 'Tell me a story.' }],
      ignore_eos: true,
      n: 8,
      stream: true,
    };
    fetch(`${this.url}/v1/chat/completions`, {
      method: 'POST',
      signal: abort.signal,
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json' },
    })
      .then(response => response.text())
      .catch(() => {});
    return () => abort.abort();
  }
}

/** Copies a checkpoint, with more at the end of its chat template. Returns the new path. */
export function checkpointWith(path, ending) {
  const copy = mkdtempSync(join(folder, 'checkpoint-'));
  cpSync(path, copy, { recursive: true });
  const file = join(copy, 'tokenizer_config.json');
  const config = JSON.parse(readFileSync(file, 'utf8'));
  config.chat_template += ending;
  writeFileSync(file, JSON.stringify(config));
  return copy;
}

/** Writes a tenants file and returns its path. `keys` are by the tenants' ids and for `admin`. */
export function tenantsFile(keys, fieldsById) {
  const hash = key => `key_sha256 = "${createHash('sha256').update(key).digest('hex')}"`;
  const tables = Object.entries(fieldsById).map(([id, fields]) =>
    ['[[tenant]]', `id = "${id}"`, hash(keys[id]), ...fields].join('\n'),
  );
  const path = join(folder, 'tenants.toml');
  writeFileSync(path, [...tables, `[admin]\n${hash(keys.admin)}`].join('\n\n'));
  return path;
}
