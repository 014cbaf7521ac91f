// Two programs beside each other. A line stands for the same in both where it reads the same: what is in both in the
// same order is found by the lines that each has once (patience diff), and by what lies next to these.

const ENDS = /;  (?:\w+ = )+None(?=\s*(?:#.*)?$)/; // where values end, which differs with what is left out

// Inputs by what the user calls them; one whose name a node has keeps its own.
function usersNames(report) {
  const taken = new Set(report.graph.map((n) => n.name));
  const inputs = report.graph.filter((n) => n.region === "input" && n.parameter && !taken.has(n.parameter));
  return new Map(inputs.map((n) => [n.name, n.op === "accumulator" ? `accumulator[${n.parameter}]` : n.parameter]));
}

function readableLines(code, names) {
  const inputs = (_, given) => `def forward(${plural(given.split(", ").length - 1, "input")}):`;
  return code.trim().split("\n").filter((line) => line.trim()).map((line) =>
    line.replace(ENDS, "").replaceAll("torch.ops.", "").trimEnd().replace(/^def forward\((.*)\):$/, inputs)
      .replace(/\b\w+\b/g, (word) => names.get(word) ?? word));
}

// Stretches in their order: {same, left, right}; one that is not the same has lines on one side only.
function aligned(left, right) {
  const found = [];
  const add = (same, a, b) => {
    const last = found.at(-1);
    if (!a.length && !b.length) return;
    if (last && last.same === same && !last.left.length === !a.length) {
      last.left.push(...a);
      last.right.push(...b);
    } else found.push({ same, left: [...a], right: [...b] });
  };
  let [i, j] = [0, 0];
  for (const [nextI, nextJ] of [...anchors(left, right), [left.length, right.length]]) {
    while (i < nextI && j < nextJ && left[i] === right[j]) add(true, [left[i++]], [right[j++]]);
    add(false, left.slice(i, nextI), []);
    add(false, [], right.slice(j, nextJ));
    [i, j] = [nextI, nextJ];
  }
  return found;
}

// Places of lines that both have once, in rising order on both sides: the longest such row.
function anchors(left, right) {
  const once = (lines) => {
    const places = new Map();
    lines.forEach((line, i) => places.set(line, places.has(line) ? -1 : i));
    return places;
  };
  const there = once(right);
  const pairs = [...once(left)].map(([line, i]) => [i, there.get(line) ?? -1]).filter(([i, j]) => i >= 0 && j >= 0);
  const ends = []; // by length of a row: the pair that it ends in, with the least place on the right
  for (const [i, j] of pairs) {
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle].j < j) low = middle + 1;
      else high = middle;
    }
    ends[low] = { i, j, before: ends[low - 1] };
  }
  const row = [];
  for (let at = ends.at(-1); at; at = at.before) row.push([at.i, at.j]);
  return row.reverse();
}
