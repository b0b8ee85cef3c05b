"""The frame of every page: one style, no request to anywhere, and nothing that data could break out of."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def document(title: str, body: str, *, scripts: Sequence[str] = (), data: Any = None, live: bool = False) -> str:
    """The whole page. `data` goes in as JSON under the id `data`; scripts run in their order, and no others do."""
    block = "" if data is None else f'<script type="application/json" id="data">{as_json(data)}</script>\n'
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{asset('page.css')}</style>\n</head>\n"
        f"<body>\n{body}{block}{code}</body>\n</html>\n"
    )
    return as_unicode(page)


def as_json(data: Any) -> str:
    """JSON that can stand within a page: no sign in it can end the block or begin a tag."""
    try:
        text = _compact(data)
    except ValueError:  # JSON has no NaN, though Python writes one
        text = _compact(_finite(data))
    return as_unicode(re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text))


def as_unicode(text: str) -> str:
    """The name of a folder may be bytes that are no text; a question mark stands for each of them."""
    return text.encode("utf-8", "replace").decode()


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def policy(scripts: Sequence[str], live: bool) -> str:
    """What the browser is to enforce: our own scripts and no others, nothing loaded; the live page asks its server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    asked = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
