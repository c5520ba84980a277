// Checks the chat page in a real browser against real servers. Prints one line per check. An
// argument selects the checks whose names contain it.

import { close, closePages, launch } from './browser.mjs';
import { chatChecks } from './chat_checks.mjs';
import { KEYS, loadChecks } from './load_checks.mjs';
import { cleanUp, startServer, tenantsFile } from './server.mjs';

/** One request runs, one waits, and the next one is refused. */
const ONE_AND_ONE = ['--max-running', '1', '--max-queued', '1'];

async function main() {
  const path = tenantsFile(KEYS, {
    slow: ['requests_per_minute = 20', 'request_burst = 1'],
    free: [],
  });
  await launch();
  // One after the other, because each measures the machine when it starts.
  const fast = await startServer();
  const slow = await startServer('--isa', 'scalar', '--threads', '1', ...ONE_AND_ONE);
  const tenants = await startServer('--tenants', path);
  const wanted = process.argv[2] ?? '';
  const checks = [...chatChecks, ...loadChecks].filter(([name]) => name.includes(wanted));
  let failures = 0;
  for (const [name, run] of checks) {
    const start = Date.now();
    try {
      await run({ fast, slow, tenants });
      console.log(`ok    ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failures += 1;
      console.log(`FAIL  ${name}\n${error.stack}`);
    }
    await closePages(); // An answer that still runs would disturb the next check.
  }
  console.log(`${checks.length - failures} of ${checks.length} checks of the page passed`);
  return failures;
}

let failures = 1;
try {
  failures = await main();
} finally {
  await close();
  cleanUp();
}
process.exit(failures ? 1 : 0);
