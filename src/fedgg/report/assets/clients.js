// Hold-out accuracy and loss of single clients, or the distribution over many clients.

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

function clientsSection(view) {
  const having = () => view.group.runs.filter((run) => run.clients);
  if (!having().length) return null;
  const seeds = () => [...new Set(having().map((run) => run.seed))];
  const seed = () => view.clientSeed ?? seeds()[0];
  const here = () => having().filter((run) => run.seed === seed());
  const hasHoldout = () => here().some((run) => run.clients.holdout);
  const many = () => here().some((run) => run.clients.quantiles);
  const measure = () => (hasHoldout() ? "hold-out accuracy" : "training loss");
  const chosen = () =>
    here()
      .filter((run) => !view.hidden.has(run.label))
      .slice(0, AT_ONCE);
  const one = () => here().find((run) => run.label === view.clientLabel) ?? here()[0];
  const position = (run) => view.group.labels.indexOf(run.label);

  const byClient = (key, name, isPercent) =>
    new Chart({
      name: `${name} by client`,
      height: 330,
      fixed: true,
      nothing: () =>
        chosen().some((run) => run.clients[key]?.some(isNumber))
          ? ""
          : here().length
            ? `None of the lines shown has recorded a ${name.toLowerCase()}.`
            : "No run of this seed has recorded its clients.",
      describe: () =>
        `${name} of each client, seed ${seed()}. ` +
        chosen()
          .map((run) => worstWords(run, key, isPercent))
          .filter(Boolean)
          .join("; ") +
        ".",
      caption: () =>
        (key === "holdout"
          ? "Accuracy of the global model on each client's hold-out examples, at the last evaluation. "
          : "Mean loss of a client's batches during training, in the last round it took part in. ") +
        (many()
          ? "The clients of each line are sorted by their own value, worst first." + subsetWords(chosen())
          : "Clients are sorted by their mean over the lines shown, worst first."),
      draw: (now) => {
        const runs = chosen().filter((run) => run.clients[key]?.some(isNumber));
        const shown = { isPercent, format: isPercent ? ":.1%" : ":.4g", key, now, position };
        return {
          traces: many() ? sortedTraces(runs, shown, view.client) : markerTraces(runs, shown),
          layout: {
            hovermode: "closest",
            xaxis: many()
              ? { title: { text: "clients, worst to best (%)" }, range: [-2, 102] }
              : clientAxis(worstFirst(runs, key)),
            yaxis: { title: { text: name.toLowerCase() }, tickformat: isPercent ? PERCENT_TICKS : NUMBER_TICKS },
          },
        };
      },
      rows: () => clientRows(chosen(), key, isPercent),
    });
  const accuracy = byClient("holdout", "Hold-out accuracy", true);
  const loss = byClient("loss", "Training loss", false);

  /** The values over rounds of the run selected: one row for each client, or the quantiles over clients. */
  const history = () => {
    const { history: byClient, quantiles } = one()?.clients ?? {};
    const source = byClient ?? quantiles;
    return {
      isHistory: Boolean(byClient),
      rounds: (hasHoldout() ? source?.evaluated : source?.round) ?? [],
      values: (hasHoldout() ? source?.holdout : source?.loss) ?? [],
    };
  };
  const overRounds = new Chart({
    name: "Clients over rounds",
    height: 330,
    fixed: true,
    rounds: () => true,
    nothing: () => (history().rounds.length ? "" : `No ${measure()} of single clients has been recorded yet.`),
    describe: () =>
      `${capital(measure())} ${history().isHistory ? "of each client" : "of the clients (quantiles)"} over the rounds, ` +
      `${one()?.label}, seed ${seed()}.`,
    caption: () =>
      `${one()?.label}, seed ${seed()}: ` +
      (history().isHistory
        ? `${measure()} of each client (rows) over the rounds (columns); ` +
          `a stronger colour means a higher ${hasHoldout() ? "accuracy" : "loss"}.`
        : `${measure()} over the ${one().clients.of} clients, of each round those ` +
          (hasHoldout() ? "with hold-out examples" : "that took part") +
          ". Line: median; bands, from the inside out: the middle 50 %, the middle 80 %, all clients."),
    draw: (now) => {
      const { isHistory, rounds, values } = history();
      const format = hasHoldout() ? ":.1%" : ":.4g";
      if (!isHistory)
        return {
          traces: quantileTraces(rounds, values, colourOf(position(one()), now), format),
          layout: {
            height: 330,
            hovermode: "x unified",
            hoverdistance: -1,
            xaxis: { title: { text: "round" }, unifiedhovertitle: { text: "round %{x}" } },
            yaxis: { title: { text: measure() }, tickformat: hasHoldout() ? PERCENT_TICKS : NUMBER_TICKS },
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
          tickformat: hasHoldout() ? PERCENT_TICKS : NUMBER_TICKS,
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
      const cell = (value) => (hasHoldout() ? percent(value) : figure(value));
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
    clientStatus.textContent = many() && isNumber(view.client) ? clientWords(chosen(), view.client, hasHoldout()) : "";
    accuracy.refresh();
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
    ];
    // The input element is kept, so that a number can be typed while a live page is updated.
    if (!controls.contains(search)) controls.replaceChildren(make("label", {}, "Highlight client", search));
    search.parentNode.hidden = !many();
    while (controls.firstChild !== search.parentNode) controls.firstChild.remove();
    controls.prepend(...choices);
    const sentences = chosen()
      .map((run) => worstWords(run, hasHoldout() ? "holdout" : "loss", hasHoldout()))
      .filter(Boolean);
    lead.textContent =
      (hasHoldout() ? "" : "No hold-out examples, so losses are shown: set data.holdout = 0.2 for accuracies. ") +
      (sentences.length ? `Worst clients by ${measure()}, seed ${seed()}: ${sentences.join("; ")}.` : "");
    const shown = [...(hasHoldout() ? [accuracy] : []), loss, overRounds];
    if (grid.children.length !== shown.length) grid.replaceChildren(...shown.map((chart) => chart.node));
    loss.node.classList.toggle("wide", !hasHoldout());
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
    charts: [accuracy, loss, overRounds],
    refresh,
  };
}

/** One marker for each client, those of several runs side by side so that equal values do not hide each other. */
function markerTraces(runs, { key, format, now, position }) {
  const order = new Map(worstFirst(runs, key).map((client, at) => [client, at]));
  return runs.map((run, at) => ({
    type: "scatter",
    mode: "markers",
    name: brief(run.label, 40),
    y: run.clients[key],
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
function sortedTraces(runs, { key, format, now, position }, searched) {
  return runs.flatMap((run) => {
    const ranked = rankedClients(run, key);
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
function rankedClients(run, key) {
  const { client, examples } = run.clients;
  const having = client
    .map((number, at) => ({ client: number, examples: examples[at], value: run.clients[key]?.[at] }))
    .filter(({ value }) => isNumber(value));
  having.sort((a, b) => (key === "loss" ? b.value - a.value : a.value - b.value));
  return having.map((one, rank) => ({ ...one, rank }));
}

/** Clients ordered by their mean over the runs shown, the worst first. */
function worstFirst(runs, key) {
  const sums = new Map();
  for (const { clients } of runs) {
    clients.client.forEach((client, at) => {
      const value = clients[key]?.[at];
      if (isNumber(value)) sums.set(String(client), [...(sums.get(String(client)) ?? []), value]);
    });
  }
  const way = key === "loss" ? -1 : 1;
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
function worstWords(run, key, isPercent) {
  const ranked = rankedClients(run, key);
  if (ranked.length < 2) return "";
  const shown = (value) => (isPercent ? `${percent(value)} %` : figure(value));
  const worst = ranked.filter(({ value }) => value === ranked[0].value);
  const who = worst.length === 1 ? `client ${worst[0].client}` : `${worst.length} clients`;
  const last = (key === "holdout" ? run.clients.evaluated : run.round.at(-1)) ?? "?";
  const when = isComplete(run) ? "" : `, round ${last} of ${run.planned_rounds ?? "?"}`;
  const middle = run.clients.quantiles ? `, median ${shown(ranked[Math.floor(ranked.length / 2)].value)}` : "";
  return `${run.label} ${shown(ranked[0].value)} (${who}${when})${middle}`;
}

/** One client in each of the runs shown. */
function clientWords(runs, client, isPercent) {
  const key = isPercent ? "holdout" : "loss";
  const sentences = runs.flatMap((run) => {
    const ranked = rankedClients(run, key);
    const one = ranked.find((other) => other.client === client);
    if (!one) return [];
    const value = isPercent ? `${percent(one.value)} %` : figure(one.value);
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

function clientRows(runs, key, isPercent) {
  const clients = worstFirst(runs, key);
  const places = runs.map((run) => new Map(run.clients.client.map((client, at) => [String(client), at])));
  const cell = (run, at) => (isPercent ? percent(run.clients[key]?.[at]) : figure(run.clients[key]?.[at]));
  return {
    columns: ["client", ...runs.map((run) => `${run.label}${isPercent ? ", %" : ""}`)],
    rows: clients.map((client) => [client, ...runs.map((run, at) => cell(run, places[at].get(client)))]),
  };
}
