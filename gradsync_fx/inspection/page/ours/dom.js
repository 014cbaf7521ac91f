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

// Text in which `file.py:12` stands out.
function withLines(text) {
  return text.split(/(\S+\.\w+:\d+)/).map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

function table(caption, columns, rows, attributes = {}) {
  const head = columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.title));
  const body = rows.map((row) =>
    el("tr", {}, row.map((cell, i) => {
      const inner = cell && cell.nodeType ? cell : String(cell);
      const first = i === 0 ? { scope: "row" } : {};
      return el(i === 0 ? "th" : "td", { ...first, class: columns[i].number ? "number" : null }, inner);
    })),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", attributes, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

// A `details` whose inside is made when it is first opened.
function lazy(summary, make, attributes = {}) {
  const box = el("details", attributes, el("summary", {}, summary));
  box.addEventListener("toggle", () => box.append(...[make()].flat()), { once: true });
  return box;
}
