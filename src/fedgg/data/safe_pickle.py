"""An unpickler for arrays from strangers: NumPy arrays of numbers and plain builtins, nothing else.

A pickle names the functions it wants called. Here every name that writing a NumPy array produces is answered by a
stand-in of our own, and every other name is refused. Stand-ins rather than NumPy's functions, because NumPy trusts
what a pickle tells it about memory (object arrays, dtype flags, a state set twice) and because it warns about the
form in which Python 2 wrote its dtypes, which is how CIFAR was published.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from fedgg.errors import UserError

_KINDS = frozenset("buif")  # booleans, unsigned and signed integers, floating point
_MEMO_OPERATIONS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))


def load_pickle(raw: bytes, where: str) -> Any:
    """The object in `raw`; text that Python 2 wrote comes back as bytes. `where` names the file in error messages."""
    try:
        _check_sizes(raw)
        return _ArrayUnpickler(raw, where).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way the format can express
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: damaged or not a pickle of arrays ({reason}); fetch or extract it again") from error


def _check_sizes(raw: bytes) -> None:
    """Refuse what would make the unpickler reserve memory for things that are not in the file.

    Reading the operations as such fails where one announces more bytes than there are; a memo number beyond the length
    of the file, for which six bytes can claim 64 GB, is found here.
    """
    for operation, argument, _ in pickletools.genops(raw):
        if operation.name in _MEMO_OPERATIONS and isinstance(argument, int) and argument > len(raw):
            raise ValueError(f"memo number {argument}")


class _ArrayUnpickler(pickle.Unpickler):
    """The unpickler that knows the names in `_STAND_INS` only."""

    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            wanted = f"{module}.{name}".encode("unicode_escape").decode()  # a name may hold line breaks
            raise UserError(
                f"{self._where}: refused, it asks for {wanted}, which no array needs; "
                "do not use this file, fetch the data set again"
            ) from None


class _Dtype:
    """A number format as a pickle describes it: a code such as `u1`, then a state that gives the byte order."""

    def __init__(self, code: str | bytes, *_align_and_copy: object) -> None:
        self.numpy: np.dtype[Any] = np.dtype(_text(code))
        if self.numpy.kind not in _KINDS:
            raise ValueError(f"an array of {_text(code)!r}, which are not numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        match _text(state[1]):
            case "<":
                self.numpy = self.numpy.newbyteorder("<")
            case ">":
                self.numpy = self.numpy.newbyteorder(">")


class _Array(np.ndarray):
    """An array that takes its content once, and only bytes that fill its shape."""

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, column_major, raw = state
        if self.size or not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise ValueError("an array whose content is not plain bytes")
        if any(side < 0 for side in shape) or np.prod(shape, dtype=object) * dtype.numpy.itemsize != len(raw):
            raise ValueError("an array whose content does not fill its shape")
        # NumPy wants Python's own bool here, whatever its stubs say.
        super().__setstate__((1, shape, dtype.numpy, bool(column_major), raw))  # type: ignore[arg-type]


class _ArrayMark:
    """What `numpy.ndarray` means in a pickle: the first argument of `_reconstruct`, never called."""


def _empty_array(*_mark_shape_and_code: object) -> _Array:
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _scalar(dtype: _Dtype, raw: bytes) -> Any:
    return np.frombuffer(raw, dtype.numpy, count=1)[0]


def _bytes(text: str, encoding: str | bytes = "latin1") -> bytes:
    """What `_codecs.encode` is used for by protocol 2: bytes, written as text."""
    if _text(encoding) not in ("latin1", "latin-1"):
        raise ValueError(f"bytes written as {_text(encoding)!r}")
    return text.encode("latin1")


def _text(word: str | bytes) -> str:
    return word.decode("ascii") if isinstance(word, bytes) else word


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _ArrayMark,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,
    **{
        (module, name): stand_in
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, stand_in in (("_reconstruct", _empty_array), ("scalar", _scalar))
    },
}
