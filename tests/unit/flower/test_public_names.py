"""The names of `fedgg.flower` are functions, before and after their modules are imported."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

pytest.importorskip("flwr")

import fedgg.flower


@pytest.mark.parametrize("name", fedgg.flower.__all__)
def test_is_a_function_also_after_its_module_was_imported(name: str) -> None:
    first = getattr(fedgg.flower, name)
    importlib.import_module(first.__module__)
    assert first is getattr(fedgg.flower, name)
    assert callable(first)


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules(fedgg.flower.__path__)}
    assert modules.isdisjoint(fedgg.flower.__all__)
