// Settings and versions of the runs, and the command that repeats them.

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
          "A model, an algorithm or data were passed from Python, so there is no command for these runs: " +
            "call fedgg from Python with the same objects and the settings below.",
        ),
      );
    }
    parts.push(make("h3", {}, "Settings"), details("shared", "Shared by all rows", text(group.settings.shared)));
    for (const [label, toml] of Object.entries(group.settings.by_row))
      parts.push(details(`row-${label}`, label, text(toml)));
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
    if (group.places.length) {
      const shown = group.places.map(([where, count]) => `${where} (${count} ${count === 1 ? "run" : "runs"})`);
      parts.push(make("p", { class: "soft" }, `Computed on: ${shown.join("; ")}.`));
    }
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
