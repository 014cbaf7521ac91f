// The graph as boxes in boxes: region, modules, nodes. Links run between the children of one box.

const REGIONS = ["input", "prologue", "forward", "backward", "gradient sync", "clipping", "other", "optimizer"];
const LOOSE_MOST = 6; // nodes beside groups, before they get a group of their own
const CHILDREN_MOST = 120; // nodes in one box; more are cut into runs
const START_BOXES = 36; // boxes that the first view shows, about; on a phone
const START_SMALL = 8;

function buildTree(report) {
  const { paths, guessed } = pathsOf(report);
  const tree = { regions: new Map(), leaves: new Map(), items: new Map(), guessed, number: 0, edges: [], dropped: 0 };
  tree.root = box(tree, null, "", "");
  tree.root.open = true;
  for (const region of [...REGIONS, ...new Set(report.graph.map((n) => n.region))]) {
    if (!tree.regions.has(region) && report.graph.some((n) => n.region === region)) {
      tree.regions.set(region, box(tree, tree.root, region, region));
    }
  }
  for (const node of report.graph) {
    let at = tree.regions.get(node.region);
    for (const part of paths.get(node.name)) {
      if (!at.named.has(part)) at.named.set(part, box(tree, at, part, node.region));
      at = at.named.get(part);
    }
    const leaf = { id: `n${tree.number++}`, leaf: true, node, label: leafLabel(node), region: node.region, parent: at, count: 1 };
    at.children.push(leaf);
    tree.leaves.set(node.name, leaf);
  }
  for (const region of tree.regions.values()) tidy(tree, region, report.step);
  measure(tree.root, 0, []);
  index(tree, tree.root);
  link(tree, report);
  openAtStart(tree);
  return tree;
}

// Inside its module's box, a parameter needs its own name only.
function leafLabel(node) {
  if (!node.parameter) return node.name;
  if (node.op === "data") return node.parameter;
  const last = node.parameter.split(".").at(-1);
  return node.op === "parameter" ? last : `${last}, ${node.op}`;
}

// The whole name: of an input what the user calls it.
function titleOf(node) {
  return !node.parameter ? node.name : node.op === "parameter" || node.op === "data" ? node.parameter : `${node.parameter}, ${node.op}`;
}

function box(tree, parent, label, region) {
  const made = { id: `g${tree.number++}`, leaf: false, label, region, parent, children: [], named: new Map(), links: new Map(), open: false, stale: true };
  if (parent) parent.children.push(made);
  return made;
}

// One box for a chain of boxes with nothing else inside, a box for loose nodes, and runs of what is too many.
function tidy(tree, group, step) {
  const isRegion = group.parent === tree.root;
  while (!isRegion && group.children.length === 1 && !group.children[0].leaf) {
    const [only] = group.children;
    group.label += `.${only.label}`;
    group.children = only.children;
    for (const child of group.children) child.parent = group;
  }
  for (const child of group.children) if (!child.leaf) tidy(tree, child, step);
  const loose = group.children.filter((c) => c.leaf);
  const groups = group.children.filter((c) => !c.leaf);
  if (isRegion && loose.length > LOOSE_MOST && groups.length && group.region !== "input") {
    const name = { optimizer: "shared", "gradient sync": "no bucket" }[group.region] || `${step}, no module`;
    gather(tree, group, loose, name);
  } else if (loose.length > CHILDREN_MOST) {
    for (let i = 0; i < loose.length; i += CHILDREN_MOST) {
      const part = loose.slice(i, i + CHILDREN_MOST);
      gather(tree, group, part, `${part[0].label} … ${part.at(-1).label}`);
    }
  }
}

function gather(tree, group, leaves, name) {
  const taken = new Set(leaves);
  const at = group.children.indexOf(leaves[0]);
  const made = box(tree, null, name, group.region);
  made.parent = group;
  made.children = leaves;
  for (const leaf of leaves) leaf.parent = made;
  group.children.splice(at, 0, made);
  group.children = group.children.filter((c) => !taken.has(c));
  if (leaves.length > CHILDREN_MOST) tidy(tree, made, name);
}

function measure(item, depth, path) {
  item.depth = depth;
  if (item.leaf) {
    item.programs = new Set(item.node.programs);
    return 1;
  }
  item.path = depth > 1 ? [...path, item.label] : [];
  item.count = item.children.reduce((sum, child) => sum + measure(child, depth + 1, item.path), 0);
  item.programs = new Set(item.children.flatMap((child) => [...child.programs]));
  return item.count;
}

function index(tree, item) {
  tree.items.set(item.id, item);
  for (const child of item.children || []) index(tree, child);
}

function link(tree, report) {
  for (const node of report.graph) {
    const to = tree.leaves.get(node.name);
    for (const name of node.inputs) {
      const from = tree.leaves.get(name);
      if (!from) { tree.dropped += 1; continue; }
      tree.edges.push({ from, to, bytes: from.node.bytes });
      let [a, b] = [from, to];
      while (a.depth > b.depth) a = a.parent;
      while (b.depth > a.depth) b = b.parent;
      while (a.parent !== b.parent) [a, b] = [a.parent, b.parent];
      if (a === b) continue;
      const key = `${a.id}>${b.id}`;
      const known = a.parent.links.get(key) || { from: a, to: b, weight: 0 };
      known.weight += 1;
      a.parent.links.set(key, known);
    }
  }
}

// Regions first, then level by level what fits, siblings together. Inputs and update stay closed: little to see there.
function openAtStart(tree) {
  const most = innerWidth < 700 ? START_SMALL : START_BOXES;
  const worth = (c) => !c.leaf && c.children.filter((inner) => inner.leaf).length * 2 <= c.children.length;
  const regions = [...tree.regions.values()];
  const levels = regions.filter((r) => r.region !== "input" && r.region !== "optimizer").map((r) => [r]);
  let boxes = regions.length;
  while (levels.length) {
    const level = levels.shift();
    const more = level.reduce((sum, group) => sum + group.children.length, 0);
    if (boxes + more > most) continue;
    boxes += more;
    for (const group of level) {
      setOpen(group, true);
      if (group.region === "forward" || group.region === "backward") levels.push(group.children.filter(worth));
    }
  }
}

function setOpen(group, open) {
  group.open = open;
  for (let at = group; at; at = at.parent) at.stale = true;
}

// The outermost box round an item that hides its inside, or the item itself.
function outermost(item, hides) {
  let found = item;
  for (let at = item.parent; at; at = at.parent) if (hides(at)) found = at;
  return found;
}

// What stands for an item: the outermost closed box round it, or itself.
const standIn = (item) => outermost(item, (group) => !group.open);

function reveal(item) {
  for (let at = item.parent; at; at = at.parent) if (!at.open) setOpen(at, true);
}
