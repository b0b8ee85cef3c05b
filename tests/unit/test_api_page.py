"""docs/api.md names every public name with its true signature, and its examples run.

python tests/unit/test_api_page.py     # writes signatures and tables anew
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import fedgg
from fedgg.aggregation import RULES
from fedgg.core.server import Collector
from fedgg.lab.config_sections import PartConfig

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = re.compile(r"^### `(fedgg\.[\w.]+)`\n(.*?)(?=^##|\Z)", re.M | re.S)
WIDTH = 110


def public_names() -> dict[str, Any]:
    names = {f"fedgg.{name}": getattr(fedgg, name) for name in fedgg.__all__}
    try:
        flower = {f"fedgg.flower.{name}": getattr(fedgg.flower, name) for name in fedgg.flower.__all__}
    except fedgg.UserError:  # the extra is not installed
        flower = {}
    return names | flower


def sections() -> dict[str, str]:
    return dict(HEADING.findall(PAGE.read_text(encoding="utf-8")))


def call(name: str, function: Any, skip: tuple[str, ...] = ("self", "cls")) -> str:
    """The signature, one parameter a line where it is long."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name not in skip and not p.name.startswith("_")]
    parts, star = [], False
    for parameter in kept:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        kind = parameter.annotation
        parts.append(str(parameter).replace(repr(kind), kind) if isinstance(kind, str) else str(parameter))
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def described(name: str, thing: Any) -> str:
    """What stands under the heading of a public name: its signature, its settings or keys, its docstring."""
    doc = inspect.cleandoc(vars(thing).get("__doc__") or "") if isinstance(thing, type) else inspect.getdoc(thing)
    if not isinstance(thing, type):
        parts = [f"```\n{call(name, thing)}\n```", doc]
    elif issubclass(thing, BaseModel):
        parts = [doc, keys_of(thing)]
    elif issubclass(thing, fedgg.Algorithm) and thing is not fedgg.Algorithm:
        parts = [doc, settings_of(thing)]
    else:
        methods = [
            call(f"{name}.{key}" if isinstance(method, classmethod) else f".{key}", getattr(thing, key))
            for key, method in vars(thing).items()
            if not key.startswith("_") and (inspect.isfunction(method) or isinstance(method, classmethod))
        ]
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        attributes = [field.name for field in fields if not field.name.startswith("_")]
        attributes += [key for key, value in vars(thing).items() if isinstance(value, property) and key[0] != "_"]
        listed = ", ".join(f"`{key}`" for key in attributes)
        code = "\n".join(methods)
        parts = [f"```\n{code}\n```" if methods else "", doc, f"Attributes: {listed}." if attributes else ""]
    return "\n\n".join(["<!-- generated -->", *filter(None, parts), "<!-- end -->"]) + "\n"


def keys_of(section: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in section.model_fields.items():
        kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>|(?:\w+\.)+(\w+)", r"\1\2", str(field.annotation))
        default = "" if field.default is PydanticUndefined else f"`{field.default!r}`"
        if isinstance(field.default, BaseModel):
            default = "its defaults"
        rows.append(f"| `{key}` | `{kind}` | {default} | {field.description or ''} |".replace(" | None`", " \\| None`"))
    if issubclass(section, PartConfig):
        undeclared = section.undeclared_settings().items()
        rows += [
            f"| `{key}` | of a part | {default and f'`{default}`'} | {about} |" for key, (default, about) in undeclared
        ]
    return "\n".join(rows)


def settings_of(algorithm: type[fedgg.Algorithm]) -> str:
    rows = [f"| `{f.name}` | `{f.default!r}` | {f.metadata['about']} |" for f in dataclasses.fields(algorithm)]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows]) if rows else ""


def page_anew() -> str:
    """The page, with what stands between `<!-- generated -->` and `<!-- end -->` made from the code."""
    text = PAGE.read_text(encoding="utf-8")
    for name, thing in public_names().items():
        before, heading, after = text.partition(f"### `{name}`\n\n<!-- generated -->\n")
        if heading:
            after = re.sub(r"\A(?:(?!^##).)*?<!-- end -->\n", "", after, flags=re.M | re.S)
            text = before + f"### `{name}`\n\n" + described(name, thing) + after
    return text


def test_every_public_name_is_documented() -> None:
    documented = {name for name in sections() if fedgg_has_flower() or not name.startswith("fedgg.flower.")}
    assert documented == public_names().keys()


def fedgg_has_flower() -> bool:
    return any(name.startswith("fedgg.flower.") for name in public_names())


@pytest.mark.skipif(not fedgg_has_flower(), reason="needs the extra `flower`")
def test_signatures_are_those_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_anew(), "run python tests/unit/test_api_page.py"


@pytest.mark.skipif(not fedgg_has_flower(), reason="needs the extra `flower`")
@pytest.mark.filterwarnings("default")
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    has_optuna = importlib.util.find_spec("optuna") is not None
    code = "\n".join(block for block in blocks if has_optuna or "tuned" not in block)
    module = types.ModuleType("api_page")
    monkeypatch.setitem(sys.modules, "api_page", module)
    exec(compile(code, str(PAGE), "exec"), vars(module))


def test_keys_of_a_section_include_those_of_its_registered_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Deep(Collector):
        depth: int = fedgg.setting(3, "how often it is repeated", "ours")

    monkeypatch.setitem(RULES._entries, "deep", Deep)
    assert keys_of(fedgg.RobustConfig).endswith("| `depth` | of a part | `3` | deep: how often it is repeated |")


if __name__ == "__main__":
    PAGE.write_text(page_anew(), encoding="utf-8")
