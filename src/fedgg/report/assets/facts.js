// Events, settings and versions.

function eventsSection(view) {
  const node = make("div");
  const refresh = () => {
    const happened = events(view.group);
    const broken = page.problems.filter(({ shown }) => !shown).map(({ path, what, why }) => [path, what, why, ""]);
    const rows = [...broken, ...happened];
    const columns = ["run", "event", "details", "time"].slice(0, rows.some((row) => row[3]) ? 4 : 3);
    const all = rows.map((row) => row.slice(0, columns.length));
    const missing = view.group.missing.length;
    const say = make(
      "p",
      { class: "lead" },
      all.length
        ? ""
        : "None: no client was dropped, no run diverged or was interrupted, and every folder is complete.",
    );
    if (missing) say.append(`${missing} of ${view.group.size} runs have not started or cannot be read. `);
    node.replaceChildren(
      say,
      ...(all.length
        ? [
            make(
              "div",
              { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Events" },
              table("Dropped clients; diverged, unfinished, resumed and damaged runs", columns, all),
            ),
          ]
        : []),
    );
  };
  return { id: "events", heading: "Events", node, charts: [], refresh };
}

/** One line for each event: [run, event, details, time]. */
function events(group) {
  const found = [];
  for (const run of group.runs) {
    const add = (event, details = "", time = "") => found.push([`${run.label}, seed ${run.seed}`, event, details, time]);
    const last = run.round.at(-1) ?? 0;
    if (run.status === "diverged") add(`diverged after round ${last}`, run.why ?? "");
    if (run.status === "spent") add(`stopped after round ${last}`, run.why ?? "");
    for (const fault of run.faults) add(run.status === "damaged" ? unendedWords(run) : "incomplete folder", fault);
    if (!isComplete(run) && !["diverged", "damaged"].includes(run.status))
      add(`unfinished: round ${last} of ${run.asked ?? "?"}`);
    for (const { after_round, notes, when } of run.resumes)
      add(`resumed after round ${after_round ?? "?"}`, Array.isArray(notes) ? notes.join("; ") : "", time(when));
    for (const { who, what, after_round, when } of run.processes ?? [])
      add(`after round ${after_round ?? "?"}: ${who ?? "a process"}`, what ?? "", time(when));
    for (const { client, what, round } of run.notes ?? []) add(`client ${client} in round ${round}`, what);
    const reasons = new Map(); // the same client for the same reason, round after round, is one line
    for (const { client, why, round } of run.lost) {
      const key = JSON.stringify([client, why]);
      reasons.set(key, [...(reasons.get(key) ?? []), round]);
    }
    for (const [key, rounds] of reasons) {
      const [client, why] = JSON.parse(key);
      const when =
        rounds.length === 1 ? `in round ${rounds[0]}` : `in ${rounds.length} rounds (${rounds[0]} to ${rounds.at(-1)})`;
      add(`client ${client} dropped ${when}`, why);
    }
    if (run.lost_of > run.lost.length) add(`${run.lost_of - run.lost.length} more dropped clients`);
  }
  return found;
}

/** 2026-01-31T12:00:00.123456+00:00 as 2026-01-31 12:00:00; anything else as it is. */
function time(when) {
  return String(when ?? "").replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:\+00:00|Z)$/, "$1 $2 UTC");
}

function settingsSection(view) {
  const node = make("div");
  const copied = make("span", { role: "status", class: "soft" });
  const copy = (text) => async () => {
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = "Copied.";
    } catch {
      // a page opened from disk may have no access to the clipboard: select the text instead
      const range = document.createRange();
      range.selectNodeContents(node.querySelector("#again"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied.textContent = document.execCommand("copy") ? "Copied." : "Selected: press Ctrl+C.";
    }
  };
  const refresh = () => {
    const { group } = view;
    const open = new Set([...node.querySelectorAll("details[open]")].map((one) => one.id));
    const details = (id, summary, ...content) =>
      make("details", { id, open: open.has(id) }, make("summary", {}, summary), ...content);
    const text = (content) => make("pre", { tabindex: 0 }, content);
    const parts = [make("h3", {}, "Reproduce these runs")];
    if (group.again) {
      parts.push(
        make("div", { class: "controls" }, button("Copy the command", copy(group.again)), copied),
        make("pre", { id: "again", tabindex: 0, "aria-label": "The command" }, group.again),
      );
    } else {
      parts.push(
        make(
          "p",
          {},
          "A model, an algorithm or data were passed from Python, so there is no command for it: " +
            "pass them again, with the settings below.",
        ),
      );
    }
    parts.push(make("h3", {}, "Settings"), details("shared", "Shared by all rows", text(group.settings.shared)));
    for (const [label, own] of Object.entries(group.settings.own))
      parts.push(details(`own-${label}`, label, text(own)));
    const splits = Object.entries(group.splits).map(([hash, split]) => [
      String(split.seed ?? NONE),
      hash,
      String(split.scheme ?? NONE),
      String(split.of),
    ]);
    if (splits.length)
      parts.push(
        make(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Splits" },
          table("Splits", ["seed", "hash", "scheme", "clients"], splits),
        ),
      );
    parts.push(
      make("h3", {}, "Versions"),
      ...group.conditions.map((sentence) => make("p", { class: "soft" }, sentence)),
    );
    for (const { runs, facts } of group.versions) {
      parts.push(
        make(
          "dl",
          { class: "facts" },
          Object.entries({ runs, ...facts }).flatMap(([name, fact]) => [
            make("dt", {}, name),
            make("dd", {}, String(fact ?? "not recorded")),
          ]),
        ),
      );
    }
    node.replaceChildren(...parts);
  };
  return { id: "settings", heading: "Settings and versions", node, charts: [], refresh };
}
