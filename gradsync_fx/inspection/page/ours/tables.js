// Tables that sort by a click on a column and filter by what is typed; long ones show their first rows until asked.

const ROWS = 100;
const FILTER_FROM = 3; // a filter for fewer rows is clutter

// columns: {title, value(row), cell(row), number}. pick(row): rows are buttons then, by click, Enter and space.
function sortable({ caption, rows, columns, text, pick, id }) {
  let order = null;
  let rising = true;
  let limit = ROWS;
  const field = el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter: ${caption}`, autocomplete: "off", spellcheck: "false" });
  const tally = el("span", { class: "muted", role: "status" });
  const heads = columns.map((column) => headOf(column, { "aria-sort": "none" },
    el("button", { type: "button", click: () => sort(column) }, column.title, el("span", { class: "sign", "aria-hidden": "true" }))));
  const body = bodyOf();
  const more = el("button", { type: "button", hidden: true, click: () => { limit = Infinity; draw(); } }, "Show all");

  function sort(column) {
    rising = order === column ? !rising : !column.number;
    order = column;
    heads.forEach((head, i) => head.setAttribute("aria-sort", columns[i] === order ? (rising ? "ascending" : "descending") : "none"));
    draw();
  }
  function wanted() {
    const words = field.value.trim().toLowerCase();
    const kept = words ? rows.filter((row) => text(row).toLowerCase().includes(words)) : [...rows];
    if (order) {
      const compare = (a, b) => (order.number ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
      kept.sort((a, b) => compare(order.value(a), order.value(b)) * (rising ? 1 : -1));
    }
    return kept;
  }
  function draw() {
    const kept = wanted();
    body.replaceChildren(...kept.slice(0, limit).map(line));
    tally.textContent = kept.length === rows.length ? count(rows.length) : `${count(kept.length)} of ${count(rows.length)}`;
    more.hidden = kept.length <= limit;
    more.textContent = `Show all ${count(kept.length)}`;
  }
  function line(row) {
    const made = rowOf(columns, columns.map((column) => column.cell(row)), pick ? { tabindex: "0", class: "pickable" } : {});
    if (pick) {
      const go = (event) => {
        body.querySelectorAll("[aria-current]").forEach((other) => other.removeAttribute("aria-current"));
        made.setAttribute("aria-current", "true");
        pick(row, event.type === "keydown");
      };
      made.addEventListener("click", go);
      made.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        go(event);
      });
    }
    return made;
  }
  field.addEventListener("input", draw);
  draw();
  return el("div", { class: "sortable" },
    rows.length > FILTER_FROM ? el("div", { class: "tools" }, field, tally) : null,
    el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
      tableOf(caption, { id }, heads, body)),
    more);
}

function names(list, shown = 2) {
  const more = list.length - shown;
  return [list.slice(0, shown).map((name, i) => [i ? ", " : "", el("span", { class: "name" }, name)]).flat(),
    more > 0 ? el("span", { class: "muted" }, ` and ${count(more)} more`) : null].flat();
}

function way(c) {
  return c.way_back ? `${c.way}, back ${c.way_back}` : c.way;
}

function drawCollectives(report, pick) {
  const body = byId("collectives-body");
  if (!report.collectives.length) {
    body.append(el("p", { class: "muted" }, "No gradient is reduced: one rank, or no gradient that is shared."));
    return;
  }
  body.append(
    el("p", { class: "muted" }, "One row for each all-reduce at the boundary. Pick one, by click or Enter, to see its nodes in the graph."),
    sortable({
      caption: "Gradient collectives", id: "collectives-table", rows: report.collectives, pick,
      text: (c) => [`bucket ${c.bucket}`, c.op, c.dtype, c.group, ...c.parameters].join(" "),
      columns: [
        { title: "Bucket", number: true, value: (c) => c.bucket, cell: (c) => String(c.bucket) },
        { title: "Size", number: true, value: (c) => c.bytes, cell: (c) => el("span", { title: `${count(c.bytes)} bytes` }, bytes(c.bytes)) },
        { title: "Dtype", value: (c) => c.dtype, cell: (c) => c.dtype },
        { title: "Op", value: (c) => c.op, cell: (c) => c.op },
        { title: "Ranks", number: true, value: (c) => c.ranks, cell: (c) => count(c.ranks) },
        { title: "In", value: (c) => Object.keys(c.programs).join(), cell: (c) => Object.keys(c.programs).join(", ") },
        { title: "Way", value: way, cell: way },
        { title: "Parameters", value: (c) => c.parameters[0] || "", cell: (c) => el("div", { class: "names" }, names(c.parameters)) },
      ],
    }));
}

function drawParameters(report) {
  const whole = report.parameters.reduce((sum, p) => sum + p.bytes, 0);
  byId("parameters-body").append(lazy(`${plural(report.parameters.length, "parameter")}, ${bytes(whole)}`, () => sortable({
    caption: "Parameters", id: "parameters-table", rows: report.parameters, text: (p) => `${p.name} ${p.dtype} ${p.optimizer}`,
    columns: [
      { title: "Name", value: (p) => p.name, cell: (p) => el("span", { class: "name" }, p.name) },
      { title: "Shape", value: (p) => p.shape.join("×"), cell: (p) => form(p) },
      { title: "Size", number: true, value: (p) => p.bytes, cell: (p) => bytes(p.bytes) },
      { title: "Trained", value: (p) => String(p.trained), cell: (p) => (p.trained ? "yes" : "no gradient") },
      { title: "Sum in", value: (p) => p.accumulator_dtype, cell: (p) => p.accumulator_dtype || "–" },
      { title: "Optimizer", value: (p) => p.optimizer, cell: (p) => p.optimizer || "–" },
    ],
  })));
}
