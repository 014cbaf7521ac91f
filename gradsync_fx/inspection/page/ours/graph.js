// The graph on its canvas: draws what the tree shows, lights nodes, pans and zooms.

const REVEAL_MOST = 12; // nodes for which boxes are opened; more are shown by the boxes they are in
const FAST_FROM = 700; // visible items from which edges hide while the view moves

function makeGraph(tree, report, container, told) {
  const reductions = new Set(report.collectives.map((c) => c.nodes[0]));
  const view = { tree, lit: new Set(), picked: null, told, reductions };
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const cy = cytoscape({
    container, style: lookOf(), minZoom: 0.02, maxZoom: 3, boxSelectionEnabled: false, autoungrabify: true,
    userZoomingEnabled: false, hideEdgesOnViewport: tree.leaves.size > FAST_FROM, pixelRatio: Math.min(devicePixelRatio || 1, 2),
    layout: { name: "preset" },
  });
  view.cy = cy;
  const move = (to) => (calm ? cy.viewport(to) : cy.animate(to, { duration: 220 }));

  view.draw = () => {
    view.run = null;
    const shown = placed(tree);
    cy.batch(() => {
      cy.elements().remove();
      cy.add([...shown.map((s) => boxElement(s, view)), ...edgeElements(tree)]);
    });
    view.mark();
  };
  view.mark = () => {
    const lit = new Set([...view.lit].map((leaf) => standIn(leaf).id));
    const picked = view.picked && standIn(view.picked).id;
    cy.batch(() => {
      cy.elements().removeClass("lit dim picked");
      if (lit.size) {
        cy.elements().addClass("dim");
        const bright = cy.nodes().filter((n) => lit.has(n.id()));
        bright.removeClass("dim").addClass("lit");
        if (lit.size <= REVEAL_MOST) bright.edgesWith(bright).removeClass("dim").addClass("lit");
      }
      if (!picked) return;
      const element = cy.getElementById(picked);
      element.removeClass("dim").addClass("picked");
      element.connectedEdges().removeClass("dim").addClass("lit");
    });
    container.dataset.lit = [...view.lit].map((leaf) => leaf.node.name).join(" ");
  };
  view.fit = (elements = cy.elements(), most = 1.1) => {
    if (!elements.length) return;
    const bounds = elements.boundingBox({ includeEdges: false });
    const zoom = Math.max(Math.min(cy.width() / (bounds.w + 60), cy.height() / (bounds.h + 60), most), cy.minZoom());
    move({ zoom, pan: { x: cy.width() / 2 - zoom * (bounds.x1 + bounds.w / 2), y: cy.height() / 2 - zoom * (bounds.y1 + bounds.h / 2) } });
  };
  view.zoom = (by) => cy.zoom({ level: cy.zoom() * by, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  view.toggle = (group, open = !group.open) => {
    setOpen(group, open);
    view.draw();
    const element = cy.getElementById(standIn(group).id);
    view.fit(open ? element : element.closedNeighborhood().nodes(), Math.max(cy.zoom(), 0.9));
    told(`${group.label || "graph"} ${open ? "opened" : "closed"}: ${plural(cy.nodes().length, "box", "boxes")} in view`);
  };
  // Inner boxes first, a few at a time: the page stays alive meanwhile.
  view.all = async (open) => {
    const groups = [...tree.items.values()].filter((item) => !item.leaf && item !== tree.root).sort((a, b) => b.depth - a.depth);
    for (const group of groups) setOpen(group, open);
    if (!open) openAtStart(tree);
    const run = (view.run = {});
    for (let i = 0, since = performance.now(); open && i < groups.length; i++) {
      arrange(groups[i]);
      if (performance.now() - since < 40) continue;
      told(`laying out: ${count(i)} of ${plural(groups.length, "box", "boxes")}`);
      await new Promise((go) => setTimeout(go));
      if (view.run !== run) return;
      since = performance.now();
    }
    view.draw();
    view.fit();
    told(open ? `everything open: ${plural(cy.nodes().length, "box", "boxes")}` : "closed again");
  };
  view.light = (leaves, picked = null) => {
    view.lit = new Set(leaves);
    view.picked = picked;
    if (leaves.length <= REVEAL_MOST) leaves.forEach(reveal);
    if (picked) reveal(picked);
    view.draw();
    const marked = cy.nodes(".lit, .picked");
    view.fit(marked, 1.2);
    return marked.length;
  };
  view.clear = () => {
    view.lit = new Set();
    view.picked = null;
    view.mark();
  };
  view.restyle = () => cy.style(lookOf());
  return view;
}

function boxElement({ item, x, y, width, height, frame }, view) {
  const classes = [
    ...frame ? ["frame"] : item.leaf ? [] : ["group"],
    ...frame && item.depth === 1 ? ["lane"] : [],
    ...item.leaf && item.region === "input" ? ["input-node"] : [],
    ...item.leaf && view.reductions.has(item.node.name) ? ["collective"] : [],
  ];
  const data = { id: item.id, label: labelOf(item), region: item.region, width, height, name: item.leaf ? item.node.name : "" };
  return { group: "nodes", data, position: { x, y }, classes };
}

// One edge for all values that flow between two visible boxes.
function edgeElements(tree) {
  const found = new Map();
  for (const { from, to, bytes: size } of tree.edges) {
    const [a, b] = [standIn(from), standIn(to)];
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

// Mouse, fingers and keys. The page keeps scrolling over the graph until the graph has been clicked or focused.
function steer(view, frame) {
  const { cy } = view;
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hold = (active) => {
    cy.userZoomingEnabled(active);
    cy.userPanningEnabled(active || !coarse);
    frame.classList.toggle("held", active);
  };
  hold(false);
  frame.addEventListener("focusin", () => hold(true));
  frame.addEventListener("focusout", () => hold(false));
  cy.on("tap", () => frame.focus({ preventScroll: true }));
  cy.on("dbltap", "node", (event) => {
    const item = view.tree.items.get(event.target.id());
    if (item && !item.leaf) view.toggle(item);
  });
  const by = 60;
  const keys = {
    ArrowLeft: () => cy.panBy({ x: by, y: 0 }), ArrowRight: () => cy.panBy({ x: -by, y: 0 }),
    ArrowUp: () => cy.panBy({ x: 0, y: by }), ArrowDown: () => cy.panBy({ x: 0, y: -by }),
    "+": () => view.zoom(1.25), "=": () => view.zoom(1.25), "-": () => view.zoom(0.8), 0: () => view.fit(),
    Enter: () => view.picked && !view.picked.leaf && view.toggle(view.picked), Escape: () => frame.blur(),
  };
  frame.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
