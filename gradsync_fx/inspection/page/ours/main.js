// Puts the page together.

const report = JSON.parse(byId("report").textContent);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

function drawGraph() {
  const tree = buildTree(report);
  const canvas = el("div", { class: "canvas", "aria-hidden": "true" });
  const frame = el("div", {
    class: "frame", tabindex: "0", role: "application", "aria-describedby": "graph-help",
    "aria-label": "Graph of the step. Arrows pan, plus and minus zoom, 0 shows all, Enter opens the picked box. The panel beside it lists the same in text.",
  }, canvas);
  const said = el("p", { class: "said muted", role: "status" });
  const side = el("aside", { class: "panel", "aria-label": "Details", tabindex: "0" });
  const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Graph" });
  byId("graph-body").append(tools,
    el("div", { class: "desk" }, frame, side),
    el("div", { class: "under" }, legend(), said),
    el("p", { class: "muted", id: "graph-help" }, "Drag to pan; click into the graph first to zoom with the wheel. Double-click a box to open or close it."));
  const view = makeGraph(tree, report, canvas, (text) => { said.textContent = text; });
  const panel = makePanel(side, view, report);

  const select = (item) => {
    view.light([], item);
    (item.leaf ? panel.node : panel.group)(item);
    said.textContent = `${item.label}, ${item.region}`;
  };
  panel.select = select;
  const reset = () => {
    view.clear();
    panel.overview();
    said.textContent = "";
  };
  const choose = ({ item, parameter, line, leaves }) => {
    if (item) select(item);
    else if (parameter) panel.parameter(parameter);
    else {
      view.light(leaves);
      panel.line(line, leaves);
      said.textContent = `${shortLine(line)}: ${plural(leaves.length, "node")} lit`;
    }
  };
  const button = (text, label, click) => el("button", { type: "button", "aria-label": label, title: label, click }, text);
  let opening = false;
  const opener = button("Open all", "Open every box", () => (opening ? view.stop() : view.openAll()));
  const closer = button("Close all", "Close the boxes again", () => { view.closeAll(); reset(); });
  const greyer = button("Grey out what accumulate leaves out", "Grey out what the accumulate program leaves out", () => {
    view.without = view.without ? "" : "accumulate";
    greyer.setAttribute("aria-pressed", String(Boolean(view.without)));
    view.mark();
  });
  greyer.setAttribute("aria-pressed", "false");
  greyer.hidden = !report.programs.some((p) => p.name === "accumulate");
  view.opening = (now) => {
    opening = now;
    opener.textContent = now ? "Stop" : "Open all";
    opener.setAttribute("aria-label", now ? "Stop opening" : "Open every box");
  };
  tools.append(makeSearch(tree, report, choose), el("div", { class: "buttons" },
    button("−", "Zoom out", () => view.zoom(0.8)), button("+", "Zoom in", () => view.zoom(1.25)),
    button("Fit", "Show all of it", () => view.fit()), opener, closer, greyer));
  view.cy.on("tap", (event) => {
    if (event.target === view.cy) { reset(); return; }
    const item = tree.items.get(event.target.id());
    if (!item) return;
    view.picked = item;
    view.lit = new Set();
    view.mark();
    (item.leaf ? panel.node : panel.group)(item);
    said.textContent = `${item.label}, ${item.region}`;
  });
  steer(view, frame);
  view.draw();
  panel.overview();
  requestAnimationFrame(() => view.fit());

  const bucket = (c, byKey) => {
    const leaves = c.nodes.map((name) => tree.leaves.get(name)).filter(Boolean);
    const boxes = view.light(leaves);
    panel.bucket(c, leaves);
    said.textContent = `bucket ${c.bucket}: ${plural(leaves.length, "node")} lit` + (boxes !== leaves.length ? ` in ${plural(boxes, "box", "boxes")}` : "");
    if (byKey) side.focus({ preventScroll: true });
    byId("graph").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
  };
  panel.pick = bucket;
  const showNode = (name) => {
    const leaf = tree.leaves.get(name);
    return leaf ? () => { select(leaf); byId("graph").scrollIntoView({ behavior: still ? "auto" : "smooth" }); } : null;
  };
  return { bucket, showNode, restyle: view.restyle, picture: view.picture };
}

function legend() {
  const present = REGIONS.filter((region) => report.graph.some((n) => n.region === region));
  return el("ul", { class: "legend plain", "aria-label": "Colours of the regions" }, present.map((region) =>
    el("li", {}, el("i", { class: `swatch ${slug(region)}`, "aria-hidden": "true" }), region,
      el("span", { class: "muted number" }, ` ${count(report.graph.filter((n) => n.region === region).length)}`))));
}

function makeThemeToggle(changed) {
  const toggle = byId("theme-toggle");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    toggle.textContent = dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", dark() ? "Light theme" : "Dark theme");
    toggle.removeAttribute("aria-pressed");
  };
  toggle.addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("gradsync_fx.theme", next); } catch { /* not remembered, then */ }
    label();
    changed();
  });
  system.addEventListener("change", () => { label(); changed(); });
  label();
}

drawSummary(report);
drawTimeline(report);
const graph = report.graph.length ? drawGraph() : { bucket: () => {}, showNode: () => null, restyle: () => {}, picture: () => "data:," };
drawCollectives(report, graph.bucket);
drawBytes(report);
drawCurve(report);
drawNotes(report, graph.showNode);
drawPrograms(report);
drawCode(report);
drawParameters(report);
makeThemeToggle(graph.restyle);
preparePrint(graph);
