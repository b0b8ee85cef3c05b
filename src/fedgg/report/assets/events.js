// Events: dropped clients; diverged, unfinished, waiting, resumed and damaged runs; processes that ended.

function eventsSection(view) {
  const node = make("div");
  const refresh = () => {
    const unreadable = page.problems.filter(({ shown }) => !shown).map(({ path, what, why }) => [path, what, why, ""]);
    const rows = [...unreadable, ...events(view.group)];
    const columns = ["run", "event", "details", "time"].slice(0, rows.some((row) => row[3]) ? 4 : 3);
    const all = rows.map((row) => row.slice(0, columns.length));
    const missing = view.group.missing.length;
    const sentence = make(
      "p",
      { class: "lead" },
      all.length
        ? ""
        : "None: no client was dropped, no run diverged or was interrupted, and every folder is complete.",
    );
    if (missing) sentence.append(`${missing} of ${view.group.size} runs ${missing === 1 ? "has" : "have"} not started or cannot be read. `);
    node.replaceChildren(
      sentence,
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
  const rows = [];
  for (const [label, seed, reason] of group.waiting)
    if (reason) rows.push([`${label}, seed ${seed}`, "not started", reason, ""]);
  for (const run of group.runs) {
    const add = (event, details = "", time = "") => rows.push([`${run.label}, seed ${run.seed}`, event, details, time]);
    const last = run.round.at(-1) ?? 0;
    if (run.status === "diverged") add(`diverged after round ${last}`, run.why ?? "");
    if (run.status === "spent" || run.status === "stopped_early") add(`stopped after round ${last}`, run.why ?? "");
    for (const fault of run.faults) add(run.status === "damaged" ? unendedWords(run) : "incomplete folder", fault);
    if (!isComplete(run) && !["diverged", "damaged"].includes(run.status))
      add(`unfinished: round ${last} of ${run.planned_rounds ?? "?"}`, run.where ? `on ${run.where}` : "");
    for (const { after_round, notes, when, where } of run.resumes) {
      const place = typeof where?.node === "string" ? [`on ${where.node}, ${where.device ?? ""}`] : [];
      const details = [...place, ...(Array.isArray(notes) ? notes : [])].join("; ");
      add(`resumed after round ${after_round ?? "?"}`, details, time(when));
    }
    for (const { who, what, after_round, when } of run.processes ?? [])
      add(`after round ${after_round ?? "?"}: ${who ?? "a process"}`, what ?? "", time(when));
    for (const { client, what, round } of run.notes ?? []) add(`client ${client} in round ${round}`, what);
    const reasons = new Map(); // a client dropped in several rounds for the same reason is one line
    for (const { client, why, round } of run.dropped) {
      const key = JSON.stringify([client, why]);
      reasons.set(key, [...(reasons.get(key) ?? []), round]);
    }
    for (const [key, rounds] of reasons) {
      const [client, why] = JSON.parse(key);
      const when =
        rounds.length === 1 ? `in round ${rounds[0]}` : `in ${rounds.length} rounds (${rounds[0]} to ${rounds.at(-1)})`;
      add(`client ${client} dropped ${when}`, why);
    }
    const more = run.dropped_count - run.dropped.length;
    if (more > 0) add(`${more} more dropped clients`);
  }
  return rows;
}

/** 2026-01-31T12:00:00.123456+00:00 as 2026-01-31 12:00:00; anything else as it is. */
function time(when) {
  return String(when ?? "").replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:\+00:00|Z)$/, "$1 $2 UTC");
}
