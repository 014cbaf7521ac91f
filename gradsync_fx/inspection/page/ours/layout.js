// Where boxes stand. Each open box is laid out by itself by dagre and kept until something in it opens or closes, so a
// click costs one small layout. Regions are lanes: forward runs to the right, backward under it to the left.

const PAD = 14;
const TITLE = 24;
const LANE_GAP = 46;
const SIMPLEX_MOST = 16;
const WIDTH_STEP = 24; // widths in steps: boxes of like layers are of one size then, and share one layout
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
const layouts = new Map(); // what dagre found, by all that it was given

function labelOf(item) {
  return item.leaf ? item.label : `${item.label}  ·  ${count(item.count)}`;
}

function sizeOf(item) {
  if (!item.leaf && item.open) {
    const inner = arrange(item);
    return { width: Math.max(inner.width, textWidth(labelOf(item), 12)) + 2 * PAD, height: inner.height + 2 * PAD + TITLE };
  }
  const wanted = textWidth(labelOf(item), 12) * (item.leaf ? 1 : 1.1) + 24;
  const width = Math.min(Math.max(Math.ceil(wanted / WIDTH_STEP) * WIDTH_STEP, 72), 264);
  return { width, height: item.leaf ? 28 : 38 };
}

function textWidth(text, size) {
  if (!widths.has(text)) {
    pen.font = `${size}px system-ui, sans-serif`;
    widths.set(text, pen.measureText(text).width);
  }
  return widths.get(text);
}

// The children's centres, from the top left of the inside.
function arrange(group) {
  if (!group.stale && group.layout) return group.layout;
  const sizes = new Map(group.children.map((c) => [c, sizeOf(c)]));
  group.layout = group.depth === 0 ? lanes(group, sizes) : inside(group, sizes);
  group.stale = false;
  return group.layout;
}

function lanes(group, sizes) {
  const width = Math.max(...group.children.map((c) => sizes.get(c).width), 1);
  const at = new Map();
  let y = 0;
  for (const child of group.children) {
    const size = sizes.get(child);
    at.set(child, { x: width / 2, y: y + size.height / 2, ...size });
    y += size.height + LANE_GAP;
  }
  return { at, width, height: Math.max(y - LANE_GAP, 0) };
}

function inside(group, sizes) {
  const linked = new Set([...group.links.values()].flatMap((l) => [l.from, l.to]));
  const alone = group.children.filter((c) => !linked.has(c));
  const flow = linked.size ? layered(group, linked, sizes) : { at: new Map(), width: 0, height: 0 };
  if (!alone.length) return flow;
  const below = grid(alone, sizes, Math.max(flow.width, 300));
  const top = flow.height ? flow.height + 26 : 0;
  const at = flow.at;
  for (const [item, place] of below.at) at.set(item, { ...place, y: place.y + top });
  return { at, width: Math.max(flow.width, below.width), height: top + below.height };
}

function layered(group, linked, sizes) {
  const items = group.children.filter((c) => linked.has(c));
  const place = new Map(items.map((item, i) => [item, i]));
  const boxes = items.map((item) => sizes.get(item));
  const links = [...group.links.values()].map((l) => [place.get(l.from), place.get(l.to), Math.min(l.weight, 8)]);
  const rankdir = direction(group, linked, sizes);
  const key = JSON.stringify([rankdir, boxes, links]);
  if (!layouts.has(key)) layouts.set(key, layeredBoxes(rankdir, boxes, links));
  const { centres, width, height } = layouts.get(key);
  return { at: new Map(items.map((item, i) => [item, { ...centres[i], ...boxes[i] }])), width, height };
}

function layeredBoxes(rankdir, boxes, links) {
  const graph = new dagre.graphlib.Graph();
  const ranker = boxes.length > SIMPLEX_MOST ? "longest-path" : "network-simplex"; // the second is finer, and slow
  graph.setGraph({ rankdir, nodesep: 14, ranksep: 30, marginx: 0, marginy: 0, ranker });
  graph.setDefaultEdgeLabel(() => ({}));
  boxes.forEach((size, i) => graph.setNode(String(i), { ...size }));
  for (const [from, to, weight] of links) graph.setEdge(String(from), String(to), { weight });
  dagre.layout(graph);
  const found = boxes.map((_, i) => graph.node(String(i)));
  const least = (side) => Math.min(...found.map(side));
  const most = (side) => Math.max(...found.map(side));
  const [left, top] = [least((n) => n.x - n.width / 2), least((n) => n.y - n.height / 2)];
  return {
    centres: found.map((n) => ({ x: n.x - left, y: n.y - top })),
    width: most((n) => n.x + n.width / 2) - left, height: most((n) => n.y + n.height / 2) - top,
  };
}

// Modules run with their lane; nodes, and modules inside a module that are open, whichever way fills the screen better.
function direction(group, linked, sizes) {
  const across = group.region === "backward" ? "RL" : "LR";
  const boxes = [...linked].filter((c) => !c.leaf).length;
  const closed = ![...linked].some((c) => c.open);
  if (linked.size <= 14 && (group.depth === 1 || (closed && boxes > linked.size / 2))) return across;
  const ranks = new Map();
  for (const { from, to } of group.links.values()) ranks.set(to, Math.max(ranks.get(to) || 0, (ranks.get(from) || 0) + 1));
  const depth = 1 + Math.max(0, ...ranks.values());
  const breadth = linked.size / depth;
  const mean = (side) => [...linked].reduce((sum, c) => sum + sizes.get(c)[side], 0) / linked.size;
  const [width, height] = [mean("width"), mean("height")];
  const down = (breadth * (width + 14)) / (depth * (height + 30));
  const along = (depth * (width + 30)) / (breadth * (height + 14));
  return Math.abs(Math.log(down / 1.6)) <= Math.abs(Math.log(along / 1.6)) ? "TB" : across;
}

function grid(items, sizes, width) {
  const area = items.reduce((sum, i) => sum + (sizes.get(i).width + 14) * (sizes.get(i).height + 12), 0);
  const limit = Math.max(width, Math.sqrt(area * 2.2));
  const at = new Map();
  let [x, y, row, right] = [0, 0, 0, 0];
  for (const item of items) {
    const size = sizes.get(item);
    if (x > 0 && x + size.width > limit) [x, y, row] = [0, y + row + 12, 0];
    at.set(item, { x: x + size.width / 2, y: y + size.height / 2, ...size });
    x += size.width + 14;
    row = Math.max(row, size.height);
    right = Math.max(right, x - 14);
  }
  return { at, width: right, height: y + row };
}

// Gives all that open boxes hold its place on the sheet: centre and size. Returns how many items that is.
function place(tree) {
  let number = 0;
  const descend = (group, left, top) => {
    for (const [item, { x, y, width, height }] of arrange(group).at) {
      item.at = { x: left + x, y: top + y, width, height };
      number += 1;
      if (!item.leaf && item.open) descend(item, item.at.x - width / 2 + PAD, item.at.y - height / 2 + PAD + TITLE);
    }
  };
  descend(tree.root, 0, 0);
  return number;
}
