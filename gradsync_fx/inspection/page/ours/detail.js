// Which open boxes show their inside on the canvas. A small graph shows all of it. Of a large one, boxes that are out of
// view or too small to be read stay whole, so that what is drawn depends on the screen and not on the model.

const ALL_UP_TO = 700; // items
const READABLE = 36; // pixels on the screen: the side of the square that each item inside a box has, at the least
const MARGIN = 0.5; // of the view on each side, for short ways without drawing anew

// window: {zoom, pan, width, height} of the canvas. Returns the items to draw, and the groups that show their inside.
function detailOf(tree, number, window) {
  const whole = number <= ALL_UP_TO;
  const { zoom, pan, width, height } = window;
  const readable = ({ at, children }) => {
    const [x, y] = [at.x * zoom + pan.x, at.y * zoom + pan.y];
    const [w, h] = [at.width * zoom, at.height * zoom];
    return w * h >= children.length * READABLE ** 2 && x + w / 2 > -MARGIN * width && x - w / 2 < (1 + MARGIN) * width
      && y + h / 2 > -MARGIN * height && y - h / 2 < (1 + MARGIN) * height;
  };
  const shown = [];
  const inside = new Set([tree.root]);
  const descend = (group) => {
    for (const item of group.children) {
      shown.push(item);
      if (item.leaf || !item.open || !(whole || readable(item))) continue;
      inside.add(item);
      descend(item);
    }
  };
  descend(tree.root);
  return { shown, inside };
}

// What is drawn for an item: the outermost box round it that does not show its inside, or itself.
const drawnAs = (item, inside) => outermost(item, (group) => !inside.has(group));

function boxElement(item, view) {
  const frame = view.inside.has(item);
  const { x, y, width, height } = item.at;
  const label = labelOf(item);
  const classes = [
    ...frame ? ["frame"] : item.leaf ? [] : ["group"],
    ...frame && item.depth === 1 ? ["lane"] : [],
    ...item.open && !frame ? ["whole"] : [],
    ...item.leaf && item.region === "input" ? ["input-node"] : [],
    ...item.leaf && view.reductions.has(item.node.name) ? ["collective"] : [],
  ];
  const font = Math.max(12, Math.min((1.5 * width) / label.length, 0.4 * height));
  const data = { id: item.id, label, region: item.region, width, height, frame, font, name: item.leaf ? item.node.name : "" };
  return { group: "nodes", data, position: { x, y }, classes };
}

// One edge for all values that flow between two boxes that are drawn.
function edgeElements(tree, inside) {
  const found = new Map();
  const drawn = new Map();
  const end = (item) => {
    if (!drawn.has(item)) drawn.set(item, drawnAs(item, inside));
    return drawn.get(item);
  };
  for (const { from, to, bytes: size } of tree.edges) {
    const [a, b] = [end(from), end(to)];
    if (a === b) continue;
    const key = `${a.id}>${b.id}`;
    const known = found.get(key) || { a, b, values: 0, size: 0 };
    known.values += 1;
    known.size += size;
    found.set(key, known);
  }
  return [...found].map(([key, { a, b, values, size }]) => ({
    group: "edges",
    data: { id: key, source: a.id, target: b.id, values, bytes: size, width: Math.min(1 + Math.log10(1 + values) * 1.4, 4) },
    classes: a.region === b.region ? [] : a.region === "input" ? ["far", "given"] : ["far"],
  }));
}
