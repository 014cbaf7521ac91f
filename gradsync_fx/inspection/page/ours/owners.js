// Where each node stands in its region: a path of names, for the tree of boxes.
//
// input            the parameter's module
// gradient sync    its bucket
// optimizer        the parameter that it ends up in
// forward, clipping, other   the module it was traced in
// backward         the same; where the report names none, that of the forward values or parameter it reads, else that
//                  of the node before it

const MODULE_GUESS = "grouped by what it reads";

function pathsOf(report) {
  const nodes = new Map(report.graph.map((n) => [n.name, n]));
  const readers = new Map(report.graph.map((n) => [n.name, []]));
  for (const node of report.graph) for (const input of node.inputs) readers.get(input)?.push(node.name);
  const graph = { nodes, readers };
  const buckets = bucketsOf(report, graph);
  const updated = updatedBy(graph);
  const paths = new Map();
  const guessed = new Set();
  let previous = [];
  for (const node of report.graph) {
    let path = node.module ? node.module.split(".") : [];
    if (node.region === "input") path = node.parameter && node.op !== "data" ? moduleOf(node.parameter) : [];
    else if (node.region === "gradient sync") path = buckets.has(node.name) ? [`bucket ${buckets.get(node.name)}`] : [];
    else if (node.region === "optimizer" && !node.module) path = updated.has(node.name) ? updated.get(node.name).split(".") : [];
    else if (node.region === "backward" && !node.module) {
      path = readFrom(node, graph) || previous;
      previous = path;
      if (path.length) guessed.add(node.name);
    }
    paths.set(node.name, path);
  }
  return { paths, guessed };
}

const moduleOf = (parameter) => parameter.split(".").slice(0, -1);

function readFrom(node, graph) {
  const inputs = node.inputs.map((name) => graph.nodes.get(name)).filter(Boolean);
  const parameter = inputs.find((n) => n.op === "parameter");
  if (parameter) return moduleOf(parameter.parameter);
  const forward = inputs.find((n) => n.region === "forward" && n.module);
  return forward ? forward.module.split(".") : null;
}

// From each all-reduce both ways, inside the region.
function bucketsOf(report, graph) {
  const found = new Map();
  for (const collective of report.collectives) {
    const start = collective.nodes.find((name) => graph.nodes.get(name)?.region === "gradient sync");
    if (!start) continue;
    for (const next of [(n) => graph.nodes.get(n).inputs, (n) => graph.readers.get(n)]) {
      walk(start, next, (name) => graph.nodes.get(name)?.region === "gradient sync" && (name === start || !found.has(name)),
        (name) => found.set(name, collective.bucket));
    }
  }
  return found;
}

function walk(start, next, allowed, visit) {
  const stack = [start];
  const seen = new Set();
  while (stack.length) {
    const name = stack.pop();
    if (seen.has(name) || !allowed(name)) continue;
    seen.add(name);
    visit(name);
    stack.push(...next(name));
  }
}

// Backwards from each write to a parameter; what several parameters share belongs to none. Writes of optimizer state go
// where the written value went.
function updatedBy(graph) {
  const owners = new Map();
  const optimizer = (name) => graph.nodes.get(name)?.region === "optimizer";
  for (const node of graph.nodes.values()) {
    if (node.region !== "optimizer") continue;
    const target = graph.nodes.get(node.inputs[0]);
    if (!node.op.includes("copy_") || target?.op !== "parameter") continue;
    walk(node.name, (n) => graph.nodes.get(n).inputs, optimizer, (name) =>
      owners.set(name, owners.has(name) && owners.get(name) !== target.parameter ? null : target.parameter));
  }
  for (const node of graph.nodes.values()) {
    if (node.region !== "optimizer" || owners.has(node.name)) continue;
    const found = new Set(node.inputs.map((n) => owners.get(n)).filter((owner) => typeof owner === "string"));
    if (found.size === 1) owners.set(node.name, [...found][0]);
  }
  return new Map([...owners].filter(([, owner]) => typeof owner === "string"));
}
