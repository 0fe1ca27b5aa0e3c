// SPDX-License-Identifier: Apache-2.0
// Parses every Mermaid diagram of Markdown pages with Mermaid's own parser, as `make test-pages` does:
//
//   node scripts/check_diagrams.mjs DIRECTORY PAGE.md...
//
// DIRECTORY has node_modules with mermaid and jsdom. Prints page, line and cause of each diagram that does not parse.
// Exit status: 0 if there are diagrams and all parse, else 1.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [directory, ...pages] = process.argv.slice(2);
const { resolve: find } = createRequire(resolve(directory, "package.json"));
const { JSDOM } = await import(pathToFileURL(find("jsdom")));
// Mermaid looks for a browser as it is imported.
const { window } = new JSDOM("<!doctype html><body></body>");
Object.assign(globalThis, { window, document: window.document });
const { default: mermaid } = await import(pathToFileURL(find("mermaid")));

let diagrams = 0;
let wrong = 0;
for (const page of pages) {
    const text = readFileSync(page, "utf8");
    for (const block of text.matchAll(/^```mermaid\n(.*?)^```$/gms)) {
        diagrams += 1;
        try {
            await mermaid.parse(block[1]);
        } catch (error) {
            wrong += 1;
            const line = text.slice(0, block.index).split("\n").length;
            console.error(`${page}:${line}: ${error.message}`);
        }
    }
}
console.log(`${diagrams} diagrams, ${wrong} that do not parse`);
process.exit(wrong || !diagrams ? 1 : 0);
