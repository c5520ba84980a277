// Draws the two pictures of the README: a chat, and the live view of a server with several clients.

import { answered, ask, close, finish, launch, open, screenshot } from './browser.mjs';
import { cleanUp, startServer, until } from './server.mjs';

const CLIENTS = 6;
const LOAD_SECONDS = 60;
const QUESTIONS = [
  'Who are you?',
  'What is paging?',
  'Tell me a story.',
  'What is the capital of France?',
];

/** Asks questions, one after the other, until `isOver`. The clients begin one by one. */
async function client({ url }, number, isOver) {
  await new Promise(resolve => setTimeout(resolve, (number * LOAD_SECONDS * 1000) / CLIENTS / 2));
  for (let turn = number; !isOver(); turn += 1) {
    const messages = [{ role: 'user', content: QUESTIONS[turn % QUESTIONS.length] }];
    const response = await fetch(`${url}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify({ messages, temperature: 0.9 }),
      headers: { 'content-type': 'application/json' },
    });
    if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
    await response.json();
  }
}

async function chat({ url }) {
  const page = await open(url);
  for (const question of ['What is paging?', 'Tell me a story.']) {
    const answers = await page.locator('.message.assistant .actions').count();
    await ask(page, question);
    await page.locator('.message.assistant .actions').nth(answers).waitFor();
    await answered(page);
  }
  await screenshot(page, 'chat');
  await finish(page);
}

async function live(server) {
  const end = Date.now() + LOAD_SECONDS * 1000;
  let isDrawn = false;
  const isOver = () => isDrawn;
  const clients = Array.from({ length: CLIENTS }, (_, number) => client(server, number, isOver));
  await until('the load has run', () => Date.now() > end, LOAD_SECONDS * 2);
  const page = await open(`${server.url}/#/server`, { isDark: true });
  await page.locator('.chart path.line').nth(5).waitFor();
  await screenshot(page, 'live');
  isDrawn = true;
  await Promise.all(clients);
  await finish(page);
}

try {
  await launch();
  const server = await startServer('--max-running', '4');
  await chat(server);
  await live(server);
} finally {
  await close();
  cleanUp();
}
process.exit();
