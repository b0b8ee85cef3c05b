// Charts: Plotly in the page's colours, each with its numbers as a table and its picture as a file.

const DASHES = ["solid", "dash", "dashdot", "dot"];
const STROKES = ["", "5 3", "6 2 1.5 2", "1.5 2"];
const charts = new Set();

/** The current colours, light or dark. */
function theme() {
  const probe = make("span", { hidden: true });
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const named = Object.fromEntries(
    ["ink", "soft", "line", "ground", "band", "accent", "heat"].map((n) => [n, colour(n)]),
  );
  probe.remove();
  const dark =
    getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (document.documentElement.dataset.theme == null && matchMedia("(prefers-color-scheme: dark)").matches);
  return { ...named, dark, colours: dark ? page.palette.dark : page.palette.light };
}

const colourOf = (position, now = theme()) => now.colours[position % now.colours.length];
const dashOf = (position) => DASHES[position % DASHES.length];
const faint = (colour) => colour + "1c";

/** The line style of a label as a small picture, for legends and tables. */
function swatch(position) {
  return make(
    "svg",
    { viewBox: "0 0 32 12", "aria-hidden": "true" },
    make("line", {
      x1: 1,
      x2: 31,
      y1: 6,
      y2: 6,
      stroke: colourOf(position),
      "stroke-width": 2.5,
      "stroke-dasharray": STROKES[position % STROKES.length],
    }),
  );
}

function baseLayout(now, height) {
  const axis = {
    gridcolor: now.line,
    linecolor: now.line,
    zeroline: false,
    tickcolor: now.line,
    title: { font: { size: 13, color: now.soft }, standoff: 10 },
    tickfont: { size: 12, color: now.soft },
    fixedrange: false,
  };
  return {
    height,
    // Only the margins under the labels adapt: with all of them, a tick at the edge of the range can make the layout
    // alternate between two sizes.
    margin: { l: 10, r: 22, t: 14, b: 10 },
    showlegend: false,
    dragmode: "zoom",
    uirevision: "same",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: now.ink },
    hoverlabel: { bgcolor: now.ground, bordercolor: now.line, font: { color: now.ink, size: 12.5 }, align: "left" },
    xaxis: { ...axis, automargin: "bottom", showgrid: false, ticks: "outside", showline: true },
    yaxis: { ...axis, automargin: "left" },
  };
}

const PERCENT_TICKS = ".4~%"; // as many decimals as neighbouring ticks need to differ
const NUMBER_TICKS = ".6~g";
const EVERY_ROUND = 10; // rounds across the axis up to which each has a tick

/**
 * `spec`: name; describe(), its text for screen readers; draw(theme) -> {traces, layout}; rows() -> {columns, rows};
 * nothing(), a sentence shown instead of an empty chart; rounds(), whether the axis counts rounds.
 */
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.dirty = true;
    this.plot = make("div", { class: "plot", role: "img", style: `height:${spec.height}px` });
    this.numbers = make("div", {
      class: "scroll tall",
      hidden: true,
      tabindex: 0,
      role: "region",
    });
    this.caption = make("figcaption");
    this.toggle = button("Show as table", () => this.showTable(this.numbers.hidden), { "aria-expanded": "false" });
    this.files = ["png", "svg"].map((format) => button(format.toUpperCase(), () => this.save(format)));
    const reset = button(
      "Reset zoom",
      () => this.drawn && Plotly.relayout(this.plot, { "xaxis.autorange": true, "yaxis.autorange": true }),
    );
    this.tools = make("div", { class: "tools" }, this.toggle, spec.fixed ? null : reset, this.files);
    this.message = make("p", { class: "nothing soft", hidden: true });
    this.node = make("figure", {}, this.message, this.plot, this.caption, this.tools, this.numbers);
    charts.add(this);
    watchedCharts.observe(this.plot);
    this.plot.chart = this;
  }

  /** Draw now if visible, else when it becomes visible. */
  refresh() {
    this.dirty = true;
    this.numbers.setAttribute("aria-label", `${this.spec.name}: numbers`); // a name may change with the measure
    for (const file of this.files) file.setAttribute("aria-label", `${this.spec.name} as ${file.textContent}`);
    const nothing = this.spec.nothing?.() ?? "";
    this.message.textContent = nothing;
    this.message.hidden = !nothing;
    for (const part of [this.plot, this.caption, this.tools]) part.hidden = Boolean(nothing);
    if (nothing) return this.numbers.hidden || this.showTable(false);
    this.plot.setAttribute("aria-label", this.spec.describe());
    this.caption.textContent = this.spec.caption?.() ?? "";
    if (!this.numbers.hidden) this.showTable(true);
    if (this.visible) this.draw();
    return undefined;
  }

  draw() {
    if (!this.dirty || !this.node.isConnected || this.plot.hidden) return;
    this.dirty = false;
    const now = theme();
    const base = baseLayout(now, this.spec.height);
    const { traces, layout } = this.spec.draw(now);
    const merged = {
      ...base,
      ...layout,
      xaxis: { ...base.xaxis, ...layout.xaxis },
      yaxis: { ...base.yaxis, ...layout.yaxis },
    };
    for (const name of ["xaxis", "yaxis"]) merged[name].title = { ...base[name].title, ...layout[name]?.title };
    if (layout.height) this.plot.style.height = `${layout.height}px`;
    const options = {
      displayModeBar: false,
      responsive: true,
      doubleClick: "reset",
      edits: { shapePosition: Boolean(this.spec.listen) },
    };
    const first = !this.drawn;
    this.drawn = true;
    this.everyRound = false;
    Plotly.react(this.plot, traces, merged, options).then(() => this.wholeRounds());
    if (first) {
      this.spec.listen?.(this.plot);
      this.plot.on("plotly_relayout", () => this.wholeRounds());
    }
  }

  /** Ticks at whole rounds only, also if few rounds are in view. */
  wholeRounds() {
    const [first, last] = this.plot.layout?.xaxis?.range ?? [];
    const few = Boolean(this.spec.rounds?.()) && Math.abs(last - first) <= EVERY_ROUND;
    if (few === this.everyRound) return;
    this.everyRound = few;
    Plotly.relayout(this.plot, few ? { "xaxis.tick0": 0, "xaxis.dtick": 1 } : { "xaxis.tickmode": "auto" });
  }

  showTable(shown) {
    this.numbers.hidden = !shown;
    this.toggle.setAttribute("aria-expanded", String(shown));
    this.toggle.textContent = shown ? "Hide table" : "Show as table";
    if (!shown) return this.numbers.replaceChildren();
    const { columns, rows } = this.spec.rows();
    return this.numbers.replaceChildren(table(this.spec.name, columns, rows));
  }

  save(format) {
    this.draw();
    const { width, height } = this.plot.getBoundingClientRect();
    Plotly.downloadImage(this.plot, {
      format,
      width,
      height,
      scale: format === "png" ? 3 : 1,
      filename: this.spec.name.replace(/[^a-z0-9]+/gi, "-").toLowerCase(),
    });
  }

  remove() {
    charts.delete(this);
    watchedCharts.unobserve(this.plot);
    if (this.drawn) Plotly.purge(this.plot);
  }
}

const watchedCharts = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      target.chart.visible = isIntersecting;
      if (isIntersecting) target.chart.draw();
    }
  },
  { rootMargin: "250px" },
);

function redrawAll() {
  for (const chart of charts) chart.refresh();
}
addEventListener("beforeprint", () => charts.forEach((chart) => chart.draw()));

/** Lines with a band from lowest to highest, for any number against any axis. */
function lineTraces(lines, across, now, format, bands) {
  const traces = [];
  for (const { label, position, main, open } of lines) {
    const colour = colourOf(position, now),
      x = main.map((point) => point[across]);
    const shared = {
      mode: main.length === 1 ? "markers" : "lines",
      name: brief(label, 40),
      line: { color: colour, dash: dashOf(position), width: 2.2 },
      marker: { color: colour },
    };
    if (bands && main.some((point) => point.seeds > 1)) {
      const there = main.map((point) => point.high),
        back = main.map((point) => point.low).reverse();
      traces.push({
        x: [...x, ...[...x].reverse()],
        y: [...there, ...back],
        mode: "lines",
        line: { width: 0 },
        fill: "toself",
        fillcolor: faint(colour),
        hoverinfo: "skip",
      });
    }
    if (main.length) {
      const spread = main[0].seeds > 1 ? ` (%{customdata[0]${format}} to %{customdata[1]${format}})` : "";
      traces.push({
        ...shared,
        x,
        y: main.map((point) => point.value),
        customdata: main.map((point) => [point.low, point.high]),
        hovertemplate: `%{y${format}}${spread}`,
      });
    }
    for (const { curve, words } of open) {
      traces.push({
        ...shared,
        x: curve.map((p) => p[across]),
        y: curve.map((p) => p.value),
        mode: curve.length === 1 ? "markers" : "lines",
        line: { ...shared.line, width: 1 },
        opacity: 0.75,
        hovertemplate: `%{y${format}} ${words}`,
      });
    }
  }
  return traces;
}
