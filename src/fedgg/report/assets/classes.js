// Scores of single classes, of metrics that are recorded for each class.

function classesSection(view) {
  const recorded = () => view.group.measures.filter(({ key }) => view.group.runs.some((run) => run.classes[key]));
  if (!recorded().length) return null;
  const measure = () =>
    recorded().find(({ key }) => key === view.classMeasure) ??
    recorded().find(({ key }) => key === view.what) ??
    recorded()[0];
  /** For each line shown: the mean over its finished runs of each class. */
  const lines = () =>
    view.group.labels
      .map((label, position) => {
        const runs = view.group.runs.filter((run) => run.label === label && isComplete(run));
        const values = runs.map((run) => run.classes[measure().key]?.values).filter(Boolean);
        const names = [...new Set(values.flatMap(Object.keys))];
        const here = (name) => values.map((one) => one[name]).filter(isNumber);
        return { label, position, means: new Map(names.map((name) => [name, here(name).length ? mean(here(name)) : null])) };
      })
      .filter(({ label, means }) => means.size && !view.hidden.has(label))
      .slice(0, AT_ONCE);
  const names = () => [...new Set(lines().flatMap(({ means }) => [...means.keys()]))];

  const chart = new Chart({
    name: "Scores by class",
    height: 330,
    fixed: true,
    nothing: () => (lines().length ? "" : `None of the lines shown has finished with a ${measure().title} of each class.`),
    describe: () => `${capital(measure().title)} of ${names().length} classes.`,
    caption: () => `${capital(measure().title)} of each class at the last evaluation; mean over seeds.`,
    draw: (now) => ({
      traces: lines().map(({ label, position, means }, at, all) => ({
        type: "scatter",
        mode: "markers",
        name: brief(label, 40),
        x: names().map((_, where) => where + (at - (all.length - 1) / 2) * Math.min(0.16, 0.8 / all.length)),
        y: names().map((name) => means.get(name) ?? null),
        customdata: names().map((name) => plain(name)),
        hovertemplate: `class %{customdata}<br>%{y${measure().percent ? ":.1%" : ":.4g"}}`,
        marker: { color: colourOf(position, now), size: 8, symbol: SYMBOLS[at][0] },
      })),
      layout: {
        hovermode: "closest",
        xaxis: {
          title: { text: "class" },
          tickvals: names().map((_, at) => at),
          ticktext: names().map((name) => brief(name, 14)),
          range: [-0.6, names().length - 0.4],
        },
        yaxis: { title: { text: measure().title }, tickformat: measure().percent ? PERCENT_TICKS : NUMBER_TICKS },
      },
    }),
    rows: () => ({
      columns: ["class", ...lines().map(({ label }) => `${label}${measure().percent ? ", %" : ""}`)],
      rows: names().map((name) => [name, ...lines().map(({ means }) => numberOf(measure(), means.get(name)))]),
    }),
  });
  const controls = make("div", { class: "controls" });
  const signs = make("ul", { class: "legend signs", "aria-label": "Lines shown" });
  const refresh = () => {
    signs.replaceChildren(
      ...lines().map(({ label, position }, at) =>
        make(
          "li",
          {},
          make("span", { "aria-hidden": "true", style: `color:${colourOf(position)}` }, SYMBOLS[at][1]),
          ` ${label}`,
        ),
      ),
    );
    controls.replaceChildren(
      ...(recorded().length > 1
        ? [
            selection(
              "Score",
              recorded().map(({ key, title }) => [key, title]),
              measure().key,
              (key) => {
                view.classMeasure = key;
                chart.refresh();
              },
            ),
          ]
        : []),
    );
    chart.refresh();
  };
  return {
    id: "classes",
    heading: "Classes",
    node: make("div", {}, controls, signs, chart.node),
    charts: [chart],
    refresh,
  };
}
