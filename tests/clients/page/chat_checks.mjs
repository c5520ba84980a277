// The checks of chats, settings and looks, against a server that answers fast.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { gzipSync } from 'node:zlib';

import { answered, ask, audit, finish, open, screenshot, set, shows } from './browser.mjs';
import { checkpointWith, startServer, until } from './server.mjs';

const MOST_COMPRESSED_BYTES = 150 * 1024;

// Strings that run a script if a page reads them as HTML or follows them.
const ATTACKS = [
  '<img src=x onerror="window.hacked=1">',
  '<script>window.hacked=1</script>',
  '<svg onload="window.hacked=1"></svg>',
  '<iframe srcdoc="<script>parent.hacked=1</script>">',
  '[link](javascript:window.hacked=1)',
  '[link](data:text/html,<script>window.hacked=1</script>)',
  '![picture](https://attacker.example/pixel.png)',
  '<a href="javascript:window.hacked=1">a</a>',
  '```"><img src=x onerror=window.hacked=1>\n</code><script>window.hacked=1</script>\n```',
  '| <img src=x onerror=window.hacked=1> | b |\n|---|---|\n| <b onclick=x> | `<script>` |',
  '[a]( java\tscript:window.hacked=1)',
  '<style>*{display:none}</style>',
];

/** The checks: `[name, run]`. */
export const chatChecks = [];
const check = (name, run) => chatChecks.push([name, run]);

check('an empty chat offers questions, and one click asks one', async ({ fast }) => {
  const page = await open(fast.url);
  await page.getByRole('button', { name: 'Who are you?' }).waitFor();
  await audit(page, 'empty chat');
  await screenshot(page, 'empty-light');
  await page.setViewportSize({ width: 320, height: 480 });
  const heading = await page.getByText('Talk to sterna-demo').boundingBox();
  assert.ok(heading.y > 50, 'a small screen shows the empty chat from its top');
  assert.ok(await page.locator('#jump').isHidden());
  await page.getByRole('button', { name: 'Who are you?' }).click();
  assert.match(await answered(page), /Sterna/);
  const figures = await page.locator('.figures').last().innerText();
  for (const part of [
    /[\d.]+ m?s to first token/,
    /[\d.,]+ tokens\/s/,
    /\d+ tokens/,
    /\d+ in the prompt, \d+ cached/,
  ])
    assert.match(figures, part);
  await finish(page);
});

check('the page and its files have less than 150 KB, compressed', async ({ fast }) => {
  const seen = new Map();
  const page = await open(fast.url);
  page.on('response', response => seen.set(response.url(), response));
  await page.reload();
  await until('the page has loaded', () => page.locator('.empty').count());
  let bytes = 0;
  for (const [url, response] of seen) {
    const isOwn = new URL(url).pathname === '/' || url.includes('/page/');
    if (isOwn) bytes += gzipSync(await (await fetch(response.url())).text()).length;
  }
  assert.ok(seen.size > 20 && bytes > 10_000, 'the files are counted');
  assert.ok(bytes < MOST_COMPRESSED_BYTES, `${bytes} bytes`);
  process.stdout.write(`      ${(bytes / 1024).toFixed(1)} KiB compressed\n`);
  await finish(page);
});

check('a reload keeps the chats, and versions keep what they replace', async ({ fast }) => {
  const page = await open(fast.url);
  await ask(page, 'What is paging?');
  const first = await answered(page);
  await ask(page, 'Who are you?');
  await page.locator('.message.assistant .actions').nth(1).waitFor();
  await page.reload();
  await page.locator('.message.assistant').nth(1).waitFor();
  assert.equal(await page.locator('.markdown').first().innerText(), first);
  await page.locator('#box').press('ArrowUp');
  await page.locator('.editor textarea').fill('What is the capital of France?');
  await page.locator('.editor textarea').press('Enter');
  await shows(page, '2 / 2');
  assert.match(await answered(page), /Paris/);
  await page.getByRole('button', { name: 'Regenerate the answer' }).last().click();
  await page.locator('.message.assistant .versions').last().waitFor();
  await answered(page);
  await page.getByRole('button', { name: 'Previous version' }).first().click();
  await page.locator('.bubble', { hasText: 'Who are you?' }).waitFor();
  await page.keyboard.press('Control+Shift+O');
  await page.locator('.empty').waitFor();
  await ask(page, 'Tell me a story.');
  await answered(page);
  assert.equal(await page.locator('#chats a').count(), 2);
  await page.fill('#search', 'france');
  assert.equal(await page.locator('#chats a').count(), 1);
  await page.locator('#chats a').click();
  await page.locator('.bubble', { hasText: 'Who are you?' }).waitFor();
  await finish(page);
});

check('HTML, scripts and addresses in chats stay inert text', async ({ fast }) => {
  const page = await open(fast.url);
  const messages = ATTACKS.flatMap(content => [
    { role: 'user', content },
    { role: 'assistant', content },
  ]);
  await importChat(page, messages);
  await page
    .locator('.message.assistant')
    .nth(ATTACKS.length - 1)
    .waitFor();
  const found = await page.evaluate(() => ({
    hacked: window.hacked,
    elements: document.querySelectorAll('#messages :is(script, img, iframe, style, object, form)')
      .length,
    drawings: document.querySelectorAll('#messages .markdown > svg, #messages .bubble svg').length,
    addresses: [...document.querySelectorAll('#messages a')].map(link => link.protocol),
    questions: [...document.querySelectorAll('.bubble')].map(bubble => bubble.textContent),
    answers: [...document.querySelectorAll('.markdown')].map(answer => answer.textContent),
  }));
  assert.equal(found.hacked, undefined);
  assert.equal(found.elements + found.drawings, 0);
  assert.deepEqual([...new Set(found.addresses)], ['https:']);
  assert.deepEqual(found.questions, ATTACKS);
  for (const index of [0, 1, 2, 3, 11]) assert.equal(found.answers[index], ATTACKS[index]);
  await page.keyboard.press('Control+Shift+O');
  await ask(page, ATTACKS[0]);
  await answered(page);
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  const refused = await page.evaluate(() => {
    try {
      document.createElement('p').innerHTML = '<b>x</b>';
      return false;
    } catch {
      return true;
    }
  });
  assert.ok(refused, 'the policy refuses HTML from strings');
  page.faults.length = 0; // The browser has logged this refusal.
  await finish(page);
});

check('Markdown is shown, code can be copied, and reasoning is folded', async ({ fast }) => {
  const page = await open(fast.url, { isDark: true });
  const content = readFileSync(new URL('./answer.md', import.meta.url), 'utf8');
  const chat = {
    title: 'Everything that Markdown has',
    head: 2,
    messages: {
      1: { id: 1, parent: null, role: 'user', content: 'Show me everything.', created: 1 },
      2: {
        id: 2,
        parent: 1,
        role: 'assistant',
        content,
        reasoning: 'First I *think*.',
        created: 2,
        end: 'stop',
      },
    },
  };
  await importFile(page, { format: 'sterna-chats', version: 1, conversations: [chat] });
  const answer = page.locator('.message.assistant').last();
  await answer.waitFor();
  for (const [selector, count] of [
    ['h3', 1],
    ['strong', 2],
    ['em', 1],
    ['del', 1],
    ['li', 8],
    ['ul ul li', 1],
    ['ol li', 2],
    ['blockquote', 1],
    ['table tr', 3],
    ['.code', 1],
    ['a', 2],
    ['hr', 1],
    ['input[type=checkbox]', 2],
  ]) {
    assert.equal(await answer.locator('> .markdown').locator(selector).count(), count, selector);
  }
  await answer.getByRole('button', { name: 'Copy this code' }).click();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  assert.equal(copied, 'def greet(name):\n\treturn f"<b>{name}</b>"  # 2 < 3');
  assert.equal(await answer.locator('details').getAttribute('open'), null);
  await answer.locator('summary').click();
  await shows(page, 'First I think.');
  await screenshot(page, 'markdown-dark');
  await audit(page, 'markdown, dark');
  await finish(page);
});

check('formulas are shown and can be copied, and prices stay text', async ({ fast }) => {
  const page = await open(fast.url, { isPhone: true });
  const content = [
    'The roots of $ax^2 + bx + c$ cost $5 or $10, and \\(\\alpha \\ne \\beta\\):',
    'Pay $5; set `$PATH`.',
    '\\[',
    'x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}',
    '\\]',
    'A sum:',
    '$$\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}, \\quad \\mathbf{A} = ' +
      '\\begin{pmatrix} 1 & 0 \\\\ 0 & \\unknown \\end{pmatrix}$$',
    'Not closed: $$ a and `$x$`.',
  ].join('\n');
  await importChat(page, [
    { role: 'user', content: 'Formulas?' },
    { role: 'assistant', content },
  ]);
  const answer = page.locator('.markdown').last();
  await answer.waitFor();
  const count = selector => answer.locator(selector).count();
  assert.deepEqual(
    await Promise.all(['math', '.formula', 'mfrac', 'msqrt', 'mtable', 'code'].map(count)),
    [4, 2, 2, 1, 1, 2],
  );
  const text = await answer.textContent();
  const prices = ['cost $5 or $10', 'Pay $5; set $PATH', '$$ a'];
  for (const part of [...prices, 'α', '≠', '∑', '𝐀', '\\unknown'])
    assert.ok(text.includes(part), `${part} in ${text}`);
  await answer.getByRole('button', { name: 'Copy this formula' }).first().click();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  assert.equal(copied, 'x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}');
  const isDrawn = await answer
    .locator('mfrac')
    .first()
    .evaluate(fraction => {
      const [above, below] = [...fraction.children].map(part => part.getBoundingClientRect());
      return above.bottom <= below.top + 2;
    });
  assert.ok(isDrawn, 'the browser draws a fraction');
  await audit(page, 'formulas');
  await screenshot(page, 'formulas-phone');
  await finish(page);
});

check('a table on a phone scrolls and breaks no word', async ({ fast }) => {
  const page = await open(fast.url, { isPhone: true });
  const row = cells => `| ${cells.join(' | ')} |`;
  const heads = ['Name', 'Transportation', 'Passengers', 'Emissions', 'Description'];
  const cells = ['Train', 'Railway', '400', 'electricity', 'comfortable'];
  const table = [row(heads), row(heads.map(() => '---')), row(cells)].join('\n');
  await importChat(page, [
    { role: 'user', content: 'A table?' },
    { role: 'assistant', content: table },
  ]);
  const cell = page.locator('.markdown :is(th, td)');
  await cell.first().waitFor();
  const heights = await cell.evaluateAll(all => all.map(one => one.offsetHeight));
  assert.equal(heights.length, 10);
  assert.ok(Math.max(...heights) < 50, `each cell is one line: ${heights}`);
  await audit(page, 'a table on a phone');
  await screenshot(page, 'table-phone');
  await finish(page);
});

check('Continue goes on where an answer ended', async ({ fast }) => {
  const page = await open(fast.url);
  await set(page, { max_tokens: '4', temperature: '0' });
  await ask(page, 'Tell me a story.');
  const first = await answered(page);
  const figures = page.locator('.figures').last();
  assert.match(await figures.innerText(), /\b4 tokens/);
  const [request] = await Promise.all([
    page.waitForRequest('**/v1/chat/completions'),
    page.getByRole('button', { name: 'Continue' }).click(),
  ]);
  const { messages, continue_final_message: continues } = request.postDataJSON();
  assert.equal(continues, true);
  assert.equal(messages.at(-1).role, 'assistant');
  assert.equal(messages.at(-1).content.trim(), first.trim());
  await until('the answer has gone on', async () => /\b8 tokens/.test(await figures.innerText()));
  const whole = await answered(page);
  assert.ok(whole.startsWith(first) && whole.length > first.length, `${first} | ${whole}`);
  assert.equal(await page.locator('.message.assistant').count(), 1);
  await screenshot(page, 'continue-light');
  await ask(page, 'Who are you?');
  await page.locator('.message.assistant .actions').nth(1).waitFor();
  assert.equal(await page.getByRole('button', { name: 'Continue' }).count(), 1, 'the last one');
  await finish(page);
});

check('an answer that failed midway can be sent again', async ({ fast }) => {
  const page = await open(fast.url);
  const message = (id, role, content) => ({ id, parent: id - 1 || null, role, content });
  const answer = { ...message(2, 'assistant', 'I am'), end: 'lost' };
  const messages = { 1: message(1, 'user', 'Who are you?'), 2: answer };
  const conversations = [{ title: 'Lost', head: 2, messages }];
  await importFile(page, { format: 'sterna-chats', version: 1, conversations });
  await shows(page, 'The connection ended before the answer did.');
  await page.getByRole('button', { name: 'Continue' }).waitFor();
  await page.getByRole('button', { name: 'Send again' }).click();
  await shows(page, '2 / 2');
  assert.match(await answered(page), /Sterna/);
  assert.equal(await page.getByRole('button', { name: 'Send again' }).count(), 0);
  await finish(page);
});

check('a message in the instant of a new chat belongs to the new chat', async ({ fast }) => {
  const page = await open(fast.url);
  await ask(page, 'What is paging?');
  await answered(page);
  await page.evaluate(() => {
    document.querySelector('#new-chat').click();
    document.querySelector('#box').value = 'Who are you?';
    document.querySelector('#composer').requestSubmit();
  });
  assert.match(await answered(page), /Sterna/);
  assert.equal(await page.locator('.bubble').count(), 1);
  assert.equal(await page.locator('#chats a').count(), 2);
  await page.goBack();
  await page.locator('.bubble', { hasText: 'What is paging?' }).waitFor();
  await finish(page);
});

check('a text file is attached, kept and exported as Markdown', async ({ fast }) => {
  const page = await open(fast.url);
  const file = (name, text) => ({ name, mimeType: 'text/plain', buffer: Buffer.from(text) });
  await page.locator('#attach-file').setInputFiles(file('picture.png', 'a\0b'));
  await shows(page, 'picture.png is not a text file');
  const code = 'print("```")';
  await page
    .locator('#attach-file')
    .setInputFiles([file('a.py', `${code}\n`), file('b.txt', 'no')]);
  await page.getByRole('button', { name: 'Remove b.txt' }).click();
  const half = 'x'.repeat(600 * 1024);
  await page.locator('#attach-file').setInputFiles([file('c.txt', half), file('d.txt', half)]);
  await shows(page, 'With d.txt, the files are larger than 1 MiB');
  await page.getByRole('button', { name: 'Remove c.txt' }).click();
  await screenshot(page, 'attached-light');
  await audit(page, 'an attached file');
  const [request] = await Promise.all([
    page.waitForRequest('**/v1/chat/completions'),
    ask(page, 'Who are you?'),
  ]);
  const { content } = request.postDataJSON().messages[0];
  assert.equal(content, `a.py:\n\n\`\`\`\`\n${code}\n\`\`\`\`\n\nWho are you?`);
  const answer = await answered(page);
  assert.equal(await page.locator('.attachment').count(), 0, 'the file is sent once');
  await page.reload();
  await page.locator('.bubble summary', { hasText: 'a.py' }).click();
  await shows(page, code);
  await page.click('#chat-menu-button');
  const [download] = await Promise.all([
    page.waitForEvent('download'),
    page.click('#export-markdown'),
  ]);
  assert.equal(download.suggestedFilename(), 'Who-are-you-.md');
  const exported = readFileSync(await download.path(), 'utf8');
  const begin = `# Who are you?\n\n## Question\n\n${content}\n\n## Answer\n\n`;
  assert.equal(exported.slice(0, begin.length), begin);
  assert.ok(exported.slice(begin.length).startsWith(answer.slice(0, 12)), exported);
  await finish(page);
});

check('a finger meets no small target', async ({ fast }) => {
  const page = await open(fast.url, { isPhone: true });
  const small = where =>
    page.evaluate(place => {
      const all = document.querySelectorAll(
        `${place} :is(button, a, select, summary, input, textarea)`,
      );
      return [...all].flatMap(node => {
        // A box or a choice is as large as its label.
        const target = node.closest('label') ?? node;
        if (!node.checkVisibility({ visibilityProperty: true }) || node.closest('.markdown p')) {
          return [];
        }
        const { width, height } = target.getBoundingClientRect();
        return width < 44 || height < 44
          ? [`${node.outerHTML.slice(0, 90)}: ${width} x ${height}`]
          : [];
      });
    }, where);
  await ask(page, 'What is paging?');
  await answered(page);
  const code = '```py\n1\n```\n\n$$x$$';
  await importChat(page, [
    { role: 'user', content: 'Code?' },
    { role: 'assistant', content: code },
  ]);
  await page.locator('.markdown .code').waitFor();
  assert.deepEqual(await small('#stage'), []);
  await page.click('#chat-menu-button');
  await page.locator('#chat-menu').waitFor();
  assert.deepEqual(await small('#chat-menu'), []);
  await page.keyboard.press('Escape');
  await page.click('#open-settings-2');
  assert.deepEqual(await small('#settings'), []);
  await screenshot(page, 'settings-phone');
  await page.keyboard.press('Escape');
  await page.click('#open-sidebar');
  await page.locator('#chats a').first().waitFor();
  assert.deepEqual(await small('#sidebar'), []);
  await finish(page);
});

check('the charts begin with the last minutes of the server', async ({ fast }) => {
  const before = await open(fast.url);
  await ask(before, 'Who are you?');
  await answered(before);
  await fetch(`${fast.url}/v1/models/none`);
  const samples = () =>
    fetch(`${fast.url}/metrics/recent`)
      .then(response => response.json())
      .then(({ samples: all }) => all);
  const has = ({ metrics }) => /status="404"\} [1-9]/.test(metrics);
  await until('samples tell of the requests', async () => (await samples()).filter(has).length > 1);
  const page = await open(`${fast.url}/#/server`);
  const chart = title => page.locator('.chart', { hasText: title });
  await chart('Tokens a second').locator('path.line').first().waitFor();
  for (const title of ['Requests a second', 'Errors a second, by status', 'KV pages']) {
    const drawn = await chart(title).locator('path.line').first().getAttribute('d');
    assert.ok(drawn.split('L').length > 2, `${title}: ${drawn}`);
  }
  // The line of the other statuses of 400 to 499 leaves the ground where the 404 was.
  const heights = (await chart('Errors').locator('path.s3').getAttribute('d'))
    .slice(1)
    .split('L')
    .map(point => Number(point.split(' ')[1]));
  assert.ok(Math.max(...heights) - Math.min(...heights) > 10, heights.join());
  const isCut = await page
    .locator('.tiles > div')
    .evaluateAll(tiles => tiles.some(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth));
  assert.ok(!isCut, 'each figure fits into its tile');
  await page.locator('.tiles', { hasText: /KV in use\s*\d+ % and \d+ % cached/ }).waitFor();
  await chart('Errors').scrollIntoViewIfNeeded();
  await screenshot(page, 'server-begins');
  await finish(page);
  await finish(before);
});

check('only a model that reasons has a thinking budget', async ({ fast }) => {
  const path = checkpointWith('tests/fixtures/qwen3-group128-untied', '{# <think> #}');
  const server = await startServer('--model', path);
  try {
    for (const [url, expected] of [
      [server.url, 7],
      [fast.url, undefined],
    ]) {
      const page = await open(url);
      await page.evaluate(() => {
        const sampling = { thinking_token_budget: 3, max_tokens: 2 };
        localStorage.setItem('sterna-settings', JSON.stringify({ sampling }));
      });
      await page.reload();
      await page.locator('#server-state[data-state=ready] .name').waitFor();
      await page.click('#open-settings-2');
      const field = page.getByLabel('Thinking budget');
      if (expected) await field.fill(String(expected));
      else assert.equal(await field.count(), 0);
      await page.keyboard.press('Escape');
      const [request] = await Promise.all([
        page.waitForRequest('**/v1/chat/completions'),
        ask(page, 'Who are you?'),
      ]);
      assert.equal(request.postDataJSON().thinking_token_budget, expected);
      assert.equal((await request.response()).status(), 200);
      await finish(page);
    }
  } finally {
    await server.stop();
  }
});

check('a server that embeds texts shows what it is for', async () => {
  const server = await startServer('--model', 'tests/fixtures/embedding-qwen3');
  try {
    for (const look of [{}, { isDark: true, isPhone: true }]) {
      const page = await open(server.url, look);
      await shows(page, 'embeds texts');
      assert.ok(await page.locator('#composer').isHidden());
      assert.ok(await page.locator('#new-chat').isHidden());
      await page.getByLabel('Query').fill('the same words');
      await page.getByLabel('Texts, one in each line').fill('other things\nthe same words\n');
      await page.getByRole('button', { name: 'Compare' }).click();
      await page.locator('.result li').nth(1).waitFor();
      assert.match(await page.locator('.result li').first().innerText(), /1\.000\s*the same words/);
      await shows(page, /\d+ dimensions · \d+ tokens/);
      await audit(page, 'embedding');
      await screenshot(page, `embedding-${look.isPhone ? 'phone-dark' : 'light'}`);
      await page.getByLabel('Query').fill('');
      await page.getByRole('button', { name: 'Compare' }).click();
      await shows(page, 'Enter a query');
      await finish(page);
    }
  } finally {
    await server.stop();
  }
});

check('an export holds the chats, and an import brings them back', async ({ fast }) => {
  const page = await open(fast.url);
  await ask(page, 'What is paging?');
  const answer = await answered(page);
  await page.click('#chat-menu-button');
  const [download] = await Promise.all([page.waitForEvent('download'), page.click('#export-chat')]);
  const exported = JSON.parse(readFileSync(await download.path(), 'utf8'));
  await page.click('#chat-menu-button');
  await page.click('#delete-chat');
  await page.locator('.empty').waitFor();
  await importFile(page, exported);
  await page.locator('.message.assistant').waitFor();
  assert.equal(await page.locator('.markdown').innerText(), answer);
  await importFile(page, { format: 'sterna-chats', version: 1, conversations: [{ title: 'x' }] });
  await shows(page, 'Nothing imported. Chat 1 of the file has no title or no messages.');
  await finish(page);
});

check('a first message that is too long says so, and can be edited', async ({ fast }) => {
  const page = await open(fast.url);
  await ask(page, 'word '.repeat(3000));
  await shows(page, 'This message is too long for the model');
  await shows(page, /maximum context length is 1024 tokens. The prompt has 15\d\d\d bytes/);
  await audit(page, 'a problem');
  await page.getByRole('button', { name: 'Edit the message' }).click();
  await page.locator('.editor textarea').fill('What is paging?');
  await page.locator('.editor').getByRole('button', { name: 'Send' }).click();
  assert.match(await answered(page), /[Pp]ag/);
  await finish(page);
});

check('system prompt and sampling parameters reach the server', async ({ fast }) => {
  const page = await open(fast.url);
  await page.click('#open-settings-2');
  await page.fill('#setting-system', 'Answer with one word.');
  await page.fill('#setting-temperature', '0');
  await page.fill('#setting-max_tokens', '3');
  await page.fill('#setting-top_p', '7'); // Not a probability, so the page does not send it.
  await shows(page, 'Not sent: it must be a number from 0 to 1.');
  await audit(page, 'settings');
  await screenshot(page, 'settings-light');
  await page.keyboard.press('Escape');
  const [request] = await Promise.all([
    page.waitForRequest('**/v1/chat/completions'),
    ask(page, 'Tell me a story.'),
  ]);
  const body = request.postDataJSON();
  assert.deepEqual(body.messages[0], { role: 'system', content: 'Answer with one word.' });
  assert.equal(body.temperature, 0);
  assert.equal(body.max_tokens, 3);
  assert.equal(body.top_p, undefined);
  await answered(page);
  await shows(page, 'it reached the longest answer of the settings');
  await page.click('#open-settings-2');
  await page.getByText('Dark', { exact: true }).click();
  await page.keyboard.press('Escape');
  await page.reload();
  assert.equal(await page.evaluate(() => getComputedStyle(document.body).colorScheme), 'dark');
  await finish(page);
});

check('the settings choose how the model decodes', async ({ fast }) => {
  const page = await open(fast.url);
  const decoding = page.getByLabel('Decoding');
  const request = async question => {
    const [sent] = await Promise.all([
      page.waitForRequest('**/v1/chat/completions'),
      ask(page, question),
    ]);
    assert.ok(await answered(page));
    return sent.postDataJSON();
  };
  await page.click('#open-settings-2');
  const models = await page.locator('#setting-model option').allTextContents();
  assert.ok(!models.some(name => name.includes(':')), models.join());
  await decoding.selectOption({ label: 'Block diffusion: several tokens at once' });
  await audit(page, 'ways of decoding');
  await page.keyboard.press('Escape');
  assert.match((await request('Who are you?')).model, /:diffusion$/);
  await page.reload();
  await page.click('#open-settings-2');
  assert.match(await decoding.inputValue(), /:diffusion$/);
  await decoding.selectOption({ index: 0 });
  await page.keyboard.press('Escape');
  assert.ok(!(await request('What is paging?')).model.includes(':'));
  await page.click('#open-settings-2');
  await decoding.selectOption({ index: 1 });
  await page.locator('#setting-model').selectOption({ index: 0 });
  assert.equal(await decoding.evaluate(input => input.selectedIndex), 0);
  await page.keyboard.press('Escape');
  assert.equal((await request('What is a token?')).model, undefined);
  await finish(page);
});

check('the page is whole in light, dark and on a phone', async ({ fast }) => {
  for (const [name, look] of [
    ['light', {}],
    ['dark', { isDark: true }],
    ['phone', { isPhone: true }],
    ['phone-dark', { isPhone: true, isDark: true }],
  ]) {
    const page = await open(fast.url, look);
    await ask(page, 'What is paging?');
    await answered(page);
    await ask(page, 'Tell me a story.');
    await page.locator('.message.assistant .actions').nth(1).waitFor();
    await audit(page, `chat, ${name}`);
    await screenshot(page, `chat-${name}`);
    if (look.isPhone) {
      const bar = await page.locator('#bar').boundingBox();
      assert.ok(bar.height < 60, 'the bar is one line');
      await page.click('#open-sidebar');
      if (look.isDark) await audit(page, `list of chats, ${name}`);
      await screenshot(page, `chats-${name}`);
    }
    await page.click('#open-server');
    await page.locator('.chart').nth(5).waitFor();
    if (name === 'light' || name === 'phone-dark') await audit(page, `live server, ${name}`);
    await screenshot(page, `server-${name}`);
    await finish(page);
  }
});

check('no text makes the page slow to read it', async ({ fast }) => {
  const page = await open(fast.url);
  const slowest = await page.evaluate(async () => {
    const { parseMarkdown } = await import('./page/chat/markdown.js');
    const { parseTex } = await import('./page/chat/tex.js');
    const { highlight } = await import('./page/chat/highlight.js');
    const units = [
      '*a **b _c __d ~~e ',
      '`',
      '``a`b```c',
      '[',
      '[a](b',
      '![',
      '> ',
      '- ',
      '  - a\n',
      '1. a\n\n',
      '|',
      '|a',
      '# ',
      '#',
      ' ',
      '\\',
      '***',
      '*a*',
      'http://',
      '~~~',
      '- [ ] ',
      '<b>',
      '| a | b |\n|---|---|\n',
      '"',
      '/*',
      '-- ',
      '$',
      '$$\n',
      '\\[\n',
      '\\(',
      '$a $b',
      '\\frac',
      '\\left(',
      'x^',
      '{',
      '&\\\\',
      "'",
      '\\left\\constructor',
    ];
    const times = units.flatMap(unit => {
      const text = unit.repeat(Math.ceil(30_000 / unit.length));
      return [text, `${text}x`, `x\n${text}`, `# ${text}x`, `\`${text}`].map(variant => {
        const start = performance.now();
        parseMarkdown(variant);
        parseTex(variant);
        highlight(variant.slice(0, 19_000), 'sql');
        return [performance.now() - start, unit];
      });
    });
    return times.reduce((a, b) => (a[0] > b[0] ? a : b));
  });
  assert.ok(slowest[0] < 1000, `${slowest[0]} ms for ${JSON.stringify(slowest[1])}`);
  await finish(page);
});

async function importFile(page, data) {
  await page.click('#open-settings-2');
  await page.locator('#settings input[type=file]').setInputFiles({
    name: 'chats.json',
    mimeType: 'application/json',
    buffer: Buffer.from(JSON.stringify(data)),
  });
  await page.locator('#settings').waitFor({ state: 'hidden' });
}

async function importChat(page, messages) {
  await importFile(page, { messages });
}
