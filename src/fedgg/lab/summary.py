"""How a run ended, in a few figures."""

from __future__ import annotations

from typing import Any

from fedgg.lab.build import Federation
from fedgg.lab.record import spent


def summary_of(federation: Federation, rounds: list[dict[str, Any]], why: str | None) -> dict[str, Any]:
    """What summary.json says; `why` is the reason of a run that diverged."""
    scored = [record for record in rounds if "test_accuracy" in record]
    best = max(scored, key=lambda record: record["test_accuracy"], default=None)
    spent_all = _out_of_budget(federation, len(rounds)) if why is None else None
    return {
        "status": "diverged" if why is not None else "finished" if spent_all is None else "spent",
        "why": why or spent_all,
        "rounds_done": len(rounds),
        "final_test_accuracy": scored[-1]["test_accuracy"] if scored else None,
        "highest_test_accuracy": best["test_accuracy"] if best else None,
        "highest_at_round": best["round"] if best else None,
        "parameters": federation.net.layout.total,
        "bytes": sum(record["bytes_up"] + record["bytes_down"] for record in rounds),
        "seconds": round(sum(sum(record["seconds"].values()) for record in rounds), 3),
        "clients_lost": sum(len(record["lost"]) for record in rounds),
        **spent(federation.wrappers.budget, len(rounds)),
    }


def _out_of_budget(federation: Federation, rounds_done: int) -> str | None:
    """Why a run that was asked for more rounds is over."""
    budget = federation.wrappers.budget
    if budget is None or budget.limit is None or rounds_done >= federation.experiment.rounds:
        return None
    return (
        f"round {rounds_done + 1} would raise epsilon to {budget.epsilon(rounds_done + 1):.2f}, over "
        f"privacy.epsilon_limit = {budget.limit:g}; a larger limit lets the run go on"
    )
