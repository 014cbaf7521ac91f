// What the step's owner should look at, and what the compiler did: warnings, kept collectives, programs, passes.

function drawNotes(report, showNode) {
  const notes = [
    ...report.warnings.map((text) => note("Warning", "warning", withLines(text))),
    ...report.moved.map((text) => note("Moved", "declined", withLines(text))),
    ...report.refusals.map((text) => note("Declined", "declined", withLines(text))),
    ...report.kept.map((k) => note("Kept", "kept", [
      el("code", {}, k.op), ...k.line ? [" at ", lineLink(k.line)] : [], ": ", k.why, " ",
      showNode(k.node) ? el("button", { type: "button", click: showNode(k.node) }, "Show in graph") : "",
    ])),
    ...report.unused_parameters.length ? [note("No gradient", "unused", [
      `${plural(report.unused_parameters.length, "parameter")} without a gradient in this step: `, ...names(report.unused_parameters, 6),
    ])] : [],
  ];
  if (!notes.length) return;
  byId("notes").hidden = false;
  byId("notes-body").append(el("ul", { class: "notes plain" }, notes));
}

function note(kind, slugged, content) {
  return el("li", { class: `note ${slugged}` }, el("strong", {}, kind), el("div", {}, content));
}

function drawPrograms(report) {
  const found = report.programs.map((p) => [
    el("code", {}, p.name), count(p.nodes), count(p.collectives), p.compile_seconds === null ? "not compiled" : seconds(p.compile_seconds),
    p.calls ? count(p.calls) : "–", p.calls ? seconds(p.seconds / p.calls) : "–",
  ]);
  const measured = report.programs.some((p) => p.calls);
  byId("programs-body").append(
    table("Programs", [{ title: "Program" }, { title: "Nodes", number: true }, { title: "Collectives", number: true }, { title: "Compiled in", number: true },
      { title: "Calls", number: true }, { title: "Measured per call", number: true }], found, { id: "programs-table" }),
    el("p", { class: "muted" }, measured ? "Measured: host time of the calls so far, this rank. Not to be mixed with the estimates above."
      : "Nothing has been run: there are no measured times."),
    ...report.memory ? memoryTable(report.memory) : [],
    ...report.sharing ? sharingTable(report.sharing) : [],
    ...report.once && report.once.held.length ? onceTable(report.once) : [],
    ...drawSides(report),
    ...report.programs.map((p) => lazy(["Code of ", el("code", {}, p.name), el("span", { class: "muted" }, ` ${plural(p.code.split("\n").length, "line")}`)],
      () => el("pre", { tabindex: "0" }, el("code", {}, p.code.trim())), { class: "code" })),
    ...report.regions.length ? [lazy("Regions and their lines", () => regionTable(report))] : [],
    lazy(`Passes: ${passesTold(report)}`, () => passTable(report), { id: "passes" }));
}

// What one rank needs: held between calls, and the most that each program takes beside that.
function memoryTable(memory) {
  const held = Object.values(memory.held).reduce((sum, n) => sum + n, 0);
  const kinds = Object.entries(memory.held).map(([kind, n]) => `${kind} ${bytes(n)}`);
  return [
    table("Memory", [{ title: "Program" }, { title: "Held", number: true }, { title: "Temporary", number: true }, { title: "Peak", number: true }, { title: "At" }],
      memory.programs.map((p) => [el("code", {}, p.name), bytes(held), bytes(p.temporaries), bytes(held + p.temporaries), lineLink(p.line, shortLine(p.line))]), { id: "memory-table" }),
    el("p", { class: "muted" }, `Of one rank, estimated from the graphs. Held: ${kinds.join(", ")}.`),
    ...drawMemory(memory)];
}

// Updates that are shared out: what this rank has, what it sends for them, and who has which parameter.
function sharingTable(sharing) {
  const owners = Object.entries(sharing.owners);
  const sent = [["Sums", sharing.sums_bytes], ["New parameters", sharing.parameters_bytes], ["Norms and whole gradients", sharing.other_bytes]];
  return [
    table("Updates shared out", [{ title: "Of this rank" }, { title: "Bytes", number: true }],
      [["Optimizer state", bytes(sharing.state_bytes)], ["Optimizer state without sharing", bytes(sharing.whole_state_bytes)],
        ...sent.map(([name, n]) => [`${name}, given to other ranks per window`, bytes(n)])], { id: "sharing-table" }),
    lazy(`${plural(sharing.cut.length, "parameter")} with a piece on each rank, ${owners.length} with an owner`, () => table("Owners",
      [{ title: "Parameter" }, { title: "Owner" }], [...sharing.cut.map((name) => [el("code", {}, name), "a piece on each rank"]),
        ...owners.map(([name, rank]) => [el("code", {}, name), `rank ${rank}`])]))];
}

// What a window computes once: values, copies and sums, and what that saves.
function onceTable(once) {
  const size = once.held.reduce((sum, h) => sum + h.bytes, 0);
  const saved = once.calls ? `${Math.round(100 * once.saved / once.calls)} % of its calls' time` : "nothing";
  const onTarget = once.launches === null ? "" : ` On the target each accumulate call starts ${plural(once.launches, "kernel")} and moves ${bytes(once.moved)} less.`;
  return [
    table("Once per window", [{ title: "Held" }, { title: "Bytes", number: true }, { title: "Of" }, { title: "Line" }],
      once.held.map((h) => [`${h.what}: ${h.op}`, bytes(h.bytes), h.of.join(", ") || "constants", lineLink(h.line, shortLine(h.line))]), { id: "once-table" }),
    el("p", { class: "muted" }, `${bytes(size)} held on one rank; ${saved} saved in a window, estimated.${onTarget}`)];
}

function passesTold(report) {
  const time = report.passes.reduce((sum, p) => sum + p.milliseconds, 0) / 1e3;
  return `${plural(report.passes.length, "run")}, ${seconds(time)}`;
}

function regionTable(report) {
  return table("Regions", [{ title: "Region" }, { title: "Nodes", number: true }, { title: "Lines" }], report.regions.map((r) => [
    el("span", {}, el("i", { class: `swatch ${slug(r.role)}`, "aria-hidden": "true" }), " ", r.role), count(r.nodes),
    el("span", { title: r.lines.join("\n") }, r.lines.length ? r.lines.slice(0, 4).flatMap((l, i) => [i ? ", " : "", lineLink(l, shortLine(l))]) : "–",
      r.lines.length > 4 ? ` and ${r.lines.length - 4} more` : "")]));
}

function passTable(report) {
  const most = Math.max(...report.passes.map((p) => p.milliseconds), 1e-9);
  return table("Passes", [{ title: "Pass" }, { title: "Program" }, { title: "Time", number: true }, { title: "" }, { title: "Nodes", number: true },
    { title: "Change", number: true }], report.passes.map((p) => {
    const change = p.nodes_after - p.nodes_before;
    return [el("code", {}, p.name), p.program, seconds(p.milliseconds / 1e3),
      el("span", { class: "spark", "aria-hidden": "true", style: { "--part": p.milliseconds / most } }), count(p.nodes_after),
      change === 0 ? "–" : (change > 0 ? "+" : "−") + count(Math.abs(change))];
  }));
}
