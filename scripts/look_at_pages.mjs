// SPDX-License-Identifier: Apache-2.0
// Pictures of pages in a headless Chromium at two widths, light and dark, and axe-core's findings about them.
//
//   node scripts/look_at_pages.mjs DIRECTORY PAGE.html...
//
// Exit status 1 if axe-core has a serious or critical finding, or a page is wider than its screen. Needs puppeteer-core
// and axe-core in DIRECTORY (npm install --prefix DIRECTORY), and Chromium at $CHROMIUM or /usr/bin/chromium.
import { createRequire } from "node:module";
import { basename, resolve } from "node:path";

const [directory, ...pages] = process.argv.slice(2).map((path) => resolve(path));
const require = createRequire(`${directory}/`);
const puppeteer = require("puppeteer-core");
const axe = require.resolve("axe-core/axe.min.js");

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
});
let found = 0;
for (const path of pages) {
  for (const width of [1400, 420]) {
    for (const scheme of ["light", "dark"]) {
      const page = await browser.newPage();
      await page.setViewport({ width, height: 900 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(`file://${path}`);
      const name = `${basename(path, ".html")}-${width}-${scheme}`;
      await page.screenshot({ path: `${directory}/${name}.png`, fullPage: true });
      await page.addScriptTag({ path: axe });
      const { violations } = await page.evaluate(() => window.axe.run());
      for (const { id, impact, help, nodes } of violations) {
        const counts = ["serious", "critical"].includes(impact);
        found += counts;
        console.log(`${name}: ${impact}: ${id}: ${help} (${nodes.length}, such as ${nodes[0].html.slice(0, 160)})`);
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      if (wide > 0) {
        found += 1;
        console.log(`${name}: the page is ${wide} pixels wider than the screen`);
      }
      await page.close();
    }
  }
}
await browser.close();
console.log(found ? `${found} serious findings` : "no serious finding");
process.exit(found ? 1 : 0);
