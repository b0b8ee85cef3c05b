// The page: its sections, the selected group of runs, and redrawing after an update.

const page = JSON.parse(document.getElementById("data").textContent);
const BUILDERS = [
  curvesSection,
  resultsSection,
  splitSection,
  clientsSection,
  classesSection,
  diagnosticsSection,
  sweepSection,
  eventsSection,
  settingsSection,
];
const views = new Map(); // by group, so that each keeps the reader's choices
let sections = [];
let current = null;

/** The reader's choices for one group; every change redraws the sections. */
function viewOf(group) {
  if (!views.has(group.id)) {
    const view = {
      group,
      across: "round",
      window: 1,
      hidden: new Set(mostHidden(group)),
      sort: null,
      target: null, // the reference's final value, seed by seed
      what: firstMeasure(group),
      /** The measure that is shown, and what the runs show by it. */
      get measure() {
        return view.group.measures.find(({ key }) => key === view.what);
      },
      get results() {
        return view.group.results[view.what];
      },
    };
    let due = false;
    view.changed = () => {
      // several changes before the next frame redraw once
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        if (current === view) sections.forEach((section) => section.refresh());
      });
    };
    view.setTarget = (target, typed = false) => {
      view.typed = typed;
      const share = view.measure.percent;
      view.target = !isNumber(target) ? null : share ? Math.min(1, Math.max(0, target)) : target;
      view.changed();
    };
    view.setMeasure = (key) => {
      const before = view.measure;
      view.what = key;
      // a target of one scale or direction means nothing on another
      if (before.percent !== view.measure.percent || !view.measure.percent || before.higher !== view.measure.higher)
        view.target = null;
      view.chosen = true;
      showHead();
      view.changed();
    };
    views.set(group.id, view);
  }
  const view = views.get(group.id);
  view.group = group;
  if (!group.results[view.what]) view.what = firstMeasure(group);
  return view;
}

/** The measure that is shown at first: the group's own, or the first that any run has recorded. */
function firstMeasure(group) {
  const recorded = (key) => group.runs.some((run) => run[key]);
  if (recorded(group.measure)) return group.measure;
  return group.measures.find(({ key }) => recorded(key))?.key ?? group.measure;
}

/** Build the sections of a group; a section without content is omitted. */
function show(group) {
  const main = document.getElementById("app");
  for (const section of sections) section.charts.forEach((chart) => chart.remove());
  current = viewOf(group);
  sections = BUILDERS.map((build) => build(current)).filter(Boolean);
  main.replaceChildren(
    ...sections.map((section) =>
      make(
        "section",
        { id: section.id, "aria-labelledby": `${section.id}-head` },
        make("h2", { id: `${section.id}-head` }, section.heading),
        section.node,
      ),
    ),
  );
  document
    .getElementById("contents")
    .replaceChildren(
      ...sections.map((section) => make("li", {}, make("a", { href: `#${section.id}` }, section.heading))),
    );
  sections.forEach((section) => section.refresh());
  showHead();
}

/** Title, answer and problems, above all sections. */
function showHead() {
  const { group } = current;
  document.getElementById("title").textContent = group.title;
  document.title = `${group.title}: ${group.about}`;
  document.getElementById("about").textContent = group.about;
  const { text, method } = group.results[current.chosen ? current.what : group.measure].answer;
  const answer = document.getElementById("answer");
  answer.textContent = text;
  answer.classList.toggle("long", text.length > 220);
  document.getElementById("method").textContent = method;
  showTroubles();
}

function showTroubles() {
  const { problems } = page;
  const place = document.getElementById("troubles");
  place.hidden = !problems.length;
  place.replaceChildren(
    make(
      "strong",
      {},
      problems.length === 1
        ? "One folder is missing, incomplete or damaged:"
        : `${problems.length} folders are missing, incomplete or damaged:`,
    ),
    make(
      "ul",
      {},
      problems.slice(0, 5).map(({ path, what, why }) => make("li", {}, make("code", {}, path), ` ${what}: ${why}`)),
    ),
    problems.length > 5 ? `and ${problems.length - 5} more, listed under Events.` : "",
  );
}

function showChoices() {
  const place = document.getElementById("groups");
  const places = page.groups.map((group) => group.place);
  const named = (group) =>
    places.indexOf(group.place) === places.lastIndexOf(group.place) ? "" : `: ${group.title}, ${group.path}`;
  const options = page.groups.map((group) => [group.id, group.place + named(group)]);
  place.replaceChildren(
    ...(options.length > 1
      ? [selection("Runs", options, current?.group.id, (id) => show(page.groups.find((group) => group.id === id)))]
      : []),
  );
}

/** The algorithm of each label, for the captions of its diagnostics. */
function prepare(group) {
  const byRow = group.settings.by_row,
    name = /^name = "(.*)"$/m;
  const named = (text) => (/\[algorithm\][^[]*/.exec(text ?? "")?.[0] ?? "").match(name)?.[1];
  group.algorithms = Object.fromEntries(
    group.labels.map((label) => [label, named(byRow[label]) ?? named(group.settings.shared)]),
  );
  return group;
}

function themeButton() {
  const order = ["auto", "light", "dark"];
  const one = document.getElementById("theme");
  one.hidden = false;
  one.addEventListener("click", () => {
    const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    one.textContent = `Theme: ${next}`;
    if (current) sections.forEach((section) => section.refresh());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    sections.forEach((section) => section.refresh()),
  );
}

function begin() {
  page.groups.forEach(prepare);
  document.getElementById("static").remove();
  document.getElementById("head").hidden = false;
  themeButton();
  if (page.groups.length) show(page.groups[0]);
  else waiting();
  showChoices();
  if (page.live) follow();
}

function waiting() {
  document.getElementById("title").textContent = "No run yet";
  document.getElementById("answer").textContent = "The page is filled in as soon as a run has started.";
  showTroubles();
}

begin();
