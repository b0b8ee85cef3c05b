"""All clients of all experiments as one program over rows `[K, P]`.

For small models, whose cost is kernel launches, and large ones with kernels for all rows (`engines.layers`).

Experiments share a stack if they have the same model, the same data and the same algorithm with the same non-numeric
settings; seeds, splits and numeric settings (mu, lr, ...) may differ, since numbers become columns. Models are the same
if their contents are (`engines.gpu.same_architecture`); frozen parameters and constant buffers may differ, one per row.
Stacks of different algorithms run concurrently on their own streams. Models that cannot be stacked (they mix the
examples of a batch, or vmap does not support them) are trained by the engine `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm
from fedgg.core.evaluation import Probe, Score, Tally, tally_of_outputs, total
from fedgg.core.local import LocalEnd, LocalStart
from fedgg.core.model import Net
from fedgg.core.personal import open_personal, personal_names
from fedgg.core.tensor_rows import Rows, each_row, stack
from fedgg.engines.base import Look, Precision, RoundJob, recorded_on_host, score_here
from fedgg.engines.flops import activations
from fedgg.engines.fused.cpu_step import fused_round
from fedgg.engines.fused.engine import Fused, with_fused_net
from fedgg.engines.fused.net import fused_net
from fedgg.engines.gpu.cuda_graphs import CudaStreams, Form, GraphCache, Prefetch, steps_of_stack
from fedgg.engines.gpu.pixelwise_rows import arranged_rows, restored_end
from fedgg.engines.gpu.same_architecture import varying_tensors
from fedgg.engines.layers.module_programs import program_of, runs_rows
from fedgg.engines.layers.program import Program
from fedgg.engines.layers.row_layers import RowConvolution
from fedgg.engines.layers.stacked_layers import ConvolutionReluPool, WideDense
from fedgg.engines.module_equivalence import is_stackable

T = TypeVar("T")

SETTINGS = ("task", "metrics", "frozen_statistics", "products", "channels_last", "drops", "head")  # of a net
# For estimating the memory of a stack before it is built:
PASSES = 16  # rows of parameters in memory: models, velocity, gradient, notes and memory, static and as copies
TRACES = 3  # per activation: itself, its gradient, and the tensor saved for the backward pass
SHARE = 0.8  # of the free memory; the rest is for kernels and fragmentation
LONG = 1 << 20  # bytes of a row of client state that is kept by itself


@dataclass(frozen=True)
class StackRow:
    """One client of one job, and its number of steps."""

    job: int
    client: int
    steps: int


class Stacked:
    """Small models, and in bf16 large ones with convolutions: all clients as one program.

    Trains the clients of one round, or of one round of each of several experiments, together.
    """

    def __init__(self, precision: Precision = "fp32") -> None:
        self._precision = precision
        self._graphs = GraphCache()
        self._nets: dict[int, tuple[Net, Net]] = {}
        self._compared: dict[tuple[int, int], tuple[Net, Net, frozenset[str] | None]] = {}
        self._streams = CudaStreams()
        self._prefetch = Prefetch()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        yield from self.train_together([job])[0].items()

    def train_together(self, jobs: Sequence[RoundJob]) -> list[dict[int, LocalEnd]]:
        jobs = [replace(job, net=self._arranged(fused_net(job.net))) for job in jobs]
        ends: list[dict[int, LocalEnd]] = [{} for _ in jobs]
        groups = _groups(jobs, self._can_train_together)
        stackable = [group for group in groups if is_stackable(jobs[group[0]].net)]
        works = [self._train_stack(place, jobs, group, ends) for place, group in enumerate(stackable)]
        self._streams.run(works, jobs[0].w.device)
        for group in groups:
            if group not in stackable:
                for number in group:
                    ends[number] = dict(Fused().train(jobs[number]))
        return [{client: ends[n][client] for client in job.cohort} for n, job in enumerate(jobs)]

    def _train_stack(
        self, place: int, jobs: Sequence[RoundJob], group: list[int], ends: list[dict[int, LocalEnd]]
    ) -> Iterator[None]:
        """Trains a group, yielding after each launch; writes the results into `ends`."""
        rows = _rows(jobs, group)
        first = jobs[group[0]]
        program = self._program(first.net)
        if program is not None and first.algorithm.needs_representation and not program.offers(first.net.head):
            program = None
        memory = arranged_rows(stack([jobs[row.job].memory_before(row.client) for row in rows]), first.net)
        down = {n: arranged_rows(jobs[n].down | {_MODEL: jobs[n].w}, first.net) for n in group}
        received = _one_per_row([down[row.job] for row in rows])
        w = received.pop(_MODEL)
        start = LocalStart(
            w=memory["w"] if first.from_memory else w,
            down=received,
            memory=memory,
            buffers=stack([jobs[row.job].buffers for row in rows]),
            examples=_column([jobs[row.job].data.examples(row.client) for row in rows], first.w),
            steps=_column([row.steps for row in rows], first.w),
            round=_column([jobs[row.job].round for row in rows], first.w),
            dropout=[(jobs[row.job].seed, jobs[row.job].round, row.client) for row in rows],
            probe=_probe(jobs, rows),
            many=program,
            per_row=self._tensors_per_row(first.net, [jobs[row.job] for row in rows]),
            keeps_optimiser_state=first.optimiser.kept,
        )
        optimiser = first.optimiser.kind.on_rows([jobs[row.job].optimiser.values for row in rows], start.w)
        if first.net.personal is not None:
            alone = [jobs[row.job].personal_steps(row.client) for row in rows]
            counts = [count for count in alone if count is not None]
            start = open_personal(start, first.net.personal, optimiser, _column(counts, first.w) if counts else None)
        algorithm = _with_columns([jobs[row.job].algorithm for row in rows], first.w)
        agendas = self._prefetch.agendas([(jobs[row.job], row.client) for row in rows])
        if first.w.is_cuda:
            pages = first.data.lay_out(agendas)
            steps = steps_of_stack([row.steps for row in rows], pages.where.shape[2])
            owners = [row.job for row in rows]
            graphs, client_view = self._graphs.open(
                place, algorithm, first.net, optimiser, start, first.data, pages, owners, steps, _form(program)
            )
            self._prefetch.prepare([jobs[number] for number in group])
            yield from graphs.replay(steps)
            end = graphs.end(algorithm, start, client_view)
        else:
            end = fused_round(algorithm, first.net, optimiser, start, first.data.gather(agendas))
        end = recorded_on_host(restored_end(end, first.net))
        for position, row in enumerate(rows):
            one = each_row(end, slice(position, position + 1))
            ends[row.job][row.client] = replace(one, memory=_apart(one.memory)) if len(rows) > 1 else one

    def score(self, looks: Sequence[Look]) -> list[Score]:
        """Models that share a program and a test set are scored together."""
        looks = [self._with_arranged_model(with_fused_net(look)) for look in looks]
        scores: dict[int, Score] = {}
        for group in _groups(looks, self._can_score_together):
            program = self._program(looks[group[0]].net)
            group_looks = [looks[number] for number in group]
            on_holdout = group_looks[0].client is not None
            group_scores = score_here(group_looks) if on_holdout or program is None else _score(program, group_looks)
            scores |= dict(zip(group, group_scores, strict=True))
        return [scores[number] for number in range(len(looks))]

    def _program(self, net: Net) -> Program | None:
        if net.personal is not None:
            return None  # programs take all parameters from one row
        return program_of(net, self._precision)

    def _arranged(self, net: Net) -> Net:
        """The net in the memory layout that its program reads."""
        if id(net) not in self._nets:
            arranged = net.arranged() if net.personal is None and runs_rows(net, self._precision) else net
            self._nets[id(net)] = (net, arranged)  # a reference to the net keeps its id unique
        return self._nets[id(net)][1]

    def _with_arranged_model(self, look: Look) -> Look:
        net = self._arranged(look.net)
        return look if net is look.net else replace(look, net=net, w=net.layout.arranged(look.w))

    def _can_train_together(self, a: RoundJob, b: RoundJob) -> bool:
        return (
            type(a.algorithm) is type(b.algorithm)
            and _non_numeric_settings(a.algorithm) == _non_numeric_settings(b.algorithm)
            and a.work == b.work
            and (a.optimiser.kind, a.optimiser.kept) == (b.optimiser.kind, b.optimiser.kept)
            and (a.personal_epochs, a.from_memory) == (b.personal_epochs, b.from_memory)
            and self._varying(a.net, b.net) is not None
            and a.data.shares_examples_with(b.data)
        )

    def _can_score_together(self, a: Look, b: Look) -> bool:
        return (
            a.client is b.client is None
            and self._varying(a.net, b.net) is not None
            and a.data.shares_examples_with(b.data)
        )

    def _varying(self, a: Net, b: Net) -> frozenset[str] | None:
        """Names of the tensors in which the nets differ, if they are otherwise the same; else None."""
        if a is b:
            return frozenset()
        key = id(a), id(b)
        if key not in self._compared:  # references to both keep their ids unique
            same = a.layout == b.layout and all(getattr(a, name) == getattr(b, name) for name in SETTINGS)
            same = same and is_stackable(a) == is_stackable(b) and personal_names(a) == personal_names(b)
            self._compared[key] = (a, b, varying_tensors(a.module, b.module) if same else None)
        return self._compared[key][2]

    def _tensors_per_row(self, net: Net, jobs: Sequence[RoundJob]) -> Rows:
        """Frozen parameters and constant buffers in which the experiments' nets differ, one row per job."""
        names = sorted({name for job in jobs for name in self._varying(net, job.net) or ()})
        if not names:
            return {}
        tensors = {
            id(job): dict(job.net.module.named_parameters()) | {name: rows[0] for name, rows in job.buffers.items()}
            for job in jobs
        }
        return {name: torch.stack([tensors[id(job)][name].detach() for job in jobs]) for name in names}


_MODEL = ""  # beside what the algorithm sends


def _one_per_row(received: Sequence[Rows]) -> Rows:
    """What the clients of a stack receive; where all receive the same, a row that is read by all of them."""
    if received[0][_MODEL].is_cuda and all(rows is received[0] for rows in received):
        return {name: rows.expand(len(received), *rows.shape[1:]) for name, rows in received[0].items()}
    return stack(received)


def _apart(memory: Rows) -> Rows:
    """Long rows as copies: a client keeps them for many rounds, and a view would keep the rows of the whole stack."""
    return {name: rows.clone() if rows.nbytes >= LONG else rows for name, rows in memory.items()}


def stack_bytes(net: Net, batch: int | None, clients: int) -> int:
    """Estimated memory of a stack of this many clients of one experiment."""
    numbers = PASSES * net.layout.total + TRACES * (batch or 256) * activations(net)
    return int(clients * numbers * net.start.element_size())


def room(device: torch.device) -> float:
    """Bytes of memory that a stack may use."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return SHARE * free


def _score(program: Program, looks: Sequence[Look]) -> list[Score]:
    """`core.evaluation.evaluate` for several rows at once."""
    first, w = looks[0], torch.cat([look.w for look in looks])
    tallies: list[list[Tally]] = [[] for _ in looks]
    for number in range(first.data.unseen_chunks(None)):
        x, y = first.data.unseen(None, number)
        outputs, _ = program.forward(w, x.expand(len(w), *x.shape))
        for row, look in enumerate(looks):
            tallies[row].append(tally_of_outputs(look.net, outputs[row], y))
    return [total(look.net.metrics, tallies[row]) for row, look in enumerate(looks)]


def _form(program: Program | None) -> Form:
    """The layout and type in which the program's first layer reads images."""
    first = program and program.first
    if isinstance(first, WideDense):
        return Form(dtype=torch.bfloat16 if first.precision == "bf16" else None)
    if program is None or not isinstance(first, ConvolutionReluPool | RowConvolution):
        return Form()
    from fedgg.kernels import convolution, narrow_convolution

    channels = program.layout.shapes[program.layout.names.index(first.weight)][1]
    if isinstance(first, RowConvolution) and channels > narrow_convolution.MOST_CHANNELS:
        return Form()
    return Form(convolution.lanes(channels), torch.bfloat16 if first.precision == "bf16" else None)


def _rows(jobs: Sequence[RoundJob], group: list[int]) -> list[StackRow]:
    """Sorted by number of steps, longest first, with a stable order of equal rows for reproducible results."""
    rows = [
        StackRow(number, client, job.work.steps(job.data.examples(client), job.seed, job.round, client))
        for number, job in ((number, jobs[number]) for number in group)
        for client in job.cohort
    ]
    return sorted(rows, key=lambda row: -row.steps)


def _probe(jobs: Sequence[RoundJob], rows: list[StackRow]) -> Probe:
    """A probe that gives each row the net, buffers and data of its experiment."""

    def of_row(k: int) -> Probe:
        job, client = jobs[rows[k].job], rows[k].client
        return Probe(job.net, job.buffers, lambda _: job.data.client_chunks(client))

    return replace(of_row(0), each=of_row)


def _groups(items: Sequence[T], alike: Callable[[T, T], bool]) -> list[list[int]]:
    """Indices of the items in groups of alike ones."""
    groups: list[list[int]] = []
    for number, item in enumerate(items):
        for group in groups:
            if alike(items[group[0]], item):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _non_numeric_settings(algorithm: Algorithm) -> dict[str, object]:
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return {name: value for name, value in values.items() if not isinstance(value, float)}


def _with_columns(algorithms: list[Algorithm], like: Tensor) -> Algorithm:
    """One algorithm for all rows; numeric settings in which the rows differ become columns."""
    first = algorithms[0]
    columns = {}
    for field in fields(first):
        values = [getattr(algorithm, field.name) for algorithm in algorithms]
        if isinstance(values[0], float) and any(value != values[0] for value in values):
            columns[field.name] = _column(values, like)
    return replace(first, **columns) if columns else first


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
