// The programs as code for a card that is not there: what each starts and moves, and Triton's code by region and line.

function drawCode(report) {
  if (!report.code) return;
  byId("code").hidden = false;
  byId("code-title").append(" ", el("small", {}, `${report.code.card}, ${report.code.target}`));
  const made = (program) => program.kernels.filter((k) => k.kind === "triton");
  byId("code-body").append(
    table("Code", [{ title: "Program" }, { title: "Kernels", number: true }, { title: "Launches", number: true }, { title: "Buffers", number: true },
      { title: "Most registers", number: true }, { title: "Spilling", number: true }, { title: "Moved", number: true }, { title: "Estimate", number: true },
      { title: "CUDA graph" }],
    report.code.programs.map((p) => [el("code", {}, p.name), count(p.kernels.length), count(p.launches), count(p.temporaries),
      count(Math.max(0, ...made(p).map((k) => k.registers))), count(made(p).filter((k) => k.spilled).length), bytes(p.bytes), seconds(p.seconds),
      el("span", { title: outside(p).join("\n") }, recorded(p))]), { id: "code-table" }),
    el("p", { class: "muted" }, "Of one call. Compiled, not run: block sizes are the first that Inductor would try; times are FLOPs and bytes by the card’s figures."),
    ...report.code.programs.flatMap((p) => outside(p).length
      ? [el("p", {}, el("code", {}, p.name), `, outside of a CUDA graph: ${outside(p).join("; ")}`)] : []),
    ...report.code.programs.map((p) => lazy(["Kernels of ", el("code", {}, p.name), el("span", { class: "muted" }, ` ${count(p.kernels.length)}`)],
      () => kernels(p))));
}

// What a CUDA graph leaves out of a program, or why it holds none of it; as `Recording` has it.
const outside = (program) => (program.recording.never ? [program.recording.never] : program.recording.apart);
const recorded = (program) => (program.recording.never ? "no" : program.recording.apart.length ? "in parts" : "whole");

function kernels(program) {
  const code = el("div");
  const show = (kernel, byKey) => {
    code.replaceChildren(el("h3", {}, kernel.name), el("p", { class: "muted" }, kernel.regions.join(", "), " ", ...kernel.lines.flatMap((l) => [lineLink(l), " "])),
      kernel.source ? el("pre", { tabindex: "0" }, el("code", {}, kernel.source.trim())) : el("p", {}, "A library’s kernel: its code is not made here."));
    if (byKey) code.querySelector("pre")?.focus();
  };
  return [sortable({
    caption: `Kernels of ${program.name}`, rows: program.kernels, pick: show,
    text: (k) => [k.name, ...k.regions, ...k.lines].join(" "),
    columns: [
      { title: "Kernel", value: (k) => k.name, cell: (k) => el("span", { class: "name" }, k.name) },
      { title: "Region", value: (k) => k.regions.join(), cell: (k) => k.regions.join(", ") || "–" },
      { title: "Lines", value: (k) => k.lines[0] || "", cell: (k) => names(k.lines.map(shortLine)) },
      { title: "Launches", number: true, value: (k) => k.launches, cell: (k) => count(k.launches) },
      { title: "Registers", number: true, value: (k) => k.registers, cell: (k) => (k.source ? count(k.registers) : "–") },
      { title: "Spilled", number: true, value: (k) => k.spilled, cell: (k) => (k.source ? bytes(k.spilled) : "–") },
      { title: "Binary", number: true, value: (k) => k.cubin, cell: (k) => (k.source ? bytes(k.cubin) : "–") },
    ],
  }), code];
}
