// The browser of the checks: pages that must log no error, and what they show.

import { createRequire } from 'node:module';
import { join } from 'node:path';

const packages = createRequire(join(process.env.PACKAGES, '/'));
const { chromium } = packages('playwright-core');
const axe = packages('axe-core');
const OUT = process.env.OUT;
const PHONE = { width: 375, height: 740 };
const DESKTOP = { width: 1280, height: 800 };

let browser;

/** Starts the browser. */
export async function launch() {
  const executablePath = process.env.CHROMIUM || undefined;
  // Chromium has no sandbox for root. The pages here come from our own server.
  browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
}

/** Ends the browser. */
export async function close() {
  await browser?.close();
}

/** Closes all pages. */
export async function closePages() {
  for (const context of browser.contexts()) await context.close();
}

/** Opens the page at `url` as a new user. `faults` collects what must not happen. */
export async function open(url, { isDark = false, isPhone = false } = {}) {
  const context = await browser.newContext({
    colorScheme: isDark ? 'dark' : 'light',
    viewport: isPhone ? PHONE : DESKTOP,
    hasTouch: isPhone,
    isMobile: isPhone,
    permissions: ['clipboard-read', 'clipboard-write'],
    acceptDownloads: true,
    reducedMotion: 'reduce',
  });
  const page = await context.newPage();
  const faults = [];
  const origin = new URL(url).origin;
  page.on('pageerror', error => faults.push(`script error: ${error.message}`));
  page.on('console', message => {
    // The browser logs each answer with an error status. The checks provoke these.
    const isStatus = message.text().startsWith('Failed to load resource');
    if (message.type() === 'error' && !isStatus) faults.push(`console: ${message.text()}`);
  });
  page.on('request', request => {
    const isOwn = request.url().startsWith(origin) || request.url().startsWith('blob:');
    if (!isOwn) faults.push(`a request to ${request.url()}`);
  });
  await page.goto(url);
  await page.waitForFunction(() => document.querySelector('#server-state')?.dataset.state);
  return Object.assign(page, { faults });
}

/** Fails if something happened that must not. Closes the page. */
export async function finish(page) {
  if (page.faults.length) throw new Error(page.faults.join('\n'));
  await page.context().close();
}

/** Sends a question. */
export async function ask(page, question) {
  await page.fill('#box', question);
  await page.press('#box', 'Enter');
}

/** Waits until the answer has ended, and returns its text. */
export async function answered(page) {
  const answer = page.locator('.message.assistant').last();
  await answer.locator('.actions').waitFor();
  return answer.locator('.markdown').innerText();
}

/** Sets fields of the settings, by the ends of their ids. */
export async function set(page, values) {
  await page.click('#open-settings-2');
  for (const [name, value] of Object.entries(values)) await page.fill(`#setting-${name}`, value);
  await page.keyboard.press('Escape');
}

/** Waits until an element with this text is in view. */
export async function shows(page, text, seconds = 15) {
  await page
    .getByText(text)
    .first()
    .waitFor({ timeout: seconds * 1000 });
}

/** Keeps a screenshot as a build output. */
export async function screenshot(page, name) {
  await page.screenshot({ path: join(OUT, `${name}.png`) });
}

/** Fails if axe finds a serious fault, or if the page is wider than the screen. */
export async function audit(page, where) {
  // An expression of the debugger is no script of the page, so the page's policy allows it.
  await page.evaluate(`${axe.source}; undefined`);
  const { violations } = await page.evaluate(() =>
    window.axe.run(document, {
      resultTypes: ['violations'],
    }),
  );
  const serious = violations.filter(({ impact }) => impact === 'serious' || impact === 'critical');
  const found = serious.map(
    ({ id, help, nodes }) =>
      `${where}: ${id}: ${help}: ${nodes.map(({ html }) => html.slice(0, 160)).join(' | ')}`,
  );
  if (found.length) throw new Error(found.join('\n'));
  const tooWide = await page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    return scrollWidth > clientWidth ? `${scrollWidth} px on ${clientWidth} px` : null;
  });
  if (tooWide) throw new Error(`${where}: the page is ${tooWide}`);
}
