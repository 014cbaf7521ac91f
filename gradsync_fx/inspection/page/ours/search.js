// Search by parameter, node, module or line: a combobox with a list of what fits.

const RESULTS = 12;

function makeSearch(tree, report, choose) {
  const entries = [
    ...report.parameters.map((p) => ({ kind: "parameter", text: p.name, parameter: p })),
    ...[...tree.items.values()].filter((i) => !i.leaf && i.depth > 1).map((i) =>
      ({ kind: `module, ${i.region}`, text: i.path.join("."), item: i })),
    ...[...tree.leaves.values()].filter((leaf) => leaf.node.op !== "parameter").map((leaf) => ({ kind: leaf.region, text: titleOf(leaf.node), item: leaf })),
    ...[...byLine(tree)].map(([line, leaves]) => ({ kind: plural(leaves.length, "node"), text: shortLine(line), also: line, line, leaves })),
  ];
  for (const entry of entries) entry.lower = (entry.also || entry.text).toLowerCase();
  const inputs = new Map([...tree.leaves.values()].filter((l) => l.node.op === "parameter").map((l) => [l.node.parameter, l]));
  const list = el("ul", { id: "search-list", role: "listbox", "aria-label": "What was found", hidden: true });
  const field = el("input", {
    id: "search", type: "search", placeholder: "Parameter, node, module or file:line", autocomplete: "off", spellcheck: "false", role: "combobox",
    "aria-label": "Search the graph", "aria-expanded": "false", "aria-controls": "search-list", "aria-autocomplete": "list",
  });
  const told = el("span", { class: "hidden-text", role: "status" });
  let found = [];
  let active = -1;

  const close = () => {
    list.hidden = true;
    active = -1;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
  };
  const take = (entry) => {
    close();
    field.value = entry.text;
    choose({ ...entry, item: entry.item || inputs.get(entry.text) });
  };
  const activate = (to) => {
    active = (to + found.length) % found.length;
    [...list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === active)));
    list.children[active].scrollIntoView({ block: "nearest" });
    field.setAttribute("aria-activedescendant", `search-${active}`);
  };
  const update = () => {
    const wanted = field.value.trim().toLowerCase();
    if (!wanted) { close(); return; }
    const scored = [];
    for (const entry of entries) {
      const at = entry.lower.indexOf(wanted);
      const start = at === 0 || (entry.line && entry.text.toLowerCase().startsWith(wanted));
      if (at >= 0) scored.push([(entry.text.toLowerCase() === wanted ? 0 : start ? 1 : 2) + (entry.kind === "parameter" ? 0 : 0.5), entry]);
    }
    scored.sort((a, b) => a[0] - b[0]);
    found = scored.slice(0, RESULTS).map(([, entry]) => entry);
    active = -1;
    list.replaceChildren(...found.map((entry, i) => el("li", {
      id: `search-${i}`, role: "option", "aria-selected": "false", mousedown: (event) => event.preventDefault(), click: () => take(entry),
    }, el("span", {}, entry.text), el("small", {}, entry.kind))));
    if (!found.length) list.append(el("li", { class: "none" }, "nothing of that name"));
    else if (scored.length > RESULTS) list.append(el("li", { class: "none", "aria-hidden": "true" }, `and ${count(scored.length - RESULTS)} more`));
    list.hidden = false;
    told.textContent = found.length ? `${count(scored.length)} found` : "nothing of that name";
    field.setAttribute("aria-expanded", "true");
  };
  field.addEventListener("input", update);
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter") {
      if (list.hidden) update();
      if (found.length && !list.hidden) take(found[Math.max(active, 0)]);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && found.length && !list.hidden) {
      event.preventDefault();
      activate(active < 0 && event.key === "ArrowUp" ? found.length - 1 : active + (event.key === "ArrowDown" ? 1 : -1));
    }
  });
  return el("div", { class: "search" }, field, list, told);
}

// The user's lines, each with its nodes.
function byLine(tree) {
  const found = new Map();
  for (const leaf of tree.leaves.values()) {
    if (!leaf.node.line) continue;
    if (!found.has(leaf.node.line)) found.set(leaf.node.line, []);
    found.get(leaf.node.line).push(leaf);
  }
  return found;
}
