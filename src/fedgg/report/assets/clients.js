// Scores and losses of single clients, or the distribution over many clients.

const SYMBOLS = [
  ["circle", "●"],
  ["square", "■"],
  ["diamond", "◆"],
  ["triangle-up", "▲"],
  ["cross", "✚"],
  ["star", "★"],
  ["triangle-down", "▼"],
];
const AT_ONCE = SYMBOLS.length; // labels whose markers can be distinguished
const QUANTILES = ["lowest", "10 %", "25 %", "median", "75 %", "90 %", "highest"]; // of fedgg.analysis.run_columns
const BANDS = [
  [0, 6, "16"],
  [1, 5, "1e"],
  [2, 4, "2a"],
]; // pairs of quantiles, with the opacity of the band between them

/** The loss of single clients, as a measure beside those of the group. */
const TRAINING_LOSS = { title: "training loss", name: "loss", percent: false, higher: false };

/** The last values of a run's clients. */
const clientValues = (run, measure) =>
  measure === TRAINING_LOSS ? run.clients.loss : run.clients.scores[measure.key];
const clientValue = (measure, value) => (measure.percent ? `${percent(value)} %` : figure(value));

function clientsSection(view) {
  const having = () => view.group.runs.filter((run) => run.clients);
  if (!having().length) return null;
  const seeds = () => [...new Set(having().map((run) => run.seed))];
  const seed = () => view.clientSeed ?? seeds()[0];
  const here = () => having().filter((run) => run.seed === seed());
  const scored = () =>
    view.group.measures.filter(({ key, over_clients: over }) => !over && here().some((run) => run.clients.scores[key]));
  /** The measure by which clients are shown: the one chosen here, that of the page, or the first; null: the loss. */
  const score = () =>
    scored().find(({ key }) => key === view.clientMeasure) ??
    scored().find(({ key }) => key === view.measure.by_client) ??
    scored()[0] ??
    null;
  const many = () => here().some((run) => run.clients.quantiles);
  const measure = () => score() ?? TRAINING_LOSS;
  const chosen = () =>
    here()
      .filter((run) => !view.hidden.has(run.label))
      .slice(0, AT_ONCE);
  const one = () => here().find((run) => run.label === view.clientLabel) ?? here()[0];
  const position = (run) => view.group.labels.indexOf(run.label);

  const byClient = (what) =>
    new Chart({
      get name() {
        return `${capital(what().title)} by client`;
      },
      height: 330,
      fixed: true,
      nothing: () =>
        chosen().some((run) => clientValues(run, what())?.some(isNumber))
          ? ""
          : here().length
            ? `None of the lines shown has recorded a ${what().title}.`
            : "No run of this seed has recorded its clients.",
      describe: () =>
        `${capital(what().title)} of each client, seed ${seed()}. ` +
        chosen()
          .map((run) => worstWords(run, what()))
          .filter(Boolean)
          .join("; ") +
        ".",
      caption: () =>
        (what() === TRAINING_LOSS
          ? "Mean loss of a client's batches during training, in the last round it took part in. "
          : `${what().caption}, at the last evaluation. `) +
        (many()
          ? "The clients of each line are sorted by their own value, worst first." + subsetWords(chosen())
          : "Clients are sorted by their mean over the lines shown, worst first."),
      draw: (now) => {
        const runs = chosen().filter((run) => clientValues(run, what())?.some(isNumber));
        const shown = { format: what().percent ? ":.1%" : ":.4g", measure: what(), now, position };
        return {
          traces: many() ? sortedTraces(runs, shown, view.client) : markerTraces(runs, shown),
          layout: {
            hovermode: "closest",
            xaxis: many()
              ? { title: { text: "clients, worst to best (%)" }, range: [-2, 102] }
              : clientAxis(worstFirst(runs, what())),
            yaxis: { title: { text: what().title }, tickformat: what().percent ? PERCENT_TICKS : NUMBER_TICKS },
          },
        };
      },
      rows: () => clientRows(chosen(), what()),
    });
  const scores = byClient(measure);
  const loss = byClient(() => TRAINING_LOSS);

  /** The values over rounds of the run selected: one row for each client, or the quantiles over clients. */
  const history = () => {
    const { history: byClient, quantiles } = one()?.clients ?? {};
    const source = byClient ?? quantiles;
    return {
      isHistory: Boolean(byClient),
      rounds: (score() ? source?.evaluated[score().key] : source?.round) ?? [],
      values: (score() ? source?.scores[score().key] : source?.loss) ?? [],
    };
  };
  const overRounds = new Chart({
    name: "Clients over rounds",
    height: 330,
    fixed: true,
    rounds: () => true,
    nothing: () => (history().rounds.length ? "" : `No ${measure().title} of single clients has been recorded yet.`),
    describe: () =>
      `${capital(measure().title)} ${history().isHistory ? "of each client" : "of the clients (quantiles)"} over the rounds, ` +
      `${one()?.label}, seed ${seed()}.`,
    caption: () =>
      `${one()?.label}, seed ${seed()}: ` +
      (history().isHistory
        ? `${measure().title} of each client (rows) over the rounds (columns); ` +
          `a stronger colour means a higher ${measure().name}.`
        : `${measure().title} over the ${one().clients.of} clients, of each round those ` +
          (score() ? "with hold-out examples" : "that took part") +
          ". Line: median; bands, from the inside out: the middle 50 %, the middle 80 %, all clients."),
    draw: (now) => {
      const { isHistory, rounds, values } = history();
      const format = measure().percent ? ":.1%" : ":.4g";
      if (!isHistory)
        return {
          traces: quantileTraces(rounds, values, colourOf(position(one()), now), format),
          layout: {
            height: 330,
            hovermode: "x unified",
            hoverdistance: -1,
            xaxis: { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" } },
            yaxis: { title: { text: measure().title }, tickformat: measure().percent ? PERCENT_TICKS : NUMBER_TICKS },
          },
        };
      const { client } = one().clients;
      const trace = heat(now, values, rounds, client.map(String), values);
      trace.hovertemplate = `client %{y}, round %{x}<br>%{z${format}}<extra></extra>`;
      const layout = heatLayout(client.length, "round", "client");
      const scale = {
        showscale: true,
        colorbar: {
          thickness: 10,
          outlinewidth: 0,
          tickformat: measure().percent ? PERCENT_TICKS : NUMBER_TICKS,
          tickfont: { size: 11, color: now.soft },
        },
      };
      return {
        traces: [{ ...trace, ...scale, xgap: 0 }],
        layout: { ...layout, xaxis: { title: { text: "round" }, showline: false } },
      };
    },
    rows: () => {
      const { isHistory, rounds, values } = history();
      const cell = (value) => (measure().percent ? percent(value) : figure(value));
      if (!isHistory)
        return { columns: ["round", ...QUANTILES], rows: rounds.map((round, at) => [round, ...values[at].map(cell)]) };
      const { client } = one().clients;
      return { columns: ["client", ...rounds], rows: values.map((row, at) => [client[at], ...row.map(cell)]) };
    },
  });
  overRounds.node.classList.add("wide");

  const controls = make("div", { class: "controls" });
  const lead = make("p", { class: "lead" });
  const grid = make("div", { class: "grid" });
  const signs = make("ul", { class: "legend signs", "aria-label": "Lines shown" });
  const clientStatus = make("p", { class: "soft", role: "status" });
  const search = make("input", { type: "number", min: 0, step: 1, id: "client" });
  search.addEventListener("input", () => {
    view.client = search.value === "" ? null : Number(search.value);
    highlight();
  });
  const highlight = () => {
    clientStatus.textContent = many() && isNumber(view.client) ? clientWords(chosen(), view.client, measure()) : "";
    scores.refresh();
    loss.refresh();
  };
  const refresh = () => {
    signs.replaceChildren(
      ...chosen().map((run, at) => {
        const sign = many()
          ? swatch(position(run))
          : make("span", { "aria-hidden": "true", style: `color:${colourOf(position(run))}` }, SYMBOLS[at][1]);
        return make("li", {}, sign, ` ${run.label}`);
      }),
    );
    const choices = [
      scored().length > 1 &&
        selection(
          "Score",
          scored().map(({ key, title }) => [key, title]),
          score().key,
          (key) => {
            view.clientMeasure = key;
            refresh();
          },
        ),
      selection(
        "Seed",
        seeds().map((number) => [number, String(number)]),
        seed(),
        (number) => {
          view.clientSeed = Number(number);
          refresh();
        },
      ),
      selection(
        "Show over rounds",
        here().map((run) => [run.label, run.label]),
        one()?.label,
        (label) => {
          view.clientLabel = label;
          overRounds.refresh();
        },
      ),
    ].filter(Boolean);
    // The input element is kept, so that a number can be typed while a live page is updated.
    if (!controls.contains(search)) controls.replaceChildren(make("label", {}, "Highlight client", search));
    search.parentNode.hidden = !many();
    while (controls.firstChild !== search.parentNode) controls.firstChild.remove();
    controls.prepend(...choices);
    const sentences = chosen()
      .map((run) => worstWords(run, measure()))
      .filter(Boolean);
    lead.textContent =
      (score() ? "" : "No hold-out examples, so losses are shown: set data.holdout = 0.2 for accuracies. ") +
      (sentences.length ? `Worst clients by ${measure().title}, seed ${seed()}: ${sentences.join("; ")}.` : "");
    const shown = [...(score() ? [scores] : []), loss, overRounds];
    if (grid.children.length !== shown.length) grid.replaceChildren(...shown.map((chart) => chart.node));
    loss.node.classList.toggle("wide", !score());
    overRounds.refresh();
    highlight();
  };
  const more =
    view.group.labels.length > 1
      ? make("p", { class: "soft" }, `The lines selected in the first chart are shown, at most ${AT_ONCE} of them.`)
      : null;
  return {
    id: "clients",
    heading: "Clients",
    node: make("div", {}, lead, controls, clientStatus, signs, grid, more),
    charts: [scores, loss, overRounds],
    refresh,
  };
}

/** One marker for each client, those of several runs side by side so that equal values do not hide each other. */
function markerTraces(runs, { measure, format, now, position }) {
  const order = new Map(worstFirst(runs, measure).map((client, at) => [client, at]));
  return runs.map((run, at) => ({
    type: "scatter",
    mode: "markers",
    name: brief(run.label, 40),
    y: clientValues(run, measure),
    x: run.clients.client.map(
      (client) => order.get(String(client)) + (at - (runs.length - 1) / 2) * Math.min(0.16, 0.8 / runs.length),
    ),
    customdata: run.clients.client.map((client, which) => [client, run.clients.examples[which] ?? NONE]),
    hovertemplate: `client %{customdata[0]} (%{customdata[1]} examples)<br>%{y${format}}`,
    marker: {
      color: colourOf(position(run), now),
      size: 8,
      opacity: 0.9,
      line: { color: now.ground, width: 1 },
      symbol: SYMBOLS[at][0],
    },
  }));
}

/** One line for each run through its clients, sorted; the client searched for is marked on each. */
function sortedTraces(runs, { measure, format, now, position }, searched) {
  return runs.flatMap((run) => {
    const ranked = rankedClients(run, measure);
    const colour = colourOf(position(run), now);
    const place = ({ rank }) => (ranked.length > 1 ? (100 * rank) / (ranked.length - 1) : 50);
    const shared = (these) => ({
      type: "scatter",
      name: brief(run.label, 40),
      x: these.map(place),
      y: these.map(({ value }) => value),
      customdata: these.map(({ client, examples }) => [client, examples ?? NONE]),
      hovertemplate: `client %{customdata[0]} (%{customdata[1]} examples)<br>%{y${format}}`,
    });
    const marked = ranked.filter(({ client }) => client === searched);
    return [
      {
        ...shared(ranked),
        mode: ranked.length === 1 ? "markers" : "lines",
        line: { color: colour, dash: dashOf(position(run)), width: 2.2 },
        marker: { color: colour },
      },
      ...(marked.length
        ? [
            {
              ...shared(marked),
              mode: "markers",
              marker: { color: colour, size: 12, line: { color: now.ink, width: 2 } },
            },
          ]
        : []),
    ];
  });
}

/** The median as a line, and bands between pairs of quantiles. */
function quantileTraces(rounds, values, colour, format) {
  const column = (at) => values.map((row) => row[at]);
  const bands = BANDS.map(([low, high, opacity]) => ({
    x: [...rounds, ...[...rounds].reverse()],
    y: [...column(high), ...column(low).reverse()],
    mode: "lines",
    line: { width: 0 },
    fill: "toself",
    fillcolor: colour + opacity,
    hoverinfo: "skip",
  }));
  // The quantiles other than the median are shown by the bands; as lines without width they can be hovered over.
  const lines = QUANTILES.map((name, at) => ({
    x: rounds,
    y: column(at),
    name,
    mode: rounds.length === 1 ? "markers" : "lines",
    line: { color: colour, width: name === "median" ? 2.2 : 0 },
    marker: { color: colour, size: name === "median" ? 8 : 4 },
    hovertemplate: `%{y${format}}`,
  }));
  return [...bands, ...lines.reverse()];
}

/** The clients of a run that have a value, the worst first. */
function rankedClients(run, measure) {
  const { client, examples } = run.clients;
  const values = clientValues(run, measure);
  const having = client
    .map((number, at) => ({ client: number, examples: examples[at], value: values?.[at] }))
    .filter(({ value }) => isNumber(value));
  having.sort((a, b) => (measure.higher ? a.value - b.value : b.value - a.value));
  return having.map((one, rank) => ({ ...one, rank }));
}

/** Clients ordered by their mean over the runs shown, the worst first. */
function worstFirst(runs, measure) {
  const sums = new Map();
  for (const run of runs) {
    const values = clientValues(run, measure);
    run.clients.client.forEach((client, at) => {
      const value = values?.[at];
      if (isNumber(value)) sums.set(String(client), [...(sums.get(String(client)) ?? []), value]);
    });
  }
  const way = measure.higher ? 1 : -1;
  return [...sums].sort(([, a], [, b]) => way * (mean(a) - mean(b))).map(([client]) => client);
}

/** Clients by their rank, each under its own number as long as there is room. */
function clientAxis(order) {
  const every = Math.ceil(order.length / 40);
  const shown = order.map((client, at) => [client, at]).filter(([, at]) => at % every === 0);
  return {
    title: { text: "client" },
    tickvals: shown.map(([, at]) => at),
    ticktext: shown.map(([client]) => client),
    range: [-0.6, order.length - 0.4],
  };
}

/** The worst client of a run, with the round if the run has not finished. */
function worstWords(run, measure) {
  const ranked = rankedClients(run, measure);
  if (ranked.length < 2) return "";
  const shown = (value) => clientValue(measure, value);
  const worst = ranked.filter(({ value }) => value === ranked[0].value);
  const who = worst.length === 1 ? `client ${worst[0].client}` : `${worst.length} clients`;
  const last = (measure === TRAINING_LOSS ? run.round.at(-1) : run.clients.evaluated[measure.key]) ?? "?";
  const when = isComplete(run) ? "" : `, round ${last} of ${run.planned_rounds ?? "?"}`;
  const middle = run.clients.quantiles ? `, median ${shown(ranked[Math.floor(ranked.length / 2)].value)}` : "";
  return `${run.label} ${shown(ranked[0].value)} (${who}${when})${middle}`;
}

/** One client in each of the runs shown. */
function clientWords(runs, client, measure) {
  const sentences = runs.flatMap((run) => {
    const ranked = rankedClients(run, measure);
    const one = ranked.find((other) => other.client === client);
    if (!one) return [];
    const value = clientValue(measure, one.value);
    const examples = isNumber(one.examples) ? `, ${one.examples} examples` : "";
    return [`${run.label} ${value} (rank ${one.rank + 1} of ${ranked.length}${examples})`];
  });
  if (sentences.length) return `Client ${client}: ${sentences.join("; ")}.`;
  return `The runs shown have no value of client ${client}.${subsetWords(runs)}`;
}

/** A sentence if not all clients are on the page. */
function subsetWords(runs) {
  const some = runs.find((run) => run.clients.of > run.clients.client.length);
  return some ? ` ${some.clients.client.length} of ${some.clients.of} clients, evenly spaced by rank.` : "";
}

function clientRows(runs, measure) {
  const clients = worstFirst(runs, measure);
  const places = runs.map((run) => new Map(run.clients.client.map((client, at) => [String(client), at])));
  const cell = (run, at) => (measure.percent ? percent : figure)(clientValues(run, measure)?.[at]);
  return {
    columns: ["client", ...runs.map((run) => `${run.label}${measure.percent ? ", %" : ""}`)],
    rows: clients.map((client) => [client, ...runs.map((run, at) => cell(run, places[at].get(client)))]),
  };
}
