// Memory over each program: what is held, and above it what its values take while it runs, as SVG for the width there is.

function drawMemory(memory) {
  const held = Object.values(memory.held).reduce((sum, n) => sum + n, 0);
  const top = held + Math.max(...memory.programs.map((p) => p.temporaries));
  return memory.programs.filter((p) => p.levels.length > 1).map((program) => {
    const frame = el("div", { class: "curve memory" });
    drawnToWidth(frame, (width) => memoryCurve(program, held, top, width));
    return frame;
  });
}

function memoryCurve(program, held, top, width) {
  const height = 170;
  const box = { left: 74, right: width - 8, top: 26, bottom: height - 22 };
  const x = (at) => box.left + at * (box.right - box.left);
  const y = (size) => box.bottom - (size / top) * (box.bottom - box.top);
  const text = (px, py, content, attributes = {}) => svg("text", { x: px, y: py, ...attributes }, content);
  const { levels } = program;
  const ends = [...levels.slice(1).map((level) => level.at), 1];
  const peak = levels.reduce((most, level) => (level.bytes > most.bytes ? level : most));
  const whole = `${program.name}: ${bytes(held + peak.bytes)} at the most${peak.line ? `, at ${shortLine(peak.line)}` : ""}`;
  const late = peak.at > 0.5;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Memory over the program ${whole}; ${bytes(held)} are held all the while.` },
    text(0, 12, program.name, { class: "value" }),
    [held, held + peak.bytes].flatMap((size) => [
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(size), y2: y(size) }),
      text(box.left - 8, y(size) + 4, bytes(size), { "text-anchor": "end" })]),
    svg("rect", { class: "held", x: box.left, width: box.right - box.left, y: y(held), height: box.bottom - y(held) }),
    levels.map((level, i) => svg("rect", { class: "level", x: x(level.at), width: Math.max(x(ends[i]) - x(level.at), 0.5), y: y(held + level.bytes), height: y(held) - y(held + level.bytes) },
      svg("title", {}, `${bytes(held + level.bytes)}${level.line ? ` at ${shortLine(level.line)}` : ""}`))),
    peak.line ? text(x(peak.at) + (late ? -4 : 4), y(held + peak.bytes) - 6, `peak at ${shortLine(peak.line)}`, { class: "hint", "text-anchor": late ? "end" : "start" }) : null,
    text(box.left, height - 5, "start of the program"), text(box.right, height - 5, "end", { "text-anchor": "end" }));
}
