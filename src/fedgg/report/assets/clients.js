// How the global model serves each client.

const SYMBOLS = [
  ["circle", "●"],
  ["square", "■"],
  ["diamond", "◆"],
  ["triangle-up", "▲"],
  ["cross", "✚"],
  ["star", "★"],
  ["triangle-down", "▼"],
];
const AT_ONCE = SYMBOLS.length; // labels whose dots can be told apart
const ORDER = "Clients from worst to best on average.";

function clientsSection(view) {
  const having = () => view.group.runs.filter((run) => run.clients);
  if (!having().length) return null;
  const seeds = () => [...new Set(having().map((run) => run.seed))];
  const seed = () => view.clientSeed ?? seeds()[0];
  const here = () => having().filter((run) => run.seed === seed());
  const kept = () => here().some((run) => run.clients.holdout);
  const measure = () => (kept() ? "hold-out accuracy" : "training loss");
  const chosen = () =>
    here()
      .filter((run) => !view.hidden.has(run.label))
      .slice(0, AT_ONCE);
  const one = () => here().find((run) => run.label === view.clientLabel) ?? here()[0];

  const dots = (key, name, isPercent) =>
    new Chart({
      name: `${name} by client`,
      height: 330,
      fixed: true,
      says: () =>
        `${name} of each client, seed ${seed()}. Worst off: ` +
        chosen()
          .map((run) => leftBehind(run, key, isPercent))
          .filter(Boolean)
          .join("; ") +
        ".",
      caption: () =>
        key === "holdout"
          ? `Hold-out accuracy: the global model on the examples each client kept back, at the last evaluation. ${ORDER}`
          : `Loss: mean over a client's batches as it trained on them, in its last round. ${ORDER}`,
      draw: (now) => ({
        traces: chosen()
          .filter((run) => run.clients[key])
          .map((run, at, all) => ({
            type: "scatter",
            mode: "markers",
            name: brief(run.label, 40),
            y: run.clients[key],
            // Side by side, so that equal values do not hide each other.
            x: run.clients.client.map(
              (client) =>
                worstFirst(chosen(), key).indexOf(String(client)) +
                (at - (all.length - 1) / 2) * Math.min(0.16, 0.8 / all.length),
            ),
            customdata: run.clients.client.map((client, which) => [client, run.clients.examples[which]]),
            hovertemplate: `client %{customdata[0]} (%{customdata[1]} examples)<br>%{y${isPercent ? ":.1%" : ":.4g"}}`,
            marker: {
              color: colourOf(view.group.labels.indexOf(run.label), now),
              size: 8,
              opacity: 0.9,
              line: { color: now.ground, width: 1 },
              symbol: SYMBOLS[chosen().indexOf(run)][0],
            },
          })),
        layout: {
          hovermode: "closest",
          xaxis: clientAxis(worstFirst(chosen(), key)),
          yaxis: { title: { text: name.toLowerCase() }, tickformat: isPercent ? ".0%" : ".3~g" },
        },
      }),
      rows: () => clientRows(chosen(), key, isPercent),
    });
  const accuracy = dots("holdout", "Hold-out accuracy", true);
  const loss = dots("loss", "Training loss", false);

  const past = new Chart({
    name: "Clients over rounds",
    height: 330,
    fixed: true,
    says: () => `${capital(measure())} of each client over the rounds, ${one()?.label}, seed ${seed()}.`,
    caption: () =>
      `${one()?.label}, seed ${seed()}: ${measure()} of each client (down) over the rounds (across); ` +
      (kept() ? "stronger is better." : "stronger is a higher loss.") +
      (one()?.clients.history ? "" : " Too many clients to follow each."),
    draw: (now) => {
      const { history, client } = one()?.clients ?? {};
      if (!history)
        return { traces: [], layout: { height: 120, xaxis: { visible: false }, yaxis: { visible: false } } };
      const values = kept() ? history.holdout : history.loss;
      const trace = heat(now, values, kept() ? history.looked : history.round, client.map(String), values);
      trace.hovertemplate = `client %{y}, round %{x}<br>%{z${kept() ? ":.1%" : ":.4g"}}<extra></extra>`;
      const layout = heatLayout(client.length, "round", "client");
      const scale = {
        showscale: true,
        colorbar: {
          thickness: 10,
          outlinewidth: 0,
          tickformat: kept() ? ".0%" : ".2~g",
          tickfont: { size: 11, color: now.soft },
        },
      };
      return {
        traces: [{ ...trace, ...scale, xgap: 0 }],
        layout: { ...layout, xaxis: { title: { text: "round" }, showline: false } },
      };
    },
    rows: () => {
      const { history, client } = one()?.clients ?? {};
      const values = kept() ? history?.holdout : history?.loss;
      return {
        columns: ["client", ...((kept() ? history?.looked : history?.round) ?? [])],
        rows: (values ?? []).map((row, at) => [client[at], ...row.map((v) => (kept() ? percent(v) : figure(v)))]),
      };
    },
  });
  past.node.classList.add("wide");
  const controls = make("div", { class: "controls" });
  const told = make("p", { class: "lead" });
  const grid = make("div", { class: "grid" });
  const signs = make("ul", { class: "legend signs", "aria-label": "Signs" });
  const refresh = () => {
    signs.replaceChildren(
      ...chosen().map((run, at) => {
        const position = view.group.labels.indexOf(run.label);
        const sign = make("span", { "aria-hidden": "true", style: `color:${colourOf(position)}` }, SYMBOLS[at][1]);
        return make("li", {}, sign, ` ${run.label}`);
      }),
    );
    controls.replaceChildren(
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
        "Over rounds",
        here().map((run) => [run.label, run.label]),
        one()?.label,
        (label) => {
          view.clientLabel = label;
          past.refresh();
        },
      ),
    );
    const sentences = chosen()
      .map((run) => leftBehind(run, kept() ? "holdout" : "loss", kept()))
      .filter(Boolean);
    told.textContent =
      (kept()
        ? ""
        : "No client kept examples back, so there is its loss only: data.holdout = 0.2 would show its accuracy. ") +
      (sentences.length ? `Worst off at the end (${measure()}, seed ${seed()}): ${sentences.join("; ")}.` : "");
    const shown = [...(kept() ? [accuracy] : []), loss, past];
    if (grid.children.length !== shown.length) grid.replaceChildren(...shown.map((chart) => chart.node));
    for (const chart of shown) chart.refresh();
  };
  const more =
    view.group.labels.length > 1
      ? make("p", { class: "soft" }, `The dots are of the lines shown in the first chart, at most ${AT_ONCE}.`)
      : null;
  return {
    id: "clients",
    heading: "Client by client",
    node: make("div", {}, told, controls, signs, grid, more),
    charts: [accuracy, loss, past],
    refresh,
  };
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

/** Who is left behind, in a few words. */
function leftBehind(run, key, isPercent) {
  const told = run.clients.client
    .map((client, at) => [client, run.clients[key]?.[at]])
    .filter(([, value]) => isNumber(value));
  if (told.length < 2) return "";
  told.sort(([, a], [, b]) => (key === "loss" ? b - a : a - b));
  const shown = (value) => (isPercent ? `${percent(value)} %` : figure(value));
  return `${run.label}: ${shown(told[0][1])} (client ${told[0][0]})`;
}

function clientRows(runs, key, isPercent) {
  const clients = worstFirst(runs, key);
  const of = (run, client) => run.clients[key]?.[run.clients.client.map(String).indexOf(client)];
  return {
    columns: ["client", ...runs.map((run) => `${run.label}${isPercent ? ", %" : ""}`)],
    rows: clients.map((client) => [
      client,
      ...runs.map((run) => (isPercent ? percent(of(run, client)) : figure(of(run, client)))),
    ]),
  };
}
