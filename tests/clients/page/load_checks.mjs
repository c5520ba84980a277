// The checks of what the page shows while the server is busy, full, draining or asks for a key.

import assert from 'node:assert/strict';

import { answered, ask, audit, finish, open, screenshot, set, shows } from './browser.mjs';
import { until } from './server.mjs';

/** The keys of the server with tenants. */
export const KEYS = { admin: 'sk-admin', slow: 'sk-slow', free: 'sk-free' };

const SMALL = { width: 600, height: 340 };

/** The checks: `[name, run]`. */
export const loadChecks = [];
const check = (name, run) => loadChecks.push([name, run]);

// ---------------------------------------------------------------- a server that is slow

check('an answer grows, and Stop frees its pages', async ({ slow }) => {
  const { page, answer } = await openLong(slow);
  const lengths = new Set();
  await until('the answer grows', async () => {
    lengths.add((await answer.innerText()).length);
    return lengths.size > 3;
  });
  const figures = page.locator('.figures');
  const counts = [/[\d.,]+ tokens\/s/, /\d+ tokens/];
  for (const part of counts) assert.match(await figures.innerText(), part, 'while it grows');
  await until('the answer has pages', async () => {
    return (await slow.metric('sterna_kv_pages', 'state="private"')) > 0;
  });
  await page.keyboard.press('Escape');
  await shows(page, 'You stopped this answer.');
  for (const part of counts) assert.match(await figures.innerText(), part, 'when it is stopped');
  await page.getByRole('button', { name: 'Continue' }).waitFor();
  await until('the pages are free', async () => {
    const running = await slow.metric('vllm:num_requests_running');
    return running === 0 && (await slow.metric('sterna_kv_pages', 'state="private"')) === 0;
  });
  await finish(page);
});

check('an answer that grows leaves its reader in place', async ({ slow }) => {
  const { page } = await openLong(slow);
  const view = () =>
    page.evaluate(() => {
      const {
        scrollHeight: height,
        scrollTop: top,
        clientHeight,
      } = document.querySelector('#scroller');
      return { top, height, rest: height - top - clientHeight };
    });
  await until('the answer is longer than the view', async () => (await view()).top > 60, 30);
  assert.ok((await view()).rest < 5, 'the view follows the end');
  await page.locator('#scroller').hover();
  await page.mouse.wheel(0, -2000);
  await until('the view is at the top', async () => (await view()).top === 0);
  const before = await view();
  await until('the answer grows on', async () => (await view()).height > before.height);
  assert.equal((await view()).top, 0, 'the view stays');
  await page.click('#jump');
  assert.ok((await view()).rest < 5, 'the button leads to the end');
  await finish(page);
});

check('another tab with the same chat follows it, and leaves its reader too', async ({ slow }) => {
  const { page } = await openLong(slow);
  const tab = await page.context().newPage();
  await tab.setViewportSize(SMALL);
  await tab.goto(page.url());
  const answer = tab.locator('.markdown');
  await answer.waitFor();
  await tab.locator('#scroller').hover();
  await tab.mouse.wheel(0, -2000);
  const { length } = await answer.innerText();
  await until('the other tab grows', async () => (await answer.innerText()).length > length);
  assert.equal(await tab.evaluate(() => document.querySelector('#scroller').scrollTop), 0);
  await finish(page);
});

// Opens a page in which a long answer grows.
async function openLong(server) {
  await until('no request runs', async () => !(await server.metric('vllm:num_requests_running')));
  const page = await open(server.url);
  await page.setViewportSize(SMALL);
  await set(page, { temperature: '1', further: '{"ignore_eos": true}' });
  await ask(page, 'Tell me a story.');
  const answer = page.locator('.message.assistant .markdown');
  await answer.waitFor();
  return { page, answer };
}

check('a queued request says so; a refused one counts down and is sent again', async ({ slow }) => {
  await until('no request runs', async () => !(await slow.metric('vllm:num_requests_running')));
  const free = slow.keepBusy();
  try {
    await until('one request runs', () => slow.metric('vllm:num_requests_running'));
    const queued = await open(slow.url);
    await ask(queued, 'Who are you?');
    await shows(queued, /On the server: 1 running, \d queued\./);
    await screenshot(queued, 'queued-light');
    const refused = await open(slow.url);
    await ask(refused, 'Who are you?');
    await shows(refused, 'The server is full');
    await shows(refused, /Sends again in \d/); // Seconds, or minutes on a slow machine.
    await audit(refused, 'a countdown');
    await screenshot(refused, 'refused-light');
    free();
    assert.match(await answered(queued), /Sterna/);
    // The countdown may have ended already.
    const sendNow = refused.getByRole('button', { name: 'Send now' });
    await sendNow.click({ timeout: 2000 }).catch(() => {});
    assert.match(await answered(refused), /Sterna/);
    await finish(queued);
    await finish(refused);
  } finally {
    free();
  }
});

check('a draining server and a lost one say so, and keep what was there', async ({ slow }) => {
  const { page: running } = await openLong(slow);
  const refused = await open(slow.url);
  slow.drain();
  await ask(refused, 'Who are you?');
  await shows(refused, 'The server is shutting down');
  await refused.locator('#banner', { hasText: 'shutting down' }).waitFor();
  await refused.getByRole('button', { name: 'Do not send again' }).click();
  await slow.stop();
  await shows(running, 'The answer is not complete. The connection ended before the answer did.');
  const text = await running.locator('.markdown').innerText();
  assert.ok(text.length > 3);
  for (const name of ['Continue', 'Send again']) {
    await running.getByRole('button', { name }).waitFor();
  }
  await refused.getByRole('button', { name: 'Send again' }).click();
  await shows(refused, 'Check that it runs, then send the message again.');
  await refused.locator('#banner', { hasText: 'not reachable' }).waitFor();
  await screenshot(refused, 'unreachable-light');
  await finish(refused);
  await finish(running);
});

// ---------------------------------------------------------------- a server with tenants

check('a missing, a wrong and a right key each get their answer', async ({ tenants }) => {
  const page = await open(tenants.url);
  await page.locator('#banner', { hasText: 'requires an API key' }).waitFor();
  await ask(page, 'Who are you?');
  await page.locator('.card', { hasText: 'This server requires an API key' }).waitFor();
  await page.getByRole('button', { name: 'Enter the API key' }).click();
  await page.fill('#setting-key', 'wrong');
  await page.keyboard.press('Escape');
  await page.locator('#banner', { hasText: 'not valid' }).waitFor();
  await page.getByRole('button', { name: 'Send again' }).click();
  await page.locator('.card', { hasText: 'This API key is not valid' }).waitFor();
  await page.getByRole('button', { name: 'Enter the API key' }).click();
  await page.fill('#setting-key', KEYS.free);
  await page.keyboard.press('Escape');
  await page.locator('#banner').waitFor({ state: 'hidden' });
  await page.getByRole('button', { name: 'Send again' }).click();
  assert.match(await answered(page), /Sterna/);
  await page.click('#open-server');
  await shows(page, 'The metrics need the admin key');
  await page.fill('#admin-key', KEYS.admin);
  await page.getByRole('button', { name: 'Show' }).click();
  await page.locator('.tenants tbody th', { hasText: 'free' }).waitFor();
  // A tenant's line shows an answer, also after another view.
  const line = page.locator('.tenants tr', { hasText: 'free' }).locator('path');
  const heights = async () =>
    (await line.getAttribute('d')).split('L').map(point => point.split(' ')[1]);
  await fetch(`${tenants.url}/v1/completions`, {
    method: 'POST',
    headers: { authorization: `Bearer ${KEYS.free}`, 'content-type': 'application/json' },
    body: JSON.stringify({ prompt: 'A', max_tokens: 32, ignore_eos: true }),
  });
  await until('the line shows the answer', async () => new Set(await heights()).size > 1);
  await page.click('#new-chat');
  await page.evaluate(() => document.querySelector('.tenants tbody').replaceChildren());
  await page.click('#open-server');
  assert.ok(new Set(await heights()).size > 1, 'the line remembers the answer');
  await finish(page);
});

check('a used-up rate counts down, and the question is sent again', async ({ tenants }) => {
  const page = await open(tenants.url);
  await set(page, { key: KEYS.slow });
  await page.locator('#banner').waitFor({ state: 'hidden' });
  await ask(page, 'Who are you?');
  await answered(page);
  await ask(page, 'What is paging?');
  const card = page.locator('.card', { hasText: 'Your rate limit is used up' });
  await card.waitFor();
  await shows(page, /Sends again in [1-3] s\./);
  const times = (await card.innerText()).match(/\d[\d.]* s/g);
  assert.equal(times.length, 1, `one time: ${times}`);
  await screenshot(page, 'rate-limit-light');
  await page.locator('.message.assistant .actions').nth(1).waitFor();
  await finish(page);
});
