// The result table: sortable by every column, with what it takes to reach the target.

const FIRST_ROWS = 50; // of very many; the rest comes when asked for
const VERDICTS = {
  higher: "higher",
  lower: "lower",
  "perhaps higher": "perhaps higher",
  "perhaps lower": "perhaps lower",
  "not distinguishable": "cannot be told apart",
  "too few seeds": "too few seeds",
};

/** Columns: heading, what is shown, and the number it is sorted by (null sorts last). */
function resultColumns(view) {
  const { group } = view;
  const spread = (one) => (one == null ? NONE : percent(one.mean) + (one.sd == null ? "" : ` ± ${percent(one.sd)}`));
  const many = group.labels.length > 1;
  const key = WHAT[view.what].percent ? view.what : "test_accuracy";
  const found = new Map(group.labels.map((label) => [label, reaches(group, label, key, view.target, view.window)]));
  const reach = (name, shown) => ({
    show: ({ label }) => {
      const one = found.get(label);
      if (!isNumber(view.target) || !one.asked) return NONE;
      if (!one.reached) return "never";
      return shown(one[name]) + (one.reached < one.asked ? ` (${one.reached} of ${one.asked})` : "");
    },
    // A mean over some of the seeds comes after every mean over all of them.
    by: ({ label }) => {
      const one = found.get(label);
      return one.reached ? one[name] + (one.reached < one.asked ? 1e12 : 0) : null;
    },
  });
  const short = WHAT[key].name === "test accuracy" ? "" : ", hold-out";
  return [
    { head: "algorithm", show: (row) => row.label, by: (row) => row.label, text: true },
    { head: "runs", show: runsWords, by: (row) => row.finished },
    { head: "final test accuracy %", show: (row) => spread(row.final), by: (row) => row.final?.mean ?? null },
    { head: "highest %", show: (row) => spread(row.highest), by: (row) => row.highest?.mean ?? null },
    group.private && {
      head: "epsilon",
      show: (row) => row.epsilon ?? NONE,
      by: (row) => (row.epsilon === "infinite" ? Number.MAX_VALUE : row.epsilon && Number(row.epsilon)),
    },
    many && {
      head: `points against ${group.reference}`,
      show: (row) => difference(row, group),
      by: (row) => row.against_reference?.mean ?? (row.label === group.reference ? 0 : null),
    },
    many && {
      head: "what the seeds say",
      show: (row) => VERDICTS[row.against_reference?.verdict] ?? NONE,
      by: (row) => row.against_reference?.verdict ?? null,
      text: true,
    },
    group.rows.some((row) => isNumber(row.worst_client)) && {
      head: "worst client, hold-out %",
      show: (row) => percent(row.worst_client),
      by: (row) => row.worst_client,
    },
    { head: `rounds to ${targetWords(view)}${short}`, ...reach("round", (value) => value.toFixed(1)) },
    { head: "MB to it", ...reach("megabytes", megabytes) },
    group.runs.some((run) => run.seconds) && {
      head: "seconds to it",
      ...reach("seconds", (value) => value.toFixed(1)),
    },
    { head: "MB in all", show: (row) => megabytes(row.megabytes), by: (row) => row.megabytes },
    group.rows.some((row) => isNumber(row.seconds)) && {
      head: "time in all",
      show: (row) => duration(row.seconds),
      by: (row) => row.seconds,
    },
  ].filter(Boolean);
}

const targetWords = (view) => (isNumber(view.target) ? `${percent(view.target)} %` : "target");

function difference(row, group) {
  if (row.label === group.reference) return "reference";
  const one = row.against_reference;
  if (!one) return NONE;
  return signed(100 * one.mean) + (one.half_width == null ? "" : ` ± ${percent(one.half_width)}`);
}

function runsWords(row) {
  const parts = [String(row.finished)];
  if (row.diverged) parts.push(`${row.diverged} diverged`);
  if (row.damaged) parts.push(`${row.damaged} damaged`);
  if (row.unfinished) parts.push(`${row.unfinished} unfinished`);
  return parts.join(", ");
}

function resultsSection(view) {
  const head = make("tr"),
    body = make("tbody");
  const caption = make("caption");
  const notes = make("ul", { class: "notes" });
  const more = button("", () => {
    view.allRows = !view.allRows;
    refresh();
  });
  const sheet = make("table", { class: "results" }, caption, make("thead", {}, head), body);
  const node = make(
    "div",
    {},
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results" }, sheet),
    make("div", { class: "controls" }, more),
    notes,
  );
  let heads = [];

  const refresh = () => {
    const columns = resultColumns(view);
    if (heads.length !== columns.length) {
      heads = columns.map((column, at) =>
        make(
          "th",
          { scope: "col", class: column.text ? "text" : null },
          button("", () => sortBy(at)),
        ),
      );
      head.replaceChildren(...heads);
    }
    columns.forEach((column, at) => {
      heads[at].firstChild.textContent = column.head;
      heads[at].setAttribute("aria-sort", view.sort?.at === at ? (view.sort.up ? "ascending" : "descending") : "none");
    });
    const all = sorted(view.group.rows, columns); // all of them are sorted, however many are shown
    const rows = view.allRows ? all : all.slice(0, FIRST_ROWS);
    more.parentNode.hidden = all.length <= FIRST_ROWS;
    more.textContent = view.allRows
      ? `Show the first ${FIRST_ROWS} of ${all.length} rows`
      : `Show all ${all.length} rows`;
    more.setAttribute("aria-expanded", String(Boolean(view.allRows)));
    body.replaceChildren(
      ...rows.map((row) =>
        make(
          "tr",
          {},
          columns.map((column, at) =>
            at === 0
              ? make(
                  "th",
                  { scope: "row", class: "text" },
                  swatch(view.group.labels.indexOf(row.label)),
                  column.show(row),
                )
              : make("td", { class: column.text ? "text" : null }, column.show(row)),
          ),
        ),
      ),
    );
    caption.textContent = `Test accuracy on the server's test set, over seeds ${view.group.seeds.join(", ")}`;
    notes.replaceChildren(...resultNotes(view).map((text) => make("li", {}, text)));
  };
  const sortBy = (at) => {
    const columns = resultColumns(view);
    const up = view.sort?.at === at ? !view.sort.up : Boolean(columns[at].text) || /to |in all|epsilon/.test(columns[at].head);
    view.sort = { at, up };
    refresh();
  };
  const sorted = (rows, columns) => {
    if (!view.sort || !columns[view.sort.at]) return rows;
    const { by } = columns[view.sort.at],
      way = view.sort.up ? 1 : -1;
    return [...rows].sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      if (x == null || y == null) return (x == null) - (y == null);
      return way * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  };
  return { id: "results", heading: "Results", node, charts: [], refresh };
}

function resultNotes(view) {
  const { group } = view;
  const key = WHAT[view.what].percent ? view.what : "test_accuracy";
  const many = group.labels.length > 1;
  const averaged = view.window > 1 ? `, averaged over ${view.window} rounds as in the chart,` : "";
  const apart = group.rows.some((row) => row.against_reference?.paired === false);
  const but = apart ? " where splits are the same" : "";
  const told = [
    "± beside an accuracy is the sample standard deviation over seeds." +
      (many
        ? ` Points against ${group.reference}: final accuracy, paired by seed${but}, ± half of the 95 % confidence interval; ` +
          "“higher” and “lower” lie beyond it, “perhaps” only beyond the spread, so that more seeds are needed."
        : ""),
    `To the target: the first evaluated round at which the ${WHAT[key].name}${averaged} is at least ` +
      `${targetWords(view)}, on average over the seeds that get there; (2 of 3) says that two of three do. ` +
      `Change it in the chart above; at first it is ${group.reference}'s mean final accuracy.`,
  ];
  return [...told, ...group.notes];
}
