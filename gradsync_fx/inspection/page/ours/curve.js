// The speed-up over k, as SVG drawn for the width that there is.

function drawCurve(report) {
  const points = report.predicted.speedup.filter(([k, s]) => k > 0 && Number.isFinite(s));
  const k = stepsOf(report);
  const body = byId("speedup-body");
  if (!points.length) {
    body.append(el("p", { class: "muted" }, "No estimate."));
    return;
  }
  const frame = el("div", { class: "curve" });
  const told = points.map(([n, s]) => `k = ${n}: ${factor(s)}`).join(", ");
  const ratio = report.predicted.window > 0 ? report.predicted.window_synced / report.predicted.window : 1;
  body.append(frame, el("p", { class: "muted" },
    `Time of a window that reduces in every micro-step, over that of one with accumulation. Here, k = ${report.k}: ${factor(ratio)}.`));
  drawnToWidth(frame, (width) => curve(points, { k, ratio, hidden: report.predicted.hidden_from, told }, width));
}

function niceTop(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * size).find((n) => n >= value * 1.08) || value;
}

function curve(points, here, width) {
  const height = 260;
  const box = { left: 48, right: width - 26, top: 24, bottom: height - 40 };
  const last = Math.log2(points.at(-1)[0]) || 1;
  const top = niceTop(Math.max(...points.map(([, s]) => s)));
  const x = (k) => box.left + (Math.min(Math.log2(k) / last, 1)) * (box.right - box.left);
  const y = (s) => box.bottom - (s / top) * (box.bottom - box.top);
  const path = points.map(([k, s], i) => `${i ? "L" : "M"}${x(k).toFixed(1)} ${y(s).toFixed(1)}`).join(" ");
  const text = (px, py, content, attributes = {}) => svg("text", { x: px, y: py, ...attributes }, content);
  const levels = [0, 0.25, 0.5, 0.75, 1].map((part) => part * top);
  const area = `${path} L${x(points.at(-1)[0]).toFixed(1)} ${box.bottom} L${box.left} ${box.bottom} Z`;
  const hidden = here.hidden === null || here.hidden === undefined ? [] : [
    svg("line", { class: "mark", x1: x(here.hidden), x2: x(here.hidden), y1: box.top - 8, y2: box.bottom }),
    text(x(here.hidden) + (x(here.hidden) > width / 2 ? -6 : 6), box.top - 10, `hidden from k = ${here.hidden}`,
      { class: "hint", "text-anchor": x(here.hidden) > width / 2 ? "end" : "start" })];
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Speed-up over k. ${here.told}` },
    levels.map((level) => [
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(level), y2: y(level) }),
      text(box.left - 8, y(level) + 4, `${Number(level.toFixed(2))}×`, { "text-anchor": "end" }),
    ]).flat(),
    svg("path", { class: "area", d: area }),
    svg("path", { class: "line", d: path }),
    points.map(([k, s]) => [
      svg("circle", { class: "dot", cx: x(k), cy: y(s), r: 3.5 }, svg("title", {}, `k = ${k}: ${factor(s)}`)),
      text(x(k), box.bottom + 18, String(k), { "text-anchor": "middle" }),
    ]).flat(),
    text((box.left + box.right) / 2, height - 4, "micro-steps in a window, k", { "text-anchor": "middle", class: "hint" }),
    hidden,
    svg("circle", { class: "here", cx: x(here.k), cy: y(Math.min(here.ratio, top)), r: 6.5 }),
    text(x(here.k) + (x(here.k) > width * 0.45 ? -10 : 2), y(Math.min(here.ratio, top)) - 13, `k = ${here.k}: ${factor(here.ratio)}`,
      { class: "value", "text-anchor": x(here.k) > width * 0.45 ? "end" : "start" }));
}
