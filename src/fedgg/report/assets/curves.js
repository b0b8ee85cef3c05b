// A measure against rounds, bytes or seconds, with a target that can be dragged or typed.

const MOST_BANDS = 8;

function curvesSection(view) {
  const node = make("div");
  const present = (key) => view.group.runs.some((run) => run[key]);
  const measure = () => view.measure;
  const lines = () =>
    linesOf(view.group, (run) => run[view.what], view.window).filter(({ label }) => !view.hidden.has(label));
  const legend = legendOf(view);
  const targetValue = () => shownTarget(view);

  const chart = new Chart({
    name: "Training curves",
    height: 430,
    rounds: () => view.across === "round",
    nothing: () => nothingDrawn(lines(), `No ${measure().title} has been recorded for the lines shown.`),
    describe: () =>
      `${capital(measure().title)} on ${measure().place} against ${ACROSS[view.across]}. ` + curveDescription(view),
    caption: () =>
      `${capital(measure().title)} on ${measure().place}. ${bandWords(view)}` +
      (measure().higher || measure().key.endsWith("_loss") ? "" : " Lower is better.") +
      (view.window > 1 ? ` Smoothed: each value is the average of the last ${view.window} evaluated rounds.` : ""),
    draw: (now) => {
      const format = measure().percent ? ":.1%" : ":.4g";
      const shown = lines();
      const traces = lineTraces(shown, view.across, now, format, shown.length <= MOST_BANDS);
      return {
        traces,
        layout: {
          hovermode: "x unified",
          hoverdistance: -1,
          uirevision: `${view.group.id} ${view.across} ${view.what}`,
          xaxis: {
            title: { text: ACROSS[view.across] },
            rangemode: view.across === "round" ? "normal" : "tozero",
            hoverformat: view.across === "round" ? "d" : ".4~g",
            unifiedhovertitle: {
              text: { round: "round %{x}", megabytes: "%{x} MB", seconds: "%{x} s" }[view.across],
            },
          },
          yaxis: { title: { text: measure().title }, tickformat: measure().percent ? PERCENT_TICKS : NUMBER_TICKS },
          shapes: isNumber(targetValue()) ? [targetLine(measure(), targetValue(), now)] : [],
        },
      };
    },
    rows: () => curveRows(lines(), measure()),
    listen: (plot) =>
      plot.on("plotly_relayout", (change) => {
        const moved = ["shapes[0].y0", "shapes[0].y1"].map((key) => change[key]).filter(isNumber);
        if (!moved.length) return;
        const to = mean(moved);
        view.setTarget(measure().percent ? Math.round(1000 * to) / 1000 : Number(to.toPrecision(3)));
      }),
  });

  const smoothing = make("input", {
    type: "range",
    min: 1,
    max: 20,
    value: view.window,
    "aria-describedby": "window-now",
  });
  const windowNow = make("output", { id: "window-now" }, windowWords(view.window));
  smoothing.addEventListener("input", () => {
    view.window = Number(smoothing.value);
    windowNow.textContent = windowWords(view.window);
    view.changed();
  });
  const target = make("input", { type: "number", id: "target" });
  const targetUnit = make("span");
  const typed = () => Number(target.value) / (measure().percent ? 100 : 1);
  target.addEventListener("input", () => view.setTarget(target.value === "" ? null : typed(), true));
  const standard = button("Reset target", () => view.setTarget(null));

  const recorded = view.group.measures.filter(({ key }) => present(key));
  const axes = [
    ["round", "rounds"],
    ["megabytes", "megabytes"],
  ];
  if (view.group.runs.some((run) => run.seconds)) axes.push(["seconds", "seconds"]);
  node.append(
    make(
      "div",
      { class: "controls" },
      selection(
        "Show",
        recorded.map(({ key, title, brief: few, over_clients: over }) => [key, over ? title : `${title} (${few})`]),
        view.what,
        view.setMeasure,
      ),
      choice("Horizontal axis", axes, view.across, (key) => {
        view.across = key;
        view.changed();
      }),
      make("label", {}, "Smoothing", smoothing, windowNow),
      make("label", {}, targetUnit, target),
      standard,
    ),
    legend.node,
    chart.node,
  );
  return {
    id: "curves",
    heading: "Training curves",
    node,
    charts: [chart],
    refresh: () => {
      const typing = view.typed && document.activeElement === target; // do not overwrite a number while it is being typed
      const isPercent = measure().percent;
      targetUnit.textContent = isPercent ? "Target %" : "Target";
      for (const [name, value] of Object.entries({ min: 0, max: 100, step: 0.1 })) {
        if (isPercent) target.setAttribute(name, value);
        else target.removeAttribute(name);
      }
      if (!isPercent) target.step = "any";
      const written = (value) => (isPercent ? fixed(100 * value) : String(Number(value.toPrecision(3))));
      if (!typing) target.value = isNumber(view.target) ? written(view.target) : "";
      target.placeholder = isNumber(targetValue()) ? written(targetValue()) : "";
      target.title = `If empty, ${targetRule(view)}.`;
      standard.title = capital(`${targetRule(view)}.`);
      standard.hidden = !isNumber(view.target);
      legend.refresh();
      chart.refresh();
    },
  };
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const windowWords = (window) => (window === 1 ? "none" : `${window} rounds`);

/** The default target, as in the terminal's table. */
const targetRule = ({ group, measure }) =>
  `each seed's target is ${group.reference}'s final ${measure.short} with the same seed`;

/** The position of the target line: the chosen number, else the average of the seeds' targets. */
function shownTarget(view) {
  if (isNumber(view.target)) return view.target;
  const finals = [...referenceFinals(view.group, view.what, view.window).values()];
  return finals.length ? mean(finals) : null;
}

/** A sentence if none of the lines has a point. */
function nothingDrawn(lines, sentence) {
  const drawn = lines.some(({ main, open }) => main.length || open.some(({ curve }) => curve.length));
  if (drawn) return "";
  return lines.length ? sentence : "All lines are hidden: select one in the legend.";
}

/** A line across the whole chart that can be dragged. */
function targetLine(measure, target, now) {
  return {
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: target,
    y1: target,
    layer: "above",
    line: { color: now.soft, width: 1.5, dash: "4px,3px" },
    label: {
      text: `target ${valueOf(measure, target)}`,
      padding: 4,
      textposition: "start",
      yanchor: "bottom",
      font: { size: 11.5, color: now.soft },
    },
  };
}

function bandWords(view) {
  const { runs, labels } = view.group;
  const words = [];
  const ended = labels.map((label) => runs.filter((run) => run.label === label && isComplete(run)).length);
  if (Math.max(...ended) > 1) words.push("Line: mean over seeds; band: lowest to highest.");
  else if (Math.max(...ended) === 1) words.push("One seed, so there is no band.");
  const thin = [...new Set(runs.filter((run) => !isComplete(run) && run.status !== "diverged").map(unendedWords))];
  if (thin.length) words.push(`Thin lines: single runs (${thin.join("; ")}).`);
  if (runs.some((run) => run.status === "diverged")) words.push("Diverged runs are not shown.");
  return words.join(" ");
}

/** The chart in words: the last value of each line. */
function curveDescription(view) {
  const ends = linesOf(view.group, (run) => run[view.what], view.window)
    .filter(({ main }) => main.length)
    .map(({ label, main }) => {
      const end = main[main.length - 1];
      return `${label} ends at ${valueOf(view.measure, end.value)}`;
    });
  return ends.slice(0, 12).join("; ") + (ends.length > 12 ? `; and ${ends.length - 12} more` : "") + ".";
}

/** The lines as a table; `measure` is null for numbers that are not scores. */
function curveRows(lines, measure) {
  const isPercent = Boolean(measure?.percent);
  const shown = (value) => (isPercent ? percent(value, 2) : figure(value));
  const drawn = lines
    .flatMap(({ label, main, open }) => [[label, main], ...open.map(({ curve, words }) => [`${label} (${words})`, curve])])
    .filter(([, curve]) => curve.length);
  const rounds = [...new Set(drawn.flatMap(([, curve]) => curve.map((point) => point.round)))].sort((a, b) => a - b);
  const maps = drawn.map(([, curve]) => new Map(curve.map((point) => [point.round, point])));
  const cell = (point) => {
    if (!point) return NONE;
    return shown(point.value) + (point.seeds > 1 ? ` (${shown(point.low)} to ${shown(point.high)})` : "");
  };
  return {
    columns: ["round", ...drawn.map(([label]) => `${label}${isPercent ? ", %" : ""}`)],
    rows: rounds.map((round) => [round, ...maps.map((map) => cell(map.get(round)))]),
  };
}

/** Names with their lines, as buttons that show and hide them; of many lines, only some are shown at first. */
function legendOf(view) {
  const list = make("ul", { class: "legend", "aria-label": "Lines shown" });
  const node = make("div", {}, list);
  const buttons = new Map();
  const press = (hidden) => {
    view.hidden = new Set(hidden);
    view.changed();
  };
  if (view.group.labels.length > MOST_BANDS) {
    node.prepend(
      make(
        "div",
        { class: "controls" },
        button("Best five and reference", () => press(mostHidden(view.group))),
        button("All", () => press([])),
        button("None", () => press(view.group.labels)),
      ),
    );
  }
  const refresh = () => {
    if (buttons.size !== view.group.labels.length) {
      list.replaceChildren();
      buttons.clear();
    }
    view.group.labels.forEach((label, position) => {
      if (!buttons.has(label)) {
        const pressed = button(label, () => {
          view.hidden.has(label) ? view.hidden.delete(label) : view.hidden.add(label);
          view.changed();
        });
        buttons.set(label, pressed);
        list.append(make("li", {}, pressed));
      }
      const one = buttons.get(label);
      one.setAttribute("aria-pressed", String(!view.hidden.has(label)));
      one.querySelector("svg")?.remove();
      one.prepend(swatch(position));
    });
  };
  return { node, refresh };
}

/** The lines that are hidden at first if there are too many to read. */
function mostHidden(group) {
  if (group.labels.length <= MOST_BANDS) return [];
  const { higher } = group.measures.find(({ key }) => key === group.measure);
  const merit = ({ final }) => (final ? (higher ? 1 : -1) * final.mean : -Number.MAX_VALUE);
  const ranked = [...group.results[group.measure].rows].sort((a, b) => merit(b) - merit(a)).map((row) => row.label);
  const shown = new Set([...ranked.slice(0, 5), group.reference]);
  return group.labels.filter((label) => !shown.has(label));
}
