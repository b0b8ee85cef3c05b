"""TOML files with odd settings: an experiment that is the same when written and read again, or one line."""

from __future__ import annotations

import os
import random
import signal
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from odd import limit_memory, patience

from fedgg.errors import UserError
from fedgg.lab.config import Experiment, described_settings, load_experiment
from fedgg.lab.runner import run
from fedgg.older_python import add_note, tomllib

WHOLE = (
    Experiment(rounds=1, local={"epochs": 1}, model={"name": "linear"}).to_toml(),
    """rounds = 1
name = "x"
[data]
source = "digits"
normalise = "unit"
proxy = 50
holdout = 0.2
[split]
scheme = "shards"
clients = 4
shards_per_client = 2
min_examples = 5
[model]
name = "mlp"
hidden = 8
[algorithm]
name = "fedgg"
mu = 0.1
[local]
epochs = 1
batch = 64
lr = 0.01
lr_decay = 0.9
momentum = 0.5
weight_decay = 0.001
[server]
cohort = 0.5
evaluate_every = 1
[engine]
name = "loop"
precision = "fp64"
[robust]
rule = "trimmed_mean"
trim = 0.2
[attack]
kind = "noise"
clients = 1
scale = 10.0
""",
    """rounds = 1
[split]
clients = 3
[model]
name = "linear"
[algorithm]
name = "fedavg"
[local]
epochs = 1
[privacy]
clip = 1.0
noise = 1.0
delta = 1e-5
epsilon_limit = 3.0
""",
)
WORDS = ("", "x", r"\u0000", r"\n", "🦄", "fedavg", "scaffold", "none", "digits", "npz:/etc/passwd", "npz:/dev/null",
         "npz:/dev/zero", "npz:", "cifar10", "/", "../../x", "a:b", ":", "x.py:Y", "cuda:99", "cuda", "fp16", "median",
         "[/x]", "/dev/zero", "/proc/self/mem", "$x^$", "A" * 100_000)  # fmt: skip
VALUES = ("0", "-1", "1", "2", "0.5", "1.5", "1e308", "-1e308", "1e39", "inf", "-inf", "nan", "1e-320", "true", "false",
          "[]", "[1]", "{}", "{a=1}", "99999999999999999999", "2147483648", "9223372036854775808", "0x7fffffff",
          "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "9" * 39, "9" * 400, "9" * 5000, "[" * 100 + "]" * 100,
          *(f'"{word}"' for word in WORDS))  # fmt: skip
TABLES = ("data", "split", "model", "algorithm", "local", "server", "engine", "privacy", "robust", "attack", "variants",
          "zzz", "data.x", "model.name")  # fmt: skip
KEYS = [key.rpartition(".")[2] for key, _, _ in described_settings()] + ["mu", "hidden", "correction", "width", "depth"]


def mutated(text: str, chance: random.Random) -> str:
    """One to six lines changed, added or removed, or bytes of them."""
    lines = text.split("\n")
    for _ in range(chance.choice([1, 1, 1, 2, 3, 6])):
        kind, at = chance.random(), chance.randrange(len(lines) or 1)
        lines = lines or [""]
        settings = [number for number, line in enumerate(lines) if "=" in line]
        tables = [number for number, line in enumerate(lines) if line.startswith("[")]
        if kind < 0.45 and settings:
            number = chance.choice(settings)
            lines[number] = f"{lines[number].partition('=')[0]}= {chance.choice(VALUES)}"
        elif kind < 0.6:
            lines.insert(at, f"{chance.choice(KEYS)} = {chance.choice(VALUES)}")
        elif kind < 0.7:
            lines[at : at + 1] = []
        elif kind < 0.78:
            lines.insert(at, f"[{chance.choice(TABLES)}]")
        elif kind < 0.84 and tables:
            lines[chance.choice(tables)] = f"[{chance.choice(TABLES)}]"
        elif kind < 0.94:
            letters = bytearray(lines[at].encode("utf-8", "surrogateescape"))
            if letters:
                letters[chance.randrange(len(letters))] = chance.randrange(256)
            lines[at] = letters.decode("utf-8", "surrogateescape")
        else:
            whole = "\n".join(lines)
            first, last = sorted((chance.randrange(len(whole) + 1), chance.randrange(len(whole) + 1)))
            lines = (whole[:first] + whole[last:]).split("\n")
    return "\n".join(lines)


def read(text: str, file: Path) -> Experiment | None:
    """The experiment, the same after a way through TOML; None where one line says what is wrong."""
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with patience(20):
        try:
            experiment = load_experiment(file)
        except UserError as error:
            line = str(error)
        else:
            again = Experiment(**tomllib.loads(experiment.to_toml()))
            assert again == experiment
            assert again.hash() == experiment.hash()
            return experiment
    assert "\n" not in line
    return None


def played(experiment: Experiment) -> str:
    """How one round of it ends, in a process of its own that has 5 GB more and 30 seconds; unfinished is in order."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.close(reading)
        limit_memory(5 << 30)
        torch.cuda.device_count = lambda: 0  # a fork cannot use a GPU that its parent has used
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        warnings.simplefilter("ignore")  # of other libraries, of numbers at the edge of what there is
        try:
            loop = {"engine.name": "loop"} if experiment.engine.device == "cpu" else {}
            run(experiment.changed({"rounds": 1, **loop}))
            outcome = "ok"
        except UserError as error:
            outcome = "several lines" if "\n" in str(error) else "one line"
        except MemoryError:
            outcome = "no memory"  # which the command line says in one line
        except BaseException as error:
            memory = any(words in str(error) for words in ("can't allocate memory", "std::bad_alloc"))
            outcome = "no memory" if memory else f"traceback {traceback.format_exc()}"
        os.write(writing, outcome.encode("utf-8", "replace")[-60_000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        outcome = answer.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "at work" if os.WTERMSIG(status) == signal.SIGALRM else f"signal {os.WTERMSIG(status)}"
    return outcome


def through(seed: int, count: int, plays: int, file: Path) -> None:
    chance, accepted = random.Random(seed), []
    for number in range(count):
        text = mutated(chance.choice(WHOLE), chance)
        try:
            experiment = read(text, file)
        except BaseException as error:
            add_note(error, f"file {number} of seed {seed}: {text[:3000]!r}")
            raise
        accepted += [] if experiment is None else [experiment]
    assert len(accepted) > count // 20, "hardly any is read: the changes are too wild"
    for experiment in chance.sample(accepted, min(plays, len(accepted))):
        assert played(experiment) in ("ok", "one line", "no memory", "at work"), experiment.to_toml()[:3000]


def test_sixty_odd_files(tmp_path: Path) -> None:
    through(0, 60, 1, tmp_path / "odd.toml")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_five_thousand_odd_files(seed: int, tmp_path: Path) -> None:
    through(seed, 1000, 40, tmp_path / "odd.toml")
