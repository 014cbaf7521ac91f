// The head of the page: which step, and what a window costs before and after.

function synced(report) {
  // sync_each_batch: every micro-step of the window reduces, as before.
  const steps = stepsOf(report);
  return steps > 1 && report.collectives_after === report.collectives_before && report.collectives_before > 0;
}

function stepsOf(report) {
  return typeof report.k === "number" ? Math.max(report.k, 1) : 1;
}

function drawSummary(report) {
  const ranks = plural(report.world_size, "rank") + (report.simulated ? ", simulated" : "");
  const where = [report.line, `k = ${report.k}`, ranks].filter(Boolean);
  byId("summary").append(
    el("h1", {}, report.step),
    el("p", { class: "facts" }, where.map((text, i) => (i === 0 && report.line ? lineLink(text) : el("span", {}, text)))),
    el("p", { class: "muted" }, "gradient = ", el("code", {}, report.scale.formula), ", sums in ",
      report.scale.accumulator_dtypes.join(", ") || "–", ", on the wire ", report.scale.wire_dtypes.join(", ") || "–"),
    el("div", { class: "figures" },
      figure("Gradient collectives", "per window", report.collectives_before, report.collectives_after, count, "collectives"),
      figure("Bytes", "per window and rank", report.bytes_before, report.bytes_after, bytes, "bytes"),
      figure("Time", `estimated, ${report.predicted.hardware.name}`, report.predicted.window_synced,
        report.predicted.window, seconds, "seconds")),
  );
}

function figure(title, unit, before, after, shown, name) {
  const ratio = after > 0 ? before / after : 1;
  const change = Math.abs(ratio - 1) < 0.005 ? "unchanged" : ratio > 1 ? `${digits(ratio)} times less` : `${digits(1 / ratio)} times more`;
  const exact = (value) => (name === "bytes" ? `${count(value)} bytes` : null);
  return el("div", { class: "figure" },
    el("h2", {}, title, " ", el("small", {}, unit)),
    el("p", { class: "change" },
      el("span", { class: "before", title: exact(before), "data-figure": `${name}-before`, "data-value": before },
        el("span", { class: "hidden-text" }, "before: "), shown(before)),
      el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      el("span", { class: "after", title: exact(after), "data-figure": `${name}-after`, "data-value": after },
        el("span", { class: "hidden-text" }, "after: "), shown(after))),
    el("p", { class: "muted" }, change));
}

function drawBytes(report) {
  const most = Math.max(report.bytes_before, report.bytes_after, 1);
  const bar = (label, value, collectives, kind) => el("div", { class: "measure" },
    el("div", { class: "measure-head" }, el("span", {}, label),
      el("span", { class: "number" }, el("strong", {}, bytes(value)), ` in ${plural(collectives, "all-reduce")}`)),
    el("div", { class: "rail" }, el("div", { class: `fill ${kind}`, style: { width: `${(100 * value) / most}%` } })));
  byId("bytes-body").append(
    bar("Before: every micro-step reduces", report.bytes_before, report.collectives_before, "old"),
    bar("After: once per window", report.bytes_after, report.collectives_after, "new"),
    ...report.collectives.length > 1 ? [perBucket(report)] : [],
    el("p", { class: "muted" }, `What one rank puts into all-reduces in a window of ${report.k} micro-steps.`));
}

function perBucket(report) {
  const whole = report.collectives.reduce((sum, c) => sum + c.bytes, 0) || 1;
  const parts = report.collectives.slice(0, 40).map((c) =>
    el("span", { class: "slice", title: `bucket ${c.bucket}: ${bytes(c.bytes)}`, style: { "flex-grow": c.bytes / whole } },
      el("span", {}, String(c.bucket))));
  return el("div", { class: "measure" }, el("div", { class: "measure-head" }, el("span", {}, "By bucket"),
    el("span", { class: "number" }, plural(report.collectives.length, "bucket"))), el("div", { class: "slices" }, parts));
}
