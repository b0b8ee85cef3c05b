// Heat maps, and the first of them: the data split.

const WRITTEN = 30; // rows of a heat map in which numbers can be read

function heat(now, z, x, y, text, more = {}) {
  return {
    type: "heatmap",
    z,
    x,
    y,
    text,
    texttemplate: more.written ? "%{text}" : undefined,
    textfont: { size: 11 },
    colorscale: [
      [0, now.band],
      [1, now.heat],
    ],
    showscale: false,
    xgap: 1,
    ygap: 1,
    hoverongaps: false,
    ...more.trace,
  };
}

const heatLayout = (rows, across, down) => ({
  height: Math.max(220, Math.min(900, 90 + 26 * Math.min(rows, 30) + (rows > 30 ? 1.2 * rows : 0))),
  xaxis: { type: "category", title: { text: across }, showline: false, ticks: "" },
  yaxis: { type: "category", title: { text: down }, autorange: "reversed", showgrid: false },
});

function splitSection(view) {
  const names = () => Object.keys(view.group.splits);
  if (!names().length) return null;
  const split = () => view.group.splits[view.split] ?? view.group.splits[names()[0]];
  const total = (row) => row.reduce((sum, count) => sum + count, 0);
  const hasClasses = () => split().classes.join() !== "examples"; // that one column is of all examples
  const chart = new Chart({
    name: "Split",
    height: 380,
    fixed: true,
    describe: () =>
      `Examples ${hasClasses() ? `of ${split().classes.length} classes ` : ""}at ${split().of} clients. Totals by client: ` +
      split()
        .counts.slice(0, 20)
        .map((row, at) => `client ${split().clients[at]} ${total(row)}`)
        .join(", ") +
      ".",
    caption: () =>
      `Training examples per client (rows)${hasClasses() ? " and class (columns)" : "; the data have no classes"}; ` +
      "a stronger colour means more examples, on a square-root scale. " +
      `Split ${String(split().hash ?? "").slice(0, 12)}.` +
      (split().of > split().clients.length
        ? ` ${split().clients.length} of ${split().of} clients, evenly spaced when sorted by size.`
        : ""),
    draw: (now) => {
      const { classes, clients, counts } = split();
      const written = clients.length <= WRITTEN && classes.length <= 12;
      const trace = heat(
        now,
        counts.map((row) => row.map(Math.sqrt)),
        classes.map((name) => brief(name, 14)),
        clients.map((client, at) => `${client} (${total(counts[at])})`),
        counts,
        { written },
      );
      const classLine = hasClasses() ? "class %{x}<br>" : "";
      trace.hovertemplate = `client %{y}<br>${classLine}%{text} examples<extra></extra>`;
      return { traces: [trace], layout: heatLayout(clients.length, hasClasses() ? "class" : "", "client (examples)") };
    },
    rows: () => ({
      columns: ["client", ...split().classes, "total"],
      rows: split().counts.map((row, at) => [split().clients[at], ...row, total(row)]),
    }),
  });
  const controls = make("div", { class: "controls" });
  const refresh = () => {
    const shown = (name, { seed, label }) => `seed ${seed ?? name}` + (label ? `, ${label}` : "");
    const options = names().map((name) => [name, shown(name, view.group.splits[name])]);
    controls.replaceChildren(
      ...(options.length > 1
        ? [
            selection("Split", options, view.split ?? options[0][0], (name) => {
              view.split = name;
              chart.refresh();
            }),
          ]
        : []),
    );
    chart.refresh();
  };
  return {
    id: "split",
    heading: "Data split",
    node: make("div", {}, controls, chart.node),
    charts: [chart],
    refresh,
  };
}
