// The result table: sortable by every column, with the cost of reaching the target.

const FIRST_ROWS = 50; // a button shows the rest

/** Columns: heading, tooltip, what is shown, and the number it is sorted by (null sorts last). */
function resultColumns(view) {
  const { group, measure, results } = view;
  const spread = (one) => (one == null ? NONE : withDeviation(measure, one.mean, one.sd));
  const many = group.labels.length > 1;
  const unit = measure.percent ? " %" : "";
  const worst = group.measures.find(({ key }) => key === results.worst_client);
  const byClient = group.measures.find(({ key }) => key === worst?.by_client) ?? worst;
  const reachedBy = new Map(
    group.labels.map((label) => [label, reaches(group, label, measure.key, view.target, view.window)]),
  );
  const reach = (name, shown) => ({
    low: true,
    tip: capital(reachRule(view)),
    show: ({ label }) => {
      const one = reachedBy.get(label);
      if (!one.seeds) return NONE;
      if (!one.reached) return "never";
      return shown(one[name]) + (one.reached < one.seeds ? ` (${one.reached} of ${one.seeds})` : "");
    },
    // Means over some of the seeds are sorted after means over all of them.
    by: ({ label }) => {
      const one = reachedBy.get(label);
      return one.reached ? one[name] + (one.reached < one.seeds ? 1e12 : 0) : null;
    },
  });
  const overSeeds = "mean ± sample standard deviation over seeds";
  return [
    { head: "algorithm", show: (row) => row.label, by: (row) => row.label, text: true },
    {
      head: "runs",
      tip: "Finished runs, and those that are excluded from the averages.",
      show: (row) => runsWords(row, measure),
      by: (row) => row.finished,
    },
    {
      head: `final${measure.over_clients ? "" : ` ${measure.title}`}${unit}`, // a long title is in the caption alone
      low: !measure.higher,
      tip: `At the last evaluated round; ${overSeeds}.`,
      show: (row) => spread(row.final),
      by: (row) => row.final?.mean ?? null,
    },
    {
      head: `${bestWord(measure)}${unit}`,
      low: !measure.higher,
      tip: `${capital(bestWord(measure))} ${measure.title} of any evaluated round; ${overSeeds}.`,
      show: (row) => spread(row.best),
      by: (row) => row.best?.mean ?? null,
    },
    group.private && {
      head: "epsilon",
      low: true,
      show: (row) => row.epsilon ?? NONE,
      by: (row) => (row.epsilon === "infinite" ? Number.MAX_VALUE : row.epsilon && Number(row.epsilon)),
    },
    many && {
      head: `against ${group.reference}${measure.percent ? ", points" : ""}`,
      low: !measure.higher,
      tip:
        `Final ${measure.title}${measure.percent ? ", in percentage points" : ""}; ` +
        "± half the width of the 95 % confidence interval.",
      show: (row) => difference(row, view),
      by: (row) => row.against_reference?.mean ?? (row.label === group.reference ? 0 : null),
    },
    many && {
      head: "verdict",
      tip: page.verdicts,
      show: (row) => row.against_reference?.verdict ?? NONE,
      by: (row) => row.against_reference?.verdict ?? null,
      text: true,
    },
    results.rows.some((row) => isNumber(row.worst_client)) && {
      head: `worst client, ${worst.where}${unit}`,
      low: !worst.higher,
      tip:
        `${worst.higher ? "Lowest" : "Highest"} ${byClient.title} of a client at the last evaluation; ` +
        "mean over seeds.",
      show: (row) => numberOf(worst, row.worst_client),
      by: (row) => row.worst_client,
    },
    { head: `rounds to ${targetWords(view)}`, ...reach("rounds", fixed) },
    { head: `MB to ${targetWords(view)}`, ...reach("megabytes", megabytes) },
    group.runs.some((run) => run.seconds) && {
      head: `seconds to ${targetWords(view)}`,
      ...reach("seconds", fixed),
    },
    {
      head: "MB in total",
      tip: "Sent and received by all clients over the whole run; mean over seeds.",
      low: true,
      show: (row) => megabytes(row.megabytes),
      by: (row) => row.megabytes,
    },
    results.rows.some((row) => isNumber(row.seconds)) && {
      head: "total time",
      tip: "Of all rounds, training and evaluation; mean over seeds.",
      low: true,
      show: (row) => duration(row.seconds),
      by: (row) => row.seconds,
    },
  ].filter(Boolean);
}

const targetWords = (view) => (isNumber(view.target) ? valueOf(view.measure, view.target) : "target");

/** The rule of the columns "to target", as in the terminal's table. */
function reachRule(view) {
  const { group, measure } = view;
  const name = measure.title;
  const averaged = view.window > 1 ? `, averaged over the last ${view.window} evaluated rounds,` : "";
  const target = isNumber(view.target)
    ? `${targetWords(view)} with every seed`
    : `${group.reference}'s final ${name}${averaged} with the same seed`;
  return (
    `counted until the first evaluated round at which a run's ${name}${averaged} is ` +
    `at ${measure.higher ? "least" : "most"} the target: ${target}. ` +
    "Mean over the seeds that reach it; “(2 of 3)” means that two of three seeds do."
  );
}

function difference(row, { group, measure }) {
  if (row.label === group.reference) return "reference";
  const one = row.against_reference;
  if (!one) return NONE;
  return (one.mean < 0 ? "−" : "+") + withDeviation(measure, Math.abs(one.mean), one.half_width);
}

function runsWords(row, measure) {
  const parts = [String(row.finished)];
  if (row.diverged) parts.push(`${row.diverged} diverged`);
  if (row.damaged) parts.push(`${row.damaged} damaged`);
  if (row.unfinished) parts.push(`${row.unfinished} unfinished`);
  if (row.lacking) parts.push(`${row.lacking} without ${measure.title}`);
  return parts.join(", ");
}

function resultsSection(view) {
  const head = make("tr"),
    body = make("tbody");
  const caption = make("span", { class: "fit" });
  const notes = make("ul", { class: "notes" });
  const more = button("", () => {
    view.allRows = !view.allRows;
    refresh();
  });
  const sheet = make("table", { class: "results" }, make("caption", {}, caption), make("thead", {}, head), body);
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
      heads[at].title = column.tip ?? "";
      heads[at].setAttribute("aria-sort", view.sort?.at === at ? (view.sort.up ? "ascending" : "descending") : "none");
    });
    const all = sorted(view.results.rows, columns); // all rows, however many are shown
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
    const { measure, group } = view;
    caption.textContent =
      `${capital(measure.title)} on ${measure.place}, seed${group.seeds.length > 1 ? "s" : ""} ` +
      `${group.seeds.join(", ")}${measure.higher ? "" : "; lower is better"}`;
    notes.replaceChildren(...resultNotes(view).map((text) => make("li", {}, text)));
  };
  const sortBy = (at) => {
    const columns = resultColumns(view);
    const up = view.sort?.at === at ? !view.sort.up : Boolean(columns[at].text || columns[at].low);
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
  const { group, results } = view;
  const many = group.labels.length > 1;
  const rules = [
    `${results.deviation_rule}${many ? ` ${results.difference_rule}` : ""}`,
    ...(many ? [`Verdict: ${page.verdicts}`] : []),
  ];
  const target =
    `Rounds, MB and seconds to ${targetWords(view)}: ${reachRule(view)} ` + "The target can be changed above the chart.";
  return [...rules, ...(group.runs.some(isComplete) ? [target] : []), ...results.notes];
}
