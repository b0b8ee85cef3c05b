"""A lost client is counted from round to round, by name where it is the only one."""

from __future__ import annotations

from typing import Any

from fedgg.cli.progress import DroppedClients
from fedgg.cli.terminal import news


def record(*lost: int, why: str = "not finite: delta") -> dict[str, Any]:
    return {"lost": [{"client": client, "why": why} for client in lost]}


def test_rounds_are_counted() -> None:
    lost = DroppedClients()
    assert lost.add(record()) == ""
    assert lost.add(record(3)) == "client 3 dropped (not finite: delta), 1 round so far"
    assert lost.add(record(3)) == "client 3 dropped (not finite: delta), 2 rounds so far"
    assert lost.add(record(3, why="gone")) == "client 3 dropped (gone), 1 round so far"
    assert lost.add(record(1, 3)) == "2 clients dropped, 4 rounds with dropped clients so far"
    assert lost.totals() == ["client 3 dropped (not finite: delta), 3 rounds in all"]
    lost.add(record(1, 3))
    lost.add(record(1))
    assert lost.totals() == [
        "client 3 dropped (not finite: delta), 4 rounds in all",
        "client 1 dropped (not finite: delta), 3 rounds in all",
    ]


def test_of_very_many_a_few_are_told() -> None:
    lost = DroppedClients()
    for client in range(9):
        for _ in range(2 + client // 2 * 2):
            lost.add(record(client))
    assert lost.totals() == [
        "client 8 dropped (not finite: delta), 10 rounds in all",
        "clients 6, 7 dropped (not finite: delta), 8 rounds in all",
        "clients 4, 5 dropped (not finite: delta), 6 rounds in all",
        "clients 2, 3 dropped (not finite: delta), 4 rounds in all",
        "clients 0, 1 dropped (not finite: delta), 2 rounds in all",
    ]
    for _ in range(20):
        lost.add(record(9))
    assert lost.totals()[-1] == "more clients were dropped, less often: rounds.jsonl lists all"


def test_the_line_of_a_round() -> None:
    told = {"test_accuracy": 0.5, "train_loss": 1.0}
    assert news(told, "client 3 dropped") == "test accuracy 50.0%, train loss 1.000, client 3 dropped"
    assert news(told) == "test accuracy 50.0%, train loss 1.000"
    assert news({"test_rmse": 0.3409, "test_mae": 0.1, "train_loss": 1.0}) == "test RMSE 0.341, train loss 1.000"
