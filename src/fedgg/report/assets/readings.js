// What algorithms tell of themselves, and the sweep.

const HOW_TO_READ = {
  fedgg: {
    cosine: "Between a client's drift and the last global update, after its last local step: 1 is the same way, 0 across, −1 against it. FedGG's term turns it upwards; a run with mu = 0 beside it shows by how much.",
    weight: "The weight λ of the cosine loss. Under the adaptive rule it is μ times drift times step: if it is many orders below the loss, FedGG is FedAvg.",
    drift: "How far a client moves from the global model within a round. Growing drift says that clients pull apart.",
    step: "Length of the last local step. It falls as training settles; a rise is a first sign of divergence.",
  },
};
const GENERIC = "As the algorithm tells it after each round: mean over its clients, weighted by their examples.";

function readingsSection(view) {
  const names = [...new Set(view.group.runs.flatMap((run) => Object.keys(run.readings)))];
  if (!names.length) return null;
  const having = (name) => view.group.runs.filter((run) => run.readings[name]?.some(isNumber));
  const guided = (name) => having(name).some((run) => (view.group.algorithms[run.label] ?? "") === "fedgg");
  const sentence = (name) => (guided(name) && HOW_TO_READ.fedgg[name]) || GENERIC;
  const lines = (name) => linesOf(view.group, (run) => run.readings[name], view.window)
    .filter(({ label, main, open }) => !view.hidden.has(label) && (main.length || open.some((curve) => curve.length)));
  const made = names.map((name) => new Chart({
    name: `Reading ${name}`, height: 270,
    says: () => `${name} against rounds. ` + lines(name).filter(({ main }) => main.length)
      .map(({ label, main }) => `${label} ends at ${figure(main[main.length - 1].value)}`).join("; ") + ".",
    caption: () => sentence(name) + (lines(name).length ? "" : " None of the lines shown tells it."),
    draw: (now) => ({
      traces: lineTraces(lines(name), "round", now, ":.4g", lines(name).length <= MOST_BANDS),
      layout: {
        hovermode: "x unified", hoverdistance: -1,
        xaxis: { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" } },
        yaxis: { title: { text: "" }, tickformat: ".3~g", exponentformat: "power" },
      },
    }),
    rows: () => curveRows(lines(name), { what: "train_loss" }),
  }));
  const blocks = made.map((chart, at) => make("div", {}, make("h3", {}, names[at]), chart.node));
  const legend = legendOf(view);
  return {
    id: "readings", heading: "Inside the algorithms", charts: made,
    node: make("div", {}, legend.node, make("div", { class: "grid" }, blocks)),
    refresh: () => { legend.refresh(); made.forEach((chart) => chart.refresh()); },
  };
}

function sweepSection(view) {
  const { axes } = view.group;
  if (!axes) return null;
  const keys = Object.keys(axes.values);
  const few = (key) => key.split(".").pop();
  const row = (label) => view.group.rows.find((one) => one.label === label);
  view.axes ??= { across: keys[keys.length - 1], down: keys.length > 1 ? keys[keys.length - 2] : null, fixed: {} };
  const best = axes.places[view.group.best] ?? Object.values(axes.places)[0];
  const fixedAt = (key) => view.axes.fixed[key] ?? best[keys.indexOf(key)];
  /** The label at a place, the axes not shown being held where the reader has them. */
  const labelAt = (place) => Object.keys(axes.places).find((label) => keys.every((key, at) =>
    axes.places[label][at] === (place[key] ?? fixedAt(key))));
  const values = (key) => axes.values[key].map((value) => brief(value, 16));
  const cells = () => (view.axes.down ? axes.values[view.axes.down] : [null]).map((_, y) =>
    axes.values[view.axes.across].map((__, x) => row(labelAt({ [view.axes.across]: x, ...(view.axes.down ? { [view.axes.down]: y } : {}) }))));
  const held = () => keys.filter((key) => key !== view.axes.across && key !== view.axes.down);

  const chart = new Chart({
    name: "Sweep", height: 340, fixed: true,
    says: () => `Final test accuracy over ${keys.map(few).join(" and ")}. Highest: ${view.group.best ?? "none yet"}.`,
    caption: () => "Final test accuracy in %, mean over seeds, on the server's test set; hover shows the deviation and the number of seeds."
      + (held().length ? ` Held: ${held().map((key) => `${few(key)} = ${axes.values[key][fixedAt(key)]}`).join(", ")}.` : ""),
    draw: (now) => {
      const grid = cells();
      const told = grid.map((line) => line.map((one) => (one?.final ? `${percent(one.final.mean)}${one.final.sd == null ? "" : ` ± ${percent(one.final.sd)}`} % (${one.final.n} seed${one.final.n > 1 ? "s" : ""})` : "not finished")));
      const x = values(view.axes.across);
      if (!view.axes.down) {
        const [line] = grid;
        return {
          traces: [{
            type: "scatter", mode: "lines+markers+text", x, y: line.map((one) => one?.final?.mean ?? null), customdata: told[0],
            text: line.map((one) => percent(one?.final?.mean)), textposition: "top center", cliponaxis: false,
            error_y: { type: "data", array: line.map((one) => one?.final?.sd ?? 0), color: now.soft, thickness: 1.2, width: 4 },
            line: { color: now.heat, width: 2 }, marker: { size: 8, color: now.heat }, hovertemplate: "%{customdata}<extra></extra>",
          }],
          layout: {
            xaxis: { type: "category", title: { text: plain(view.axes.across) } },
            yaxis: { title: { text: "final test accuracy" }, tickformat: ".0%" },
          },
        };
      }
      const trace = heat(now, grid.map((line) => line.map((one) => one?.final?.mean ?? null)), x, values(view.axes.down), null);
      return {
        traces: [{ ...trace, customdata: told, text: grid.map((line) => line.map((one) => (one?.final ? percent(one.final.mean) : ""))), texttemplate: "%{text}", textfont: { size: 13 },
          hovertemplate: `${plain(few(view.axes.across))} %{x}, ${plain(few(view.axes.down))} %{y}<br>%{customdata}<extra></extra>` }],
        layout: { ...heatLayout(grid.length, plain(view.axes.across), plain(view.axes.down)), height: Math.max(240, Math.min(640, 110 + 44 * grid.length)) },
      };
    },
    rows: () => ({
      columns: [view.axes.down ? `${view.axes.down} \\ ${view.axes.across}` : view.axes.across, ...axes.values[view.axes.across].map(String)],
      rows: cells().map((line, at) => [view.axes.down ? String(axes.values[view.axes.down][at]) : "final test accuracy %", ...line.map((one) => percent(one?.final?.mean))]),
    }),
  });
  const controls = make("div", { class: "controls" });
  const refresh = () => {
    const options = keys.map((key) => [key, key]);
    const choose = (which, other) => (key) => {
      if (view.axes[other] === key) view.axes[other] = view.axes[which]; // trade places
      view.axes[which] = key;
      refresh();
    };
    controls.replaceChildren(...(keys.length > 2 ? [
      selection("Across", options, view.axes.across, choose("across", "down")),
      selection("Down", options, view.axes.down, choose("down", "across")),
      ...held().map((key) => selection(`${few(key)} =`, axes.values[key].map((value, at) => [at, String(value)]), fixedAt(key),
        (at) => { view.axes.fixed[key] = Number(at); refresh(); })),
    ] : []));
    chart.refresh();
  };
  return { id: "sweep", heading: "The sweep", node: make("div", {}, controls, chart.node), charts: [chart], refresh };
}
