"""`fedgg check`: the conformance suite on one algorithm, and its cost."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedgg.cli.terminal import console, printable, progress, say
from fedgg.errors import UserError
from fedgg.lab.trusted_code import trust_named


def check(
    algorithm: Annotated[str, typer.Argument(help="FILE.py:CLASS, MODULE:CLASS or a name from `fedgg list`.")],
) -> None:
    """Run the conformance suite on an algorithm, your own or one of the library's, and show what it costs.

    Examples:

    - `fedgg check examples/my_algorithm.py:MyAlgorithm`
    - `fedgg check fedgg`
    """
    import torch

    from fedgg.check import PROPERTIES, Broken, Skipped
    from fedgg.check.cost import EPOCHS, cost_of
    from fedgg.lab.name_resolution import algorithm_class

    torch.set_num_threads(1)
    trust_named({"algorithm.name": algorithm})
    kind = algorithm_class(algorithm)
    try:
        kind()
    except TypeError as error:
        raise UserError(
            f"{kind.__name__}() cannot be made: {error}; an algorithm is a frozen dataclass (@dataclass(frozen=True)) "
            f'whose settings have defaults, for instance mu: float = setting(0.1, "weight of the pull")'
        ) from error
    broken = skipped = 0
    errors_shown: set[str] = set()
    with progress() as bar:
        output = bar.console if console.is_terminal else console  # above the bar, or into a file
        task = bar.add_task(kind.__name__, total=len(PROPERTIES), news="", within="")
        for name, holds in PROPERTIES.items():
            bar.update(task, news=name)
            try:
                holds(kind())
                verdict = [("holds", "green")]
            except Skipped as why:
                skipped += 1
                verdict = [(f"skipped  {printable(str(why))}", "dim")]
            except Broken as why:
                broken += 1
                verdict = [("broken", "red"), (f"  {printable(str(why))}", "")]
            except Exception as error:
                broken += 1
                reason = f"it raised {type(error).__name__}: {error}{_where(error, kind)}"
                shown = "the same as above" if reason in errors_shown else reason
                verdict = [("broken", "red"), (f"  {printable(shown)}", "")]
                errors_shown.add(reason)
            output.print(Text.assemble(f"{name:42} ", *verdict), soft_wrap=True)
            bar.advance(task)
    held = len(PROPERTIES) - broken - skipped
    say(f"{kind.__name__}: of {len(PROPERTIES)} properties {held} hold, {broken} broken, {skipped} not applicable")
    if broken:
        raise typer.Exit(1)
    cost = cost_of(kind())
    say(f"besides model and update it sends: {cost.sent}; it stores between rounds: {cost.stored}")
    bytes_, arithmetic = f"{cost.bytes:g} times FedAvg's bytes", f"{cost.arithmetic:.3g} times its arithmetic"
    say(f"a round takes {bytes_} and {arithmetic} (with {EPOCHS} local epochs)")


def _where(error: Exception, kind: type) -> str:
    """The innermost line of the algorithm's file in the traceback, if any."""
    file = inspect.getsourcefile(kind)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
