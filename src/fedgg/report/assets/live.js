// Updates from `fedgg watch`: requested every two seconds; the answer holds only what has changed.

const EVERY = 2000;

async function follow() {
  const sign = document.getElementById("live");
  sign.hidden = false;
  sign.textContent = "Live";
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? 5 * EVERY : EVERY));
    try {
      const answer = await fetch(`data.json?since=${page.version}`, {
        headers: { "If-None-Match": `"${page.version}"` },
        cache: "no-store",
      });
      if (answer.status === 200) take(await answer.json());
      else if (answer.status !== 304) throw new Error(String(answer.status));
      sign.classList.remove("lost");
      sign.textContent = "Live";
    } catch {
      sign.classList.add("lost");
      sign.textContent = "Not live: fedgg watch has stopped or cannot be reached";
    }
  }
}

/** Groups and runs that have not changed are not sent again: they are taken from the page. */
function take(news) {
  news.groups = news.groups
    .map((group) => (group.same ? page.groups.find((one) => one.id === group.id) : group))
    .filter(Boolean);
  const before = new Map(page.groups.flatMap((group) => group.runs.map((run) => [run.id, run])));
  for (const group of news.groups) {
    const fresh = new Map(group.runs.map((run) => [run.id, run]));
    group.runs = (group.run_ids ?? []).map((id) => fresh.get(id) ?? before.get(id)).filter(Boolean);
    prepare(group);
  }
  const shape = (groups) => JSON.stringify(groups.map((group) => [group.id, group.title, group.about]));
  const reshaped = shape(news.groups) !== shape(page.groups);
  Object.assign(page, news);
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

/** What decides which sections and controls there are: when it changes, they are built again. */
function sectionsOf(group) {
  const has = (test) => group.runs.some(test);
  return [
    ...Object.keys(WHAT).map((key) => has((run) => run[key])),
    has((run) => run.seconds),
    has((run) => run.clients),
    [...new Set(group.runs.flatMap((run) => Object.keys(run.readings)))].join(),
  ];
}
