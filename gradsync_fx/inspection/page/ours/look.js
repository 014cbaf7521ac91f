// How the graph looks, from the page's own colours.

function lookOf() {
  const read = getComputedStyle(document.documentElement);
  const colour = (name) => read.getPropertyValue(`--${name}`).trim();
  const regions = REGIONS.map((region) => {
    const key = region.replace(" ", "-");
    return { selector: `node[region = "${region}"]`, style: { "background-color": colour(`${key}-fill`), "border-color": colour(key) } };
  });
  return [
    { selector: "node", style: {
      shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(label)", "font-size": 12,
      "font-family": "system-ui, sans-serif", color: colour("ink"), "text-valign": "center", "text-halign": "center",
      "text-wrap": "ellipsis", "text-max-width": 250, "border-width": 1, "border-color": colour("line"),
      "background-color": colour("surface"), "min-zoomed-font-size": 5, "corner-radius": 6, "z-index": 2,
    } },
    ...regions,
    { selector: "node.group", style: { "border-width": 1.5, "font-weight": 600, "corner-radius": 9 } },
    { selector: "node.whole", style: { "font-size": "data(font)", "text-max-width": "data(width)" } },
    { selector: "node.collective", style: { shape: "hexagon", "border-width": 2.5 } },
    { selector: "node.input-node", style: { shape: "cut-rectangle" } },
    { selector: "node.frame", style: {
      "background-opacity": 0.32, "border-width": 1, "text-valign": "top", "text-margin-y": 21, "font-weight": 600,
      "z-index": 0, "corner-radius": 12, "text-max-width": "data(width)", "min-zoomed-font-size": 4,
    } },
    { selector: "node.lane", style: { "background-opacity": 0.14, "border-style": "dashed", "font-size": 13 } },
    { selector: "edge", style: {
      width: "data(width)", "line-color": colour("edge"), "target-arrow-color": colour("edge"), "target-arrow-shape": "triangle",
      "arrow-scale": 0.7, "curve-style": "straight", opacity: 0.65, "z-index": 1,
    } },
    { selector: "edge.far", style: { opacity: 0.3 } },
    { selector: "edge.given", style: { opacity: 0.15 } },
    { selector: "node.dim", style: { opacity: 0.45 } },
    { selector: "node.frame.dim", style: { opacity: 0.75 } },
    { selector: "edge.dim", style: { opacity: 0.07 } },
    { selector: "node.gone", style: { "background-color": colour("sunk"), "border-color": colour("line"), color: colour("muted"), opacity: 0.5 } },
    { selector: "edge.gone", style: { "line-style": "dashed", opacity: 0.2 } },
    { selector: "node.lit", style: { "border-width": 3, "border-color": colour("accent"), opacity: 1, "z-index": 4 } },
    { selector: "edge.lit", style: { "line-color": colour("accent"), "target-arrow-color": colour("accent"), opacity: 0.9, "z-index": 3 } },
    { selector: "node.picked", style: { "border-width": 4, "border-color": colour("accent"), "z-index": 5 } },
    { selector: "core", style: { "active-bg-opacity": 0, "selection-box-opacity": 0 } },
  ];
}
