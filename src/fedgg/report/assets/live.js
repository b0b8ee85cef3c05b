// Updates from `fedgg watch`: requested every two seconds; a response holds the changes.

const INTERVAL = 2000; // milliseconds

async function follow() {
  const sign = document.getElementById("live");
  sign.hidden = false;
  sign.textContent = "Live";
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 5 * INTERVAL : INTERVAL));
    try {
      const response = await fetch(`data.json?since=${page.version}`, {
        headers: { "If-None-Match": `"${page.version}"` },
        cache: "no-store",
      });
      if (response.status === 200) applyUpdate(await response.json());
      else if (response.status !== 304) throw new Error(String(response.status));
      sign.classList.remove("lost");
      sign.textContent = "Live";
    } catch {
      sign.classList.add("lost");
      sign.textContent = "Not live: fedgg watch has stopped or cannot be reached";
    }
  }
}

/** Groups and runs that have not changed are not in the update: they are taken from the page. */
function applyUpdate(update) {
  update.groups = update.groups
    .map((group) => (group.same ? page.groups.find((one) => one.id === group.id) : group))
    .filter(Boolean);
  const before = new Map(page.groups.flatMap((group) => group.runs.map((run) => [run.id, run])));
  for (const group of update.groups) {
    const fresh = new Map(group.runs.map((run) => [run.id, run]));
    group.runs = (group.run_ids ?? []).map((id) => fresh.get(id) ?? before.get(id)).filter(Boolean);
    prepare(group);
  }
  const shape = (groups) => JSON.stringify(groups.map((group) => [group.id, group.title, group.about]));
  const reshaped = shape(update.groups) !== shape(page.groups);
  Object.assign(page, update);
  const group = page.groups.find((one) => one.id === current?.group.id) ?? page.groups[0];
  if (!group) return waiting();
  const kinds = (one) => JSON.stringify([one.labels, one.seeds, one.axes, Object.keys(one.splits), sectionsOf(one)]);
  if (!current || current.group.id !== group.id || kinds(current.group) !== kinds(group)) show(group);
  else {
    viewOf(group);
    showHead();
    sections.forEach((section) => section.refresh());
  }
  if (reshaped) showChoices();
  return undefined;
}

/** The data on which sections and controls depend: if it changes, they are rebuilt. */
function sectionsOf(group) {
  const has = (test) => group.runs.some(test);
  return [
    ...group.measures.map(({ key }) => has((run) => run[key]) && key),
    has((run) => run.seconds),
    has((run) => run.clients),
    has((run) => Object.keys(run.classes).length),
    [...new Set(group.runs.flatMap((run) => Object.keys(run.readings)))].join(),
  ];
}
