// Where boxes stand. Each open box is laid out by itself by dagre and kept until something in it opens or closes, so a
// click costs one small layout. Regions are lanes: forward runs to the right, backward under it to the left.

const PAD = 14;
const TITLE = 24;
const LANE_GAP = 46;
const SIMPLEX_MOST = 16;
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

function labelOf(item) {
  return item.leaf ? item.label : `${item.label}  ·  ${count(item.count)}`;
}

function sizeOf(item) {
  if (!item.leaf && item.open) {
    const inner = arrange(item);
    return { width: Math.max(inner.width, textWidth(labelOf(item), 12)) + 2 * PAD, height: inner.height + 2 * PAD + TITLE };
  }
  const width = Math.min(Math.max(textWidth(labelOf(item), 12) * (item.leaf ? 1 : 1.1) + 24, 64), 266);
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
  const graph = new dagre.graphlib.Graph();
  const ranker = linked.size > SIMPLEX_MOST ? "longest-path" : "network-simplex"; // the second is finer, and slow
  graph.setGraph({ rankdir: direction(group, linked), nodesep: 14, ranksep: 30, marginx: 0, marginy: 0, ranker });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const item of group.children) if (linked.has(item)) graph.setNode(item.id, { ...sizes.get(item), item });
  for (const { from, to, weight } of group.links.values()) graph.setEdge(from.id, to.id, { weight: Math.min(weight, 8) });
  dagre.layout(graph);
  const at = new Map();
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const id of graph.nodes()) {
    const { x, y, width, height } = graph.node(id);
    left = Math.min(left, x - width / 2);
    top = Math.min(top, y - height / 2);
    right = Math.max(right, x + width / 2);
    bottom = Math.max(bottom, y + height / 2);
  }
  for (const id of graph.nodes()) {
    const { x, y, width, height, item } = graph.node(id);
    at.set(item, { x: x - left, y: y - top, width, height });
  }
  return { at, width: right - left, height: bottom - top };
}

// Modules run with their lane; the nodes of one box run whichever way fills the screen better.
function direction(group, linked) {
  const across = group.region === "backward" ? "RL" : "LR";
  const boxes = [...linked].filter((c) => !c.leaf).length;
  if (linked.size <= 14 && (group.depth === 1 || boxes > linked.size / 2)) return across;
  const ranks = new Map();
  for (const { from, to } of group.links.values()) ranks.set(to, Math.max(ranks.get(to) || 0, (ranks.get(from) || 0) + 1));
  const depth = 1 + Math.max(0, ...ranks.values());
  const breadth = linked.size / depth;
  const down = (breadth * 150) / (depth * 58);
  const along = (depth * 180) / (breadth * 42);
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

// All visible items with their centres on the sheet; open boxes as frames.
function placed(tree) {
  const found = [];
  const descend = (group, left, top) => {
    for (const [item, place] of arrange(group).at) {
      const x = left + place.x;
      const y = top + place.y;
      const open = !item.leaf && item.open;
      found.push({ item, x, y, width: place.width, height: place.height, frame: open });
      if (open) descend(item, x - place.width / 2 + PAD, y - place.height / 2 + PAD + TITLE);
    }
  };
  descend(tree.root, 0, 0);
  return found;
}
