"use strict";
// HTML elements and number formats. Content from data is inserted as text, not as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes, then children; strings become text. `on...` are listeners. */
function make(tag, attributes = {}, ...children) {
  const node = ["svg", "line", "circle"].includes(tag)
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

/** Text escaped for Plotly, which interprets some tags. */
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** A name shortened to fit beside an axis. */
function brief(text, most = 24) {
  const whole = String(text);
  return plain(whole.length > most ? whole.slice(0, most - 1) + "…" : whole);
}

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const percent = (value, digits = 1) => (isNumber(value) ? fixed(100 * value, digits) : NONE);
const signed = (value, digits = 1) => (value < 0 ? "−" : "+") + fixed(Math.abs(value), digits);

/** As Python's format writes it, so that page and terminal agree: 8.25 is 8.2 and 8.75 is 8.8; toFixed gives 8.3. */
function fixed(value, digits = 1) {
  const halves = value * 2 ** (digits + 1); // an odd whole number exactly if the value lies halfway between two decimals
  if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(digits);
  const below = Math.floor(value * 10 ** digits);
  return ((below % 2 === 0 ? below : below + 1) / 10 ** digits).toFixed(digits);
}

/** Three significant digits, as fedgg.runfolder.measure writes them: 0.340, 12.3, 1234, 1.23e-7. */
function significant(value, digits = 3) {
  if (value === 0) return "0";
  return isPlain(value)
    ? fixed(value, decimals(value, digits))
    : value.toExponential(digits - 1).replace("e+", "e");
}
const isPlain = (value) => Math.abs(value) >= 1e-5 && Math.abs(value) < 1e6;
const decimals = (value, digits) => Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));

/** Four digits at most, without noise: 0.0123, 1.234, 12.3, 1234, 1.2e-7. */
function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? Math.ceil(Math.log10(size + 1)) : 3)));
}

function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 10) return fixed(seconds) + " s";
  if (seconds < 90) return seconds.toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

function megabytes(value) {
  if (!isNumber(value)) return NONE;
  return value > 0 && value < 1 ? String(Number(value.toPrecision(2))) : fixed(value);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** A button, a labelled select and a group of choices: real controls, reachable by keyboard. */
function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

function selection(text, options, chosen, onchange) {
  const select = make("select", { onchange: (event) => onchange(event.target.value) });
  for (const [value, shown] of options) {
    select.append(make("option", { value, selected: String(value) === String(chosen) }, shown));
  }
  return make("label", {}, text, select);
}

function choice(name, options, chosen, onchange) {
  const group = make("div", { class: "choice", role: "group", "aria-label": name });
  const press = (value) => {
    for (const other of group.children) other.setAttribute("aria-pressed", String(other.value === value));
    onchange(value);
  };
  for (const [value, shown] of options) {
    group.append(button(shown, () => press(value), { value, "aria-pressed": String(value === chosen) }));
  }
  return group;
}

/** A plain table: the first cell of a row is its heading. */
function table(caption, columns, rows) {
  const isText = columns.map((_, at) => rows.some((row) => /[A-Za-z]{2}/.test(String(row[at] ?? ""))));
  const cell = (tag, at, content, more = {}) =>
    make(tag, { class: isText[at] ? "text wrap" : null, ...more }, String(content ?? NONE));
  return make(
    "table",
    {},
    make("caption", {}, make("span", { class: "fit" }, caption)),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        columns.map((name, at) => cell("th", at, name, { scope: "col" })),
      ),
    ),
    make(
      "tbody",
      {},
      rows.map((row) =>
        make(
          "tr",
          {},
          row.map((content, at) => (at === 0 ? cell("th", at, content, { scope: "row" }) : cell("td", at, content))),
        ),
      ),
    ),
  );
}
