"""Pages that show files of the repository, and index pages of folders."""

from __future__ import annotations

import re

from repository_links import DOCS, LONGEST_SHOWN, ROOT

LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".cff": "yaml", ".sh": "bash"}


def source_page_text(place: str) -> str:
    """A file with line numbers, or the files of a folder."""
    path = ROOT / place
    hidden = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        return f"{hidden}# {place}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text(encoding="utf-8")
    cut = f"\n\nThe first {LONGEST_SHOWN:,} of {len(text):,} characters." if len(text) > LONGEST_SHOWN else ""
    language, fence = LANGUAGES.get(path.suffix, "text"), "`" * 5
    return (
        f"{hidden}# {path.name}\n\n`{place}`{cut}\n\n"
        f'{fence}{{ .{language} linenums="1" }}\n{text[:LONGEST_SHOWN].rstrip()}\n{fence}\n'
    )


def decisions_index() -> str:
    """A list of the decision records, by their titles."""
    lines = [
        "# Decisions",
        "",
        "One record for each decision that shapes the code, with what was rejected and why.",
        "",
    ]
    for path in sorted((ROOT / DOCS / "decisions").glob("0*.md")):
        title = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.M)
        lines.append(f"- [{title[1] if title else path.stem}]({path.name})")
    return "\n".join(lines) + "\n"
