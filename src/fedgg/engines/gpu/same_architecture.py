"""Whether two modules compute the same function of their trainable parameters, by comparing their contents.

`print(module)` is not enough: it does not show every slope, mask, closure or frozen layer. Types are compared exactly,
and the attributes of all submodules recursively: numbers, tensors, arrays, containers, functions by code and closure,
hooks in their order, plain Python objects by their attributes. If equality cannot be established, the modules count as
different. Values of trainable parameters are not compared. Values of frozen parameters and buffers may differ: their
names are returned, so that each model runs with its own.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class _Empty:
    pass


SIMPLE = {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, range}
BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, torch.layout, torch.memory_format, enum.Enum)
TENSORS = {Tensor, nn.Parameter}
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
MODES = ["training"]  # set for all submodules before each run


def varying_tensors(a: nn.Module, b: nn.Module) -> frozenset[str] | None:
    """Names of frozen parameters and buffers whose values differ between two modules that are otherwise the same.

    None: the modules differ in something else, or equality cannot be established.
    """
    comparison = _Comparison(a, b)
    try:
        same = comparison.same(a, b)
    except Exception:  # attributes of a user's module may raise anything when they are compared
        return None
    return frozenset(comparison.varying) if same else None


class _Comparison:
    def __init__(self, a: nn.Module, b: nn.Module):
        self._names_a, self._names_b = (
            {id(tensor): name for name, tensor in [*module.named_buffers(), *module.named_parameters()]}
            for module in (a, b)
        )
        self._counterpart_in_b: dict[int, Any] = {}  # by the id of the object in a
        self._counterpart_in_a: dict[int, Any] = {}  # by the id of the object in b
        self.varying: set[str] = set()

    def same(self, a: Any, b: Any) -> bool:
        kind = type(a)
        if kind is not type(b):
            return False
        if kind in SIMPLE:
            return bool(a == b and repr(a) == repr(b)) or bool(a != a and b != b)
        if isinstance(a, BY_IDENTITY):
            return a is b
        if isinstance(a, np.generic):
            return self._same_array(np.asarray(a), np.asarray(b))
        if kind is tuple or (isinstance(a, tuple) and hasattr(a, "_fields")):
            return self._same_sequence(a, b)
        if id(a) in self._counterpart_in_b or id(b) in self._counterpart_in_a:  # shared objects are shared in both
            return self._counterpart_in_b.get(id(a)) is b and self._counterpart_in_a.get(id(b)) is a
        self._counterpart_in_b[id(a)], self._counterpart_in_a[id(b)] = b, a
        if a is b and not isinstance(a, Tensor | nn.Module):
            return True
        return self._same_content(a, b)

    def _same_content(self, a: Any, b: Any) -> bool:
        match a:
            case Tensor():
                return type(a) in TENSORS and self._same_tensor(a, b)
            case nn.Module():
                return _has_only_dict(type(a)) and self._same_module(a, b)
            case np.ndarray():
                return type(a) is np.ndarray and self._same_array(a, b)
            case dict():
                return type(a) in (dict, OrderedDict, defaultdict) and self._same_mapping(a, b)
            case list():
                return type(a) is list and self._same_sequence(a, b)
            case set() | frozenset():
                return all(type(element) in SIMPLE for element in a) and bool(a == b)
            case types.FunctionType():
                return self._same_function(a, b)
            case types.MethodType():
                return a.__func__ is b.__func__ and self.same(a.__self__, b.__self__)
            case functools.partial():
                parts = [(each.func, each.args, each.keywords, vars(each)) for each in (a, b)]
                return type(a) is functools.partial and self._same_sequence(*parts)
        return _has_only_dict(type(a)) and self._same_mapping(vars(a), vars(b))

    def _same_function(self, a: types.FunctionType, b: types.FunctionType) -> bool:
        """The same code with the same defaults and the same values in its closure."""
        parts = [
            (
                function.__defaults__,
                function.__kwdefaults__,
                tuple(cell.cell_contents for cell in function.__closure__ or ()),
                vars(function),
            )
            for function in (a, b)
        ]
        return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and self._same_sequence(*parts)

    def _same_module(self, a: nn.Module, b: nn.Module) -> bool:
        other_attributes = [
            {name: value for name, value in vars(module).items() if name not in [*MODES, *HOOKS]} for module in (a, b)
        ]
        return self._same_sequence(_hooks(a), _hooks(b)) and self._same_mapping(*other_attributes)

    def _same_tensor(self, a: Tensor, b: Tensor) -> bool:
        traits = [(t.dtype, t.shape, t.device, t.requires_grad, t.layout) for t in (a, b)]
        if traits[0] != traits[1] or a.layout is not torch.strided or not self._same_mapping(vars(a), vars(b)):
            return False
        name = self._names_a.get(id(a))
        if name != self._names_b.get(id(b)):
            return False
        if (name is not None and isinstance(a, nn.Parameter) and a.requires_grad) or _bits(a) == _bits(b):
            return True
        if name is not None:
            self.varying.add(name)
        return name is not None

    def _same_array(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
        return not a.dtype.hasobject and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    def _same_mapping(self, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
        comparable = all(type(key) in SIMPLE or isinstance(key, BY_IDENTITY) for key in a)
        return comparable and list(a) == list(b) and all(self.same(a[key], b[key]) for key in a)

    def _same_sequence(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        return len(a) == len(b) and all(self.same(x, y) for x, y in zip(a, b, strict=True))


def _hooks(module: nn.Module) -> list[Any]:
    """All hooks by kind; their keys, which count hooks in the process, are replaced by their order in the module."""
    kinds = [vars(module)[name] for name in HOOKS]
    order = {key: place for place, key in enumerate(sorted({key for hooks in kinds for key in hooks}))}
    return [{order[key]: value for key, value in hooks.items()} for hooks in kinds]


def _has_only_dict(kind: type) -> bool:
    """Whether objects of this class hold data in their `__dict__` only: no slots, no C fields."""
    return kind.__basicsize__ == _Empty.__basicsize__ and kind.__itemsize__ == 0


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
