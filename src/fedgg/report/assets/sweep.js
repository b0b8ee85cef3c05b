// A sweep: a line over one setting, a heat map over two, a choice of two over more.

/** A row's final value with its deviation and number of seeds. */
function finalWords(measure, row) {
  if (!row?.final) return "not finished";
  const { mean: middle, sd, n } = row.final;
  return `${withDeviation(measure, middle, sd)}${measure.percent ? " %" : ""} (${n} seed${n > 1 ? "s" : ""})`;
}

function sweepSection(view) {
  const { axes } = view.group;
  if (!axes) return null;
  const keys = Object.keys(axes.values);
  const few = (key) => key.split(".").pop();
  const row = (label) => view.results.rows.find((one) => one.label === label);
  view.axes ??= { across: keys[keys.length - 1], down: keys.length > 1 ? keys[keys.length - 2] : null, fixed: {} };
  const best = () => axes.places[view.results.best] ?? Object.values(axes.places)[0];
  const fixedAt = (key) => view.axes.fixed[key] ?? best()[keys.indexOf(key)];
  /** The label at a place; settings that are not an axis have the chosen values. */
  const labelAt = (place) =>
    Object.keys(axes.places).find((label) =>
      keys.every((key, at) => axes.places[label][at] === (place[key] ?? fixedAt(key))),
    );
  const values = (key) => axes.values[key].map((value) => brief(value, 16));
  const cells = () =>
    (view.axes.down ? axes.values[view.axes.down] : [null]).map((_, y) =>
      axes.values[view.axes.across].map((__, x) =>
        row(labelAt({ [view.axes.across]: x, ...(view.axes.down ? { [view.axes.down]: y } : {}) })),
      ),
    );
  const names = () => `${plain(few(view.axes.across))} %{x}, ${plain(few(view.axes.down))} %{y}`;
  const held = () => keys.filter((key) => key !== view.axes.across && key !== view.axes.down);

  const chart = new Chart({
    name: "Sweep",
    height: 340,
    fixed: true,
    nothing: () => (view.results.rows.some((one) => one.final) ? "" : "No run of the sweep has finished yet."),
    describe: () =>
      `Final ${view.measure.title} over ${keys.map(few).join(" and ")}. ` +
      `${capital(bestWord(view.measure))}: ${view.results.best ?? "none yet"}.`,
    caption: () =>
      `Final ${view.measure.title}${view.measure.percent ? " in %" : ""}, mean over seeds, on ${view.measure.place}; ` +
      "hover shows the standard deviation and the number of seeds." +
      (held().length
        ? ` Fixed: ${held()
            .map((key) => `${few(key)} = ${axes.values[key][fixedAt(key)]}`)
            .join(", ")}.`
        : ""),
    draw: (now) => {
      const grid = cells();
      const { measure } = view;
      const hover = grid.map((line) => line.map((one) => finalWords(measure, one)));
      const x = values(view.axes.across);
      if (!view.axes.down) {
        const [line] = grid;
        return {
          traces: [
            {
              type: "scatter",
              mode: "lines+markers+text",
              x,
              y: line.map((one) => one?.final?.mean ?? null),
              customdata: hover[0],
              text: line.map((one) => numberOf(measure, one?.final?.mean)),
              textposition: "top center",
              cliponaxis: false,
              error_y: {
                type: "data",
                array: line.map((one) => one?.final?.sd ?? 0),
                color: now.soft,
                thickness: 1.2,
                width: 4,
              },
              line: { color: now.heat, width: 2 },
              marker: { size: 8, color: now.heat },
              hovertemplate: "%{customdata}<extra></extra>",
            },
          ],
          layout: {
            xaxis: { type: "category", title: { text: plain(view.axes.across) } },
            yaxis: {
              title: { text: `final ${measure.title}` },
              tickformat: measure.percent ? PERCENT_TICKS : NUMBER_TICKS,
            },
          },
        };
      }
      const trace = heat(
        now,
        grid.map((line) => line.map((one) => one?.final?.mean ?? null)),
        x,
        values(view.axes.down),
        null,
      );
      return {
        traces: [
          {
            ...trace,
            customdata: hover,
            text: grid.map((line) => line.map((one) => (one?.final ? numberOf(measure, one.final.mean) : ""))),
            texttemplate: "%{text}",
            textfont: { size: 13 },
            hovertemplate: `${names()}<br>%{customdata}<extra></extra>`,
          },
        ],
        layout: {
          ...heatLayout(grid.length, plain(view.axes.across), plain(view.axes.down)),
          height: Math.max(240, Math.min(640, 110 + 44 * grid.length)),
        },
      };
    },
    rows: () => ({
      columns: [
        view.axes.down ? `${view.axes.down} \\ ${view.axes.across}` : view.axes.across,
        ...axes.values[view.axes.across].map(String),
      ],
      rows: cells().map((line, at) => [
        view.axes.down
          ? String(axes.values[view.axes.down][at])
          : `final ${view.measure.title}${view.measure.percent ? " %" : ""}`,
        ...line.map((one) => numberOf(view.measure, one?.final?.mean)),
      ]),
    }),
  });
  const controls = make("div", { class: "controls" });
  const refresh = () => {
    const options = keys.map((key) => [key, key]);
    const choose = (which, other) => (key) => {
      if (view.axes[other] === key) view.axes[other] = view.axes[which]; // swap the two
      view.axes[which] = key;
      refresh();
    };
    controls.replaceChildren(
      ...(keys.length > 2
        ? [
            selection("Columns", options, view.axes.across, choose("across", "down")),
            selection("Rows", options, view.axes.down, choose("down", "across")),
            ...held().map((key) =>
              selection(
                `${few(key)} =`,
                axes.values[key].map((value, at) => [at, String(value)]),
                fixedAt(key),
                (at) => {
                  view.axes.fixed[key] = Number(at);
                  refresh();
                },
              ),
            ),
          ]
        : []),
    );
    chart.refresh();
  };
  return { id: "sweep", heading: "Sweep", node: make("div", {}, controls, chart.node), charts: [chart], refresh };
}
