// The graph on its canvas: draws what the tree shows, lights nodes, pans and zooms.

const REVEAL_MOST = 12; // nodes for which boxes are opened; more are shown by the boxes they are in
const FAST_FROM = 700; // visible items from which edges hide while the view moves
const PICTURE = 1800; // pixels of the longer side of the picture for paper
const SETTLED = 90; // ms without a movement, after which a large graph is drawn for the new place

function makeGraph(tree, report, container, told) {
  const reductions = new Set(report.collectives.map((c) => c.nodes[0]));
  const view = { tree, lit: new Set(), picked: null, told, reductions, without: "", inside: new Set([tree.root]), number: 0 };
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const cy = cytoscape({
    container, style: lookOf(), minZoom: 0.005, maxZoom: 3, boxSelectionEnabled: false, autoungrabify: true,
    userZoomingEnabled: false, hideEdgesOnViewport: tree.leaves.size > FAST_FROM, pixelRatio: Math.min(devicePixelRatio || 1, 2),
    layout: { name: "preset" },
  });
  view.cy = cy;
  const windowAt = (to) => ({ zoom: cy.zoom(), pan: cy.pan(), ...to, width: cy.width(), height: cy.height() });
  const move = (to) => {
    view.refresh(to);
    if (calm) cy.viewport(to);
    else cy.animate(to, { duration: 220 });
  };

  view.draw = () => {
    view.stop();
    view.number = place(tree);
    cy.elements().remove();
    view.refresh();
  };
  // Puts on the canvas what there is to see from where the view is, or will be, and takes the rest away.
  view.refresh = (to = {}) => {
    const { shown, inside } = detailOf(tree, view.number, windowAt(to));
    view.inside = inside;
    const elements = [...shown.map((item) => boxElement(item, view)), ...edgeElements(tree, inside)];
    const wanted = new Map(elements.map((e) => [e.data.id, e.data]));
    cy.batch(() => {
      cy.elements().filter((e) => wanted.get(e.id())?.frame !== e.data("frame") || !wanted.has(e.id())).remove();
      cy.add(elements.filter((e) => !cy.hasElementWithId(e.data.id)));
    });
    view.mark();
  };
  view.mark = () => {
    const lit = new Set([...view.lit].map((leaf) => drawnAs(leaf, view.inside).id));
    const picked = view.picked && drawnAs(view.picked, view.inside).id;
    cy.batch(() => {
      cy.elements().removeClass("lit dim picked gone");
      if (view.without) {
        const gone = cy.nodes().filter((n) => !tree.items.get(n.id()).programs.has(view.without));
        gone.union(gone.connectedEdges()).addClass("gone");
      }
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
  view.fit = (items = tree.root.children, most = 1.1) => {
    if (!items.length) return;
    const side = (axis, size, sign) => items.map(({ at }) => at[axis] + (sign * at[size]) / 2);
    const [x1, x2] = [Math.min(...side("x", "width", -1)), Math.max(...side("x", "width", 1))];
    const [y1, y2] = [Math.min(...side("y", "height", -1)), Math.max(...side("y", "height", 1))];
    const fitting = Math.min(cy.width() / (x2 - x1 + 60), cy.height() / (y2 - y1 + 60), most);
    const zoom = Math.max(fitting, cy.minZoom());
    move({ zoom, pan: { x: cy.width() / 2 - (zoom * (x1 + x2)) / 2, y: cy.height() / 2 - (zoom * (y1 + y2)) / 2 } });
  };
  view.zoom = (by) => cy.zoom({ level: cy.zoom() * by, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  view.toggle = (group) => {
    view.stop();
    if (group.open && !view.inside.has(group)) { // too small to show that it is open
      view.fit([group]);
      return;
    }
    setOpen(group, !group.open);
    view.draw();
    const drawn = standIn(group);
    const near = cy.getElementById(drawn.id).closedNeighborhood().nodes().map((n) => tree.items.get(n.id()));
    view.fit(group.open ? [drawn] : near, Math.max(cy.zoom(), 0.9));
    told(`${group.label || "graph"} ${group.open ? "opened" : "closed"}: ${plural(view.number, "box", "boxes")}`);
  };
  view.light = (leaves, picked = null) => {
    view.stop();
    view.lit = new Set(leaves);
    view.picked = picked;
    if (leaves.length <= REVEAL_MOST) leaves.forEach(reveal);
    if (picked) reveal(picked);
    view.draw();
    const marked = new Set([...leaves, ...picked ? [picked] : []].map(standIn));
    view.fit([...marked], 1.2);
    return marked.size;
  };
  view.clear = () => {
    view.lit = new Set();
    view.picked = null;
    view.mark();
  };
  view.restyle = () => cy.style(lookOf());
  view.picture = () => cy.png({ full: true, maxWidth: PICTURE, maxHeight: PICTURE });
  makeOpening(view);
  let waiting = 0;
  cy.on("viewport", () => {
    clearTimeout(waiting);
    if (view.number > ALL_UP_TO) waiting = setTimeout(() => view.refresh(), SETTLED);
  });
  return view;
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
