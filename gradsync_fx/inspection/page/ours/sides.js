// The boundary program beside the accumulate program: what accumulate leaves out is grey, what is the same is folded.

const AROUND = 3; // lines of a folded stretch that stay on each side
const FOLD_FROM = 12;

function drawSides(report) {
  const [boundary, accumulate] = ["boundary", "accumulate"].map((name) => report.programs.find((p) => p.name === name));
  if (!boundary || !accumulate) return [];
  return [lazy([el("code", {}, "boundary"), " and ", el("code", {}, "accumulate"), " side by side"], () => {
    const names = usersNames(report);
    const stretches = aligned(readableLines(boundary.code, names), readableLines(accumulate.code, names));
    const out = stretches.reduce((sum, s) => sum + (s.same ? 0 : s.left.length), 0);
    return [
      el("p", { class: "muted" }, `Grey: ${plural(out, "line")} that accumulate leaves out. Inputs have your names.`),
      el("div", { class: "sides", role: "region", "aria-label": "The two programs side by side", tabindex: "0" },
        el("div", { class: "side-head" }, "boundary"), el("div", { class: "side-head right" }, "accumulate"),
        stretches.flatMap((s) => (s.same ? unchanged(s.left) : onOneSide(s)))),
    ];
  }, { id: "sides" })];
}

const lines = (kind, list) => el("pre", { class: kind }, el("code", {}, list.join("\n")));
const both = (list) => (list.length ? [lines("", list), lines("right twin", list)] : []);

function unchanged(list) {
  if (list.length < FOLD_FROM) return both(list);
  const inner = list.slice(AROUND, -AROUND);
  const more = el("button", { type: "button", class: "unfold", click: () => more.replaceWith(...both(inner)) },
    plural(inner.length, "unchanged line"));
  return [...both(list.slice(0, AROUND)), more, ...both(list.slice(-AROUND))];
}

function onOneSide({ left, right }) {
  const told = (text) => el("span", { class: "hidden-text" }, text);
  if (right.length) return [el("div"), el("div", { class: "right" }, told("only in accumulate:"), lines("added", right))];
  return [el("div", {}, told("only in boundary:"), lines("gone", left)), el("div", { class: "right twin muted" }, `${plural(left.length, "line")} left out`)];
}
