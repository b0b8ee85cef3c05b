"""Several clients in flight on one GPU, each with a captured step on its own stream: for large models.

The large kernels of one model run beside the small kernels of others. Batches of models that mix the examples of a
batch are not padded: a shorter last batch has its own graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.engines.base import RoundJob, recorded_on_host, score_here
from fedgg.engines.fused.engine import Fused
from fedgg.engines.fused.net import fused_net
from fedgg.engines.gpu.cuda_graphs import CudaStreams, Form, GraphCache, Prefetch, Step
from fedgg.engines.gpu.pixelwise_rows import arranged_start, restored_end
from fedgg.engines.layers.module_programs import large_program_of
from fedgg.engines.layers.program import Program
from fedgg.engines.loop import open_client
from fedgg.engines.module_equivalence import mixes_examples

LANES = 6  # clients in flight: more gain little and cost memory


class Streams:
    """On a GPU, large models: several clients in flight.

    Trains the clients of a round, a few concurrently, longest first.
    """

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, lanes: int = LANES) -> None:
        self._max_lanes = lanes
        self._streams = CudaStreams()
        self._graphs = GraphCache()
        self._prefetch = Prefetch()
        self._nets: dict[int, tuple[Net, Net, Program | None]] = {}

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        if job.net.draws_random_numbers:
            yield from Fused().train(job)
            return
        job = replace(job, net=fused_net(job.net))
        exact = job.net.keeps_statistics or mixes_examples(job.net)
        order = sorted(job.cohort, key=lambda client: -job.data.examples(client))
        waiting, ends = deque(order), dict[int, LocalEnd]()
        works = [self._lane(number, job, waiting, ends, exact) for number in range(min(self._max_lanes, len(order)))]
        self._prefetch.prepare([job])
        self._streams.run(works, job.w.device)
        for client in job.cohort:
            yield client, recorded_on_host(ends[client])

    score = staticmethod(score_here)

    def _lane(
        self, number: int, job: RoundJob, waiting: deque[int], ends: dict[int, LocalEnd], exact: bool
    ) -> Iterator[None]:
        """Trains one client after another; which lane trains a client does not affect results."""
        longest = job.work.steps(max(job.data.examples(client) for client in job.cohort))
        while waiting:
            client = waiting.popleft()
            (agenda,) = self._prefetch.agendas([(job, client)])
            net, program = self._arranged(job.net)
            start, optimiser = open_client(job, client)
            start = replace(arranged_start(start, net), many=program)
            if start.probe is not None:
                start = replace(start, probe=replace(start.probe, net=net))
            steps = _steps(agenda.where, exact)
            pages = job.data.lay_out([agenda], longest)
            stack, client_view = self._graphs.open(
                number, job.algorithm, net, optimiser, start, job.data, pages, [0], steps, Form()
            )
            yield from stack.replay(steps)
            ends[client] = restored_end(stack.end(job.algorithm, start, client_view), net)

    def _arranged(self, net: Net) -> tuple[Net, Program | None]:
        """The net in the memory layout of this engine, and its program if it has one."""
        entry = self._nets.get(id(net))
        if entry is None:
            arranged = net.arranged() if net.channels_last else net
            program = large_program_of(arranged) if net.channels_last else None
            entry = self._nets[id(net)] = (net, arranged, program)  # a reference to the net keeps its id unique
        return entry[1:]


def _steps(where: Any, exact: bool) -> list[Step]:
    """One step per batch, at the batch's own size if `exact`, else padded to the full size."""
    widths = (where >= 0).sum(1) if exact else [where.shape[1]] * len(where)
    return [Step(1, int(width)) for width in widths]
