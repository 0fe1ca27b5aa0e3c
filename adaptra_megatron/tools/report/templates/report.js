"use strict";
// Everything on the page can be read without this: it only folds timelines into tabs and says what lies under a point.
document.documentElement.classList.add("has-script");
const panels = [...document.querySelectorAll(".panel")];
const tabs = [...document.querySelectorAll(".tabs [role=tab]")];
function show(index) {
  panels.forEach((panel, number) => panel.classList.toggle("shown", number === index));
  tabs.forEach((tab, number) => tab.setAttribute("aria-selected", String(number === index)));
}
tabs.forEach((tab, index) => tab.addEventListener("click", () => show(index)));
if (panels.length) show(Number(document.querySelector(".tabs").dataset.first));
const zoom = document.querySelector(".zoom");
if (zoom) zoom.addEventListener("click", () => {
  const zoomed = zoom.getAttribute("aria-pressed") !== "true";
  zoom.setAttribute("aria-pressed", String(zoomed));
  panels.forEach((panel) => panel.classList.toggle("zoomed", zoomed));
});

const tip = document.querySelector(".tip");
function milliseconds(micros) {
  return micros >= 1e6 ? (micros / 1e6).toFixed(3) + " s" : (micros / 1e3).toFixed(micros < 1e4 ? 2 : 1) + " ms";
}
function under(data, svg, event) {
  const box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) * data.width / box.width, y = (event.clientY - box.top) * data.height / box.height;
  const stage = data.tops.findIndex((top) => y >= top && y <= top + data.row);
  if (stage < 0) return null;
  const moment = (x - data.left) / data.scale;
  let low = 0, high = data.rows[stage].length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.rows[stage][middle][0] <= moment) low = middle + 1; else high = middle;
  }
  const entry = data.rows[stage][low - 1];
  return entry && moment <= entry[1] ? { stage, entry } : null;
}
panels.forEach((panel) => {
  const source = panel.querySelector("script"), svg = panel.querySelector("svg");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  function point(event) {
    const found = under(data, svg, event);
    tip.hidden = !found;
    if (!found) return;
    const [start, end, text] = found.entry;
    tip.textContent = `stage ${found.stage}: ${data.texts[text]}, ${milliseconds(end - start)} (from ${milliseconds(start)} on)`;
    tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
});
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
