"""What a client of an experiment would send up, looked at before the first round: nobody trains."""

from __future__ import annotations

from dataclasses import replace

from fedgg.core.collect import PLAIN
from fedgg.core.local import LocalEnd, end_round, open_round
from fedgg.engines.loop import open_client
from fedgg.errors import UserError
from fedgg.lab.build import Federation
from fedgg.lab.state import begin, next_job

FEW = 32


def rehearse(federation: Federation) -> None:
    """Refuse an algorithm whose messages the experiment's wrappers cannot treat, before anything is written."""
    collector = federation.wrappers.collector
    if collector is PLAIN:
        return
    end, name = rehearsed(federation), type(federation.algorithm).__name__
    try:
        collector.check(end.up, federation.net.layout.total)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    budget = federation.wrappers.budget
    if budget is not None and end.memory and not budget.client_state:
        raise UserError(
            f"{name}.finish() returns client state ({', '.join(end.memory)}) that client_memory() does not have: give "
            f"it there too; what privacy is spent depends on whether clients keep state"
        )


def rehearsed(federation: Federation) -> LocalEnd:
    """The first client of the first round, after no step at all: the names and shapes of what everybody will send.

    Of its examples a few are enough: how many there are may be no more than a claim.
    """
    job = next_job(federation, begin(federation))
    first, clients = job.cohort[0], list(federation.feed.clients)
    clients[first] = clients[first][:FEW].copy()
    job = replace(job, data=replace(federation.feed, clients=tuple(clients)))
    start, sgd = open_client(job, first)
    running, client = open_round(job.algorithm, job.net, sgd, start)
    return end_round(job.algorithm, start, running, client)
