// Elements, numbers and names. Text goes in as text nodes only: names are the user's.

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") Object.entries(value).forEach(([k, v]) => element.style.setProperty(k, v));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

function count(number) {
  return Number.isFinite(number) ? number.toLocaleString("en") : "–";
}

function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

function scaled(value, units) {
  for (const [unit, size] of units) {
    if (Math.abs(value) >= size) return `${digits(value / size)}\u00a0${unit}`;
  }
  const [unit, size] = units.at(-1);
  return `${digits(value / size)}\u00a0${unit}`;
}

// Three digits, without zeros at the end that say nothing.
function digits(value) {
  const size = Math.abs(value);
  const text = value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  return scaled(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
}

function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value === 0 ? "0\u00a0s" : scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]);
}

function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)}\u00a0%` : "0\u00a0%";
}

function factor(value) {
  return Number.isFinite(value) ? `${digits(value)}×` : "–";
}

// `dtype[2, 3]`, as torch writes it.
function form(node) {
  return node.dtype ? `${node.dtype}[${node.shape.join(", ")}]` : "–";
}

function shortLine(line) {
  return line.split(/[\\/]/).at(-1);
}

// A line of the user's, `file.py:12`: a link into their editor where it is told by its whole path.
function lineLink(line, shown = line) {
  const text = el("code", {}, shown);
  if (!/^(\/|[A-Za-z]:[\\/]).*:\d+$/.test(line) || !line.isWellFormed()) return text;
  const path = encodeURI(line.replaceAll("\\", "/").replace(/^\//, "")).replace(/[#?]/g, encodeURIComponent);
  return el("a", { class: "line", href: `vscode://file/${path}`, title: `${line}: open in VS Code` }, text);
}

// Text in which lines of the user's are links, or stand out.
function withLines(text) {
  return text.split(/(\S+\.\w+:\d+)/).map((part, i) => (i % 2 ? lineLink(part) : part));
}

// A table, and its rows. Roles are told, since on a narrow screen rows are shown as cards, with the columns' titles
// beside the cells, and what is not shown as a table would not be read as one.
function tableOf(caption, attributes, heads, body) {
  return el("table", { role: "table", ...attributes }, el("caption", { class: "hidden-text" }, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)), body);
}

const bodyOf = (...rows) => el("tbody", { role: "rowgroup" }, ...rows);

function headOf(column, attributes, ...content) {
  return el("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null, ...attributes }, ...content);
}

function rowOf(columns, cells, attributes = {}) {
  return el("tr", { role: "row", ...attributes }, cells.map((cell, i) => {
    const kind = i === 0 ? ["th", { scope: "row", role: "rowheader" }] : ["td", { role: "cell" }];
    const inner = el("span", { class: "cell" }, cell instanceof Object ? cell : String(cell));
    return el(kind[0], { ...kind[1], class: columns[i].number ? "number" : null, "data-title": columns[i].title }, inner);
  }));
}

function table(caption, columns, rows, attributes = {}) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    tableOf(caption, attributes, columns.map((c) => headOf(c, {}, c.title)), bodyOf(rows.map((cells) => rowOf(columns, cells)))));
}

// A `details` whose inside is made when it is first opened; `fill` makes it at once, where the event would be late.
function lazy(summary, make, attributes = {}) {
  const box = el("details", attributes, el("summary", {}, summary));
  box.fill = () => {
    box.fill = () => {};
    box.append(...[make()].flat());
  };
  box.addEventListener("toggle", () => box.fill(), { once: true });
  return box;
}

// Fills a frame with what is made for its width, now and whenever that changes.
function drawnToWidth(frame, make) {
  const draw = () => frame.replaceChildren(make(frame.clientWidth || 480));
  new ResizeObserver(draw).observe(frame);
  draw();
}
