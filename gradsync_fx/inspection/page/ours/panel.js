// The panel beside the graph: what is picked, with its neighbours as buttons, so that keys alone can walk the graph.

const LISTED = 24; // neighbours shown before "and n more"

function makePanel(box, view, report) {
  const { tree } = view;
  const bucketOf = new Map(report.collectives.flatMap((c) => [...c.nodes, ...c.parameters.map(asParameter)].map((name) => [name, c])));
  const readers = new Map();
  for (const { from, to } of tree.edges) {
    if (!readers.has(from)) readers.set(from, []);
    readers.get(from).push(to);
  }
  const panel = { select: () => {}, pick: () => {} }; // set by main.js: what a click on a neighbour, and on a bucket, does
  const show = (...content) => {
    box.replaceChildren(...content.flat().filter(Boolean));
    box.scrollTop = 0;
  };
  const link = (item) => el("li", {}, el("button", { type: "button", class: "link", click: () => panel.select(item) },
    el("i", { class: `swatch ${slug(item.region)}`, "aria-hidden": "true" }), item.leaf ? item.label : labelOf(item)));
  const links = (title, items) => items.length === 0 ? [] : [
    el("h4", {}, `${title} `, el("small", {}, count(items.length))),
    rest(items, link)];

  const reducedIn = (c) => (c ? [el("h4", {}, "Reduced in"), el("ul", { class: "links" }, el("li", {},
    el("button", { type: "button", class: "link", click: () => panel.pick(c) }, el("i", { class: "swatch gradient-sync", "aria-hidden": "true" }),
      `bucket ${c.bucket}, ${bytes(c.bytes)}, ${plural(c.parameters.length, "parameter")}`)))] : []);

  panel.overview = () => show(
    el("h3", {}, "Regions"),
    el("p", { class: "muted" }, "Click a box for what it is, double-click to open it."),
    el("ul", { class: "links" }, [...tree.regions.values()].map(link)),
    el("p", { class: "muted" }, plural(tree.leaves.size, "node"), " of the boundary program; inputs that hold optimizer state or scalars are left out."));

  panel.group = (item) => show(
    el("h3", {}, item.label),
    facts([["Region", item.region], ["Module", (item.path || []).join(".")], ["Nodes", count(item.count)]]),
    el("p", { class: "actions" }, el("button", { type: "button", click: () => { view.toggle(item); panel.group(item); } }, item.open ? "Close" : "Open")),
    links("Inside", item.children),
    item.parent && item.parent.parent ? links("In", [item.parent]) : null);

  panel.node = (leaf) => {
    const n = leaf.node;
    const c = bucketOf.get(n.name) || bucketOf.get(asParameter(n.parameter));
    const guess = tree.guessed.has(n.name) ? ` (${MODULE_GUESS})` : "";
    const path = leaf.parent.path || [];
    show(
      el("h3", {}, titleOf(n)),
      facts([
        ["Node", n.parameter ? n.name : ""], ["Op", n.op], ["Region", n.region], ["Value", form(n)], ["Size", n.dtype ? `${bytes(n.bytes)} (${count(n.bytes)} bytes)` : ""],
        ["Module", n.module || (guess && path.length ? path.join(".") + guess : "")], ["Line", n.line && lineLink(n.line)], ["Programs", n.programs.join(", ")],
      ]),
      reducedIn(c),
      links("Reads", n.inputs.map((name) => tree.leaves.get(name)).filter(Boolean)),
      links("Read by", readers.get(leaf) || []),
      links("In", [leaf.parent]));
  };

  panel.bucket = (c, leaves) => show(
    el("h3", {}, `Bucket ${c.bucket}`),
    facts([["Op", `all-reduce, ${c.op}`], ["Size", `${bytes(c.bytes)} of ${c.dtype}`], ["Ranks", `${count(c.ranks)}${c.group ? `, group ${c.group}` : ""}`],
      ["Stands in", Object.entries(c.programs).map(([name, at]) => `${name}, node ${at}`).join("; ")]]),
    links("Its nodes", leaves),
    el("h4", {}, "Parameters ", el("small", {}, count(c.parameters.length))),
    rest(c.parameters, (name) => el("li", {}, name)));

  panel.parameter = (p) => show(
    el("h3", {}, p.name),
    facts([["Value", form(p)], ["Size", bytes(p.bytes)], ["Trained", p.trained ? "yes" : "no gradient in this step"], ["Sum in", p.accumulator_dtype], ["Optimizer", p.optimizer]]),
    reducedIn(bucketOf.get(asParameter(p.name))),
    el("p", { class: "muted" }, "It is no input of the step’s graph."));

  panel.line = (line, leaves) => show(
    el("h3", {}, lineLink(line, shortLine(line))),
    facts([["Nodes", count(leaves.length)], ["Modules", [...new Set(leaves.map((leaf) => leaf.node.module).filter(Boolean))].slice(0, 6).join(", ")]]),
    links("Its nodes", leaves));
  return panel;
}

const asParameter = (name) => `parameter ${name}`; // names of parameters beside those of nodes, which have no space

const slug = (region) => region.replace(" ", "-");

function facts(pairs) {
  return el("dl", {}, pairs.filter(([, value]) => value !== "" && value !== undefined).flatMap(([name, value]) =>
    [el("dt", {}, name), el("dd", {}, value.nodeType ? value : String(value))]));
}

function rest(items, make) {
  const list = el("ul", { class: "links" }, items.slice(0, LISTED).map(make));
  if (items.length <= LISTED) return list;
  const more = el("button", { type: "button", click: () => { more.parentElement.remove(); list.append(...items.slice(LISTED).map(make)); } },
    `and ${count(items.length - LISTED)} more`);
  list.append(el("li", {}, more));
  return list;
}
