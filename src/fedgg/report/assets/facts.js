// What went wrong, and everything needed to do it again.

function eventsSection(view) {
  const node = make("div");
  const refresh = () => {
    const happened = events(view.group);
    const broken = page.problems.filter(({ shown }) => !shown).map(({ path, what, why }) => [path, what, why]);
    const all = [...broken, ...happened];
    const missing = view.group.missing.length;
    const say = make(
      "p",
      { class: "lead" },
      all.length
        ? ""
        : "Nothing: no client was left out, no run diverged, none was interrupted, and every folder is whole.",
    );
    if (missing) say.append(`${missing} of ${view.group.size} runs have not begun or cannot be read. `);
    node.replaceChildren(
      say,
      ...(all.length
        ? [
            make(
              "div",
              { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Events" },
              table("Left out, diverged, resumed, damaged, unreadable", ["run", "what", "why"], all),
            ),
          ]
        : []),
    );
  };
  return { id: "events", heading: "Events", node, charts: [], refresh };
}

/** One line for each thing a reader should know of: [run, what, why]. */
function events(group) {
  const found = [];
  for (const run of group.runs) {
    const name = `${run.label}, seed ${run.seed}`;
    if (run.status === "diverged") found.push([name, `diverged after round ${run.round.at(-1) ?? 0}`, run.why ?? ""]);
    if (run.status === "spent") found.push([name, `stopped after round ${run.round.at(-1) ?? 0}`, run.why ?? ""]);
    const wrong = run.status === "damaged" ? unendedWords(run) : "not whole";
    for (const fault of run.faults) found.push([name, wrong, fault]);
    if (!isComplete(run) && !["diverged", "damaged"].includes(run.status))
      found.push([name, `under way: round ${run.round.at(-1) ?? 0} of ${run.asked ?? "?"}`, ""]);
    for (const resume of run.resumes) {
      const notes = Array.isArray(resume.notes) ? resume.notes.join("; ") : "";
      found.push([
        name,
        `taken up again after round ${resume.after_round ?? "?"}`,
        [resume.when, notes].filter(Boolean).join("; "),
      ]);
    }
    for (const { who, what, after_round, when } of run.processes ?? []) {
      const why = [what, when].filter(Boolean).join("; ");
      found.push([name, `after round ${after_round ?? "?"}: ${who ?? "a process"}`, why]);
    }
    for (const { client, what, round } of run.notes ?? []) found.push([name, `client ${client} in round ${round}`, what]);
    const reasons = new Map(); // the same client for the same reason, round after round, is one line
    for (const { client, why, round } of run.lost) {
      const key = JSON.stringify([client, why]);
      reasons.set(key, [...(reasons.get(key) ?? []), round]);
    }
    for (const [key, rounds] of reasons) {
      const [client, why] = JSON.parse(key);
      const when =
        rounds.length === 1 ? `in round ${rounds[0]}` : `in ${rounds.length} rounds (${rounds[0]} to ${rounds.at(-1)})`;
      found.push([name, `client ${client} left out ${when}`, why]);
    }
    if (run.lost_of > run.lost.length) found.push([name, `${run.lost_of - run.lost.length} more clients left out`, ""]);
  }
  return found;
}

function settingsSection(view) {
  const node = make("div");
  const copied = make("span", { role: "status", class: "soft" });
  const copy = (text) => async () => {
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = "Copied.";
    } catch {
      // a page from disk may be refused the clipboard: mark the text instead
      const range = document.createRange();
      range.selectNodeContents(node.querySelector("#again"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied.textContent = document.execCommand("copy") ? "Copied." : "Marked: press Ctrl+C.";
    }
  };
  const refresh = () => {
    const { group } = view;
    const open = new Set([...node.querySelectorAll("details[open]")].map((one) => one.id));
    const details = (id, summary, ...content) =>
      make("details", { id, open: open.has(id) }, make("summary", {}, summary), ...content);
    const text = (content) => make("pre", { tabindex: 0 }, content);
    const parts = [make("h3", {}, "The same again")];
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
          "A model, an algorithm or data were handed in from Python, so no command can make it again; " +
            "the settings below say the rest.",
        ),
      );
    }
    parts.push(make("h3", {}, "Settings"), details("shared", "What all rows share", text(group.settings.shared)));
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
