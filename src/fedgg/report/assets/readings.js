// What algorithms tell of themselves.

const HOW_TO_READ = {
  fedgg: {
    cosine:
      "Between a client's drift and the last global update, after its last local step: 1 is the same way, 0 across, " +
      "−1 against it. FedGG's term turns it upwards; a run with mu = 0 beside it shows by how much.",
    weight:
      "The weight λ of the cosine loss. Under the adaptive rule it is μ times drift times step: if it is many orders " +
      "below the loss, FedGG is FedAvg.",
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
  const lines = (name) =>
    linesOf(view.group, (run) => run.readings[name], view.window).filter(
      ({ label, main, open }) => !view.hidden.has(label) && (main.length || open.some(({ curve }) => curve.length)),
    );
  const made = names.map(
    (name) =>
      new Chart({
        name: `Reading ${name}`,
        height: 270,
        says: () =>
          `${name} against rounds. ` +
          lines(name)
            .filter(({ main }) => main.length)
            .map(({ label, main }) => `${label} ends at ${figure(main[main.length - 1].value)}`)
            .join("; ") +
          ".",
        caption: () => sentence(name) + (lines(name).length ? "" : " None of the lines shown tells it."),
        draw: (now) => ({
          traces: lineTraces(lines(name), "round", now, ":.4g", lines(name).length <= MOST_BANDS),
          layout: {
            hovermode: "x unified",
            hoverdistance: -1,
            xaxis: { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" } },
            yaxis: { title: { text: "" }, tickformat: ".3~g", exponentformat: "power" },
          },
        }),
        rows: () => curveRows(lines(name), { what: "train_loss" }),
      }),
  );
  const blocks = made.map((chart, at) => make("div", {}, make("h3", {}, names[at]), chart.node));
  const legend = legendOf(view);
  return {
    id: "readings",
    heading: "Inside the algorithms",
    charts: made,
    node: make("div", {}, legend.node, make("div", { class: "grid" }, blocks)),
    refresh: () => {
      legend.refresh();
      made.forEach((chart) => chart.refresh());
    },
  };
}
