// Diagnostics: numbers that algorithms record about themselves.

/**
 * Explanations of diagnostics by algorithm, for folders that do not record them. An algorithm declares its own beside
 * its method `diagnostics` (`diagnostic_texts`); they are in the page's data.
 */
const DIAGNOSTICS = {
  fedgg: {
    cosine:
      "Cosine between a client's drift and the last global update, after the last local step: 1 is the same direction, " +
      "0 orthogonal, −1 the opposite direction. FedGG's term increases it; a run with mu = 0 shows by how much.",
    weight:
      "The weight λ of the cosine loss. Under the adaptive rule it is μ times drift times step: if it is many orders of " +
      "magnitude below the loss, FedGG behaves like FedAvg.",
    step: "Length of the last local step. It shrinks as training converges; growth is an early sign of divergence.",
  },
  fedcl: { penalty_gradient: "Length of the penalty's gradient at a client's model at the end of local training." },
  fedcurv: { penalty_gradient: "Length of the penalty's gradient at a client's model at the end of local training." },
};
/** Diagnostics that every algorithm records. */
const COMMON = {
  drift:
    "Distance between a client's model and the global model at the end of local training. If it grows, the clients' " +
    "models diverge from each other.",
};
const GENERIC = "Recorded by the algorithm after each round: mean over clients, weighted by their examples.";

function diagnosticsSection(view) {
  const names = [...new Set(view.group.runs.flatMap((run) => Object.keys(run.readings)))];
  if (!names.length) return null;
  const having = (name) => view.group.runs.filter((run) => run.readings[name]?.some(isNumber));
  const ownEntry = (table, key) => (table && Object.hasOwn(table, key) ? table[key] : undefined);
  const explained = (label, name) =>
    ownEntry(ownEntry(view.group.diagnostic_texts, label), name) ??
    ownEntry(ownEntry(DIAGNOSTICS, view.group.algorithms[label]), name) ??
    ownEntry(COMMON, name);
  /** The explanation that all rows share; where rows differ, each one under the first row that has it. */
  const sentence = (name) => {
    const firstLabel = new Map();
    for (const { label } of having(name)) {
      const text = explained(label, name);
      if (text && !firstLabel.has(text)) firstLabel.set(text, label);
    }
    if (firstLabel.size < 2) return [...firstLabel.keys()][0] ?? GENERIC;
    return [...firstLabel].map(([text, label]) => `${label}: ${text}`).join(" ");
  };
  const lines = (name) =>
    linesOf(view.group, (run) => run.readings[name], view.window).filter(({ label }) => !view.hidden.has(label));
  const made = names.map(
    (name) =>
      new Chart({
        name: `Diagnostic ${name}`,
        height: 270,
        rounds: () => true,
        nothing: () => nothingDrawn(lines(name), `None of the lines shown has recorded ${name}.`),
        describe: () =>
          `${name} against rounds. ` +
          lines(name)
            .filter(({ main }) => main.length)
            .map(({ label, main }) => `${label} ends at ${figure(main[main.length - 1].value)}`)
            .join("; ") +
          ".",
        caption: () => sentence(name),
        draw: (now) => ({
          traces: lineTraces(lines(name), "round", now, ":.4g", lines(name).length <= MOST_BANDS),
          layout: {
            hovermode: "x unified",
            hoverdistance: -1,
            xaxis: { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" } },
            yaxis: { title: { text: "" }, tickformat: NUMBER_TICKS, exponentformat: "power" },
          },
        }),
        rows: () => curveRows(lines(name), null),
      }),
  );
  const blocks = made.map((chart, at) => make("div", {}, make("h3", {}, names[at]), chart.node));
  const legend = legendOf(view);
  return {
    id: "diagnostics",
    heading: "Algorithm diagnostics",
    charts: made,
    node: make("div", {}, legend.node, make("div", { class: "grid" }, blocks)),
    refresh: () => {
      legend.refresh();
      made.forEach((chart) => chart.refresh());
    },
  };
}
