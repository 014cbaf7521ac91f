// The window as a timeline: the same scale before and after, the middle calls folded.

const SHOWN_CALLS = 4;

function drawTimeline(report) {
  const found = report.predicted;
  const k = stepsOf(report);
  const plain = callOf(found.micro_step, false);
  const closing = callOf(found.boundary, true);
  const each = synced(report);
  const tracks = [
    { title: "Before", note: "every micro-step reduces", calls: calls(k, closing, closing), total: found.window_synced },
    {
      title: "After",
      note: each ? "every micro-step reduces: sync_each_batch" : k > 1 ? `${plural(k - 1, "accumulate call")}, then the boundary` : "the boundary alone",
      calls: calls(k, each ? closing : plain, closing),
      total: found.window,
    },
  ];
  const longest = Math.max(...tracks.map((t) => length(t.calls)), 1e-30);
  const manual = typeof report.k === "number" ? [] : [el("p", { class: "muted" },
    "k is manual: shown with the boundary alone. Every call before it adds one micro-step of computation.")];
  byId("timeline-body").append(
    el("ul", { class: "legend plain" },
      [["compute-f", "forward"], ["compute-b", "backward"], ["wire-hidden", "all-reduce, hidden behind backward"],
        ["wire-exposed", "all-reduce, exposed"]].map(([kind, text]) =>
        el("li", {}, el("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), text))),
    ...tracks.map((t) => track(t, longest)),
    ...manual,
    verdict(found, k),
    lazy("Segments of one call, in numbers", () => segments(found)));
}

function callOf(parts, closing) {
  const compute = parts.filter((s) => s.label === "forward" || s.label === "backward");
  const wire = parts.filter((s) => !compute.includes(s));
  const busy = Math.max(0, ...compute.map((s) => s.end));
  return { compute, wire, busy, closing, end: Math.max(busy, ...wire.map((s) => s.end)) };
}

function calls(k, micro, closing) {
  const numbers = Array.from({ length: k }, (_, i) => i + 1);
  const folded = k > SHOWN_CALLS + 1 ? k - SHOWN_CALLS : 0;
  const shown = folded ? [1, 2, ...numbers.slice(-2)] : numbers;
  return shown.flatMap((n, i) => [
    ...folded && i === 2 ? [{ folded }] : [],
    { number: n, last: n === k, ...(n === k ? closing : micro) },
  ]);
}

const length = (list) => list.reduce((sum, call) => sum + (call.end || 0), 0);

function track(t, longest) {
  const folds = t.calls.some((c) => c.folded);
  const width = length(t.calls) / longest;
  const fixed = folds ? "var(--fold)" : "0px";
  return el("div", { class: `track${width < 0.7 ? " short" : ""}` },
    el("div", { class: "track-head" }, el("span", {}, el("strong", {}, t.title), " ", el("span", { class: "muted" }, t.note)),
      el("strong", { class: "number" }, seconds(t.total))),
    el("div", { class: "lane-names muted", "aria-hidden": "true" }, el("span", {}, "compute"), el("span", {}, "all-reduce")),
    el("div", { class: "calls", style: { width: `calc(${fixed} + (100% - ${fixed}) * ${Math.max(width, 0.004)})` } },
      t.calls.map((c) => (c.folded ? fold(c.folded) : call(c)))));
}

function fold(number) {
  return el("div", { class: "call fold", title: `${plural(number, "more call")} like these` },
    el("div", { class: "call-name" }, `+${number}`), el("div", { class: "lanes" }));
}

function call(c) {
  const spot = (s, from, to, kind) => el("div", {
    class: `segment ${kind}`,
    title: `${s.label}${kind.startsWith("wire") ? (kind === "wire-hidden" ? ", hidden" : ", exposed") : ""}: ${seconds(to - from)}`,
    style: { left: `${(100 * from) / (c.end || 1)}%`, width: `${(100 * (to - from)) / (c.end || 1)}%` },
  }, el("span", {}, `${s.label} ${seconds(to - from)}`));
  const wire = c.wire.flatMap((s) => [
    ...s.start < c.busy ? [spot(s, s.start, Math.min(s.end, c.busy), "wire-hidden")] : [],
    ...s.end > c.busy ? [spot(s, Math.max(s.start, c.busy), s.end, "wire-exposed")] : [],
  ]);
  return el("div", { class: `call${c.last ? " closing" : ""}`, style: { "flex-grow": Math.max(c.end, 1e-30) / 1e-9 } },
    el("div", { class: "call-name" }, c.last ? `${c.number} boundary` : String(c.number)),
    el("div", { class: "lanes" },
      el("div", { class: "lane" }, c.compute.map((s) => spot(s, s.start, s.end, s.label === "forward" ? "compute-f" : "compute-b"))),
      el("div", { class: "lane" }, wire)));
}

function verdict(found, k) {
  const exposed = found.communication - found.hidden;
  const until = found.hidden_from === null
    ? "For no k up to 64 is the exposed part 5 % of a window or less."
    : `From k = ${found.hidden_from} on, the exposed part is 5 % of a window or less.`;
  const text = found.communication > 0
    ? `A boundary communicates for ${seconds(found.communication)}: ${seconds(found.hidden)} (${share(found.hidden, found.communication)}) behind backward, ${seconds(exposed)} exposed. ${until}`
    : "Nothing is communicated.";
  const h = found.hardware;
  return el("div", {},
    el("p", {}, text),
    el("p", { class: "muted" }, `Computation ${seconds(found.compute / k)} in each micro-step. Machine: ${h.name}, ` +
      `${seconds(h.latency)} latency, ${bytes(h.bandwidth)}/s, ${scaled(h.flops, [["PFLOP/s", 1e15], ["TFLOP/s", 1e12], ["GFLOP/s", 1e9], ["MFLOP/s", 1e6]])} as reached. An estimate from FLOPs and bytes: ` +
      "no memory traffic, host time or update; nothing here was measured."));
}

function segments(found) {
  const rows = [["accumulate", found.micro_step], ["boundary", found.boundary]].flatMap(([name, parts]) =>
    parts.map((s) => [s.label, name, seconds(s.start), seconds(s.end), seconds(s.end - s.start)]));
  return table("Segments of one call", [{ title: "segment" }, { title: "call" }, { title: "start", number: true },
    { title: "end", number: true }, { title: "length", number: true }], rows);
}
