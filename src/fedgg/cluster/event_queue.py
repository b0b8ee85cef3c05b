"""A Ray actor that keeps the messages of tasks until the driver takes them. It imports nothing: it starts quickly."""

from __future__ import annotations

from typing import Any

Message = tuple[int, list[Any]]  # the number of a task, and its events in order


class EventQueue:
    def __init__(self) -> None:
        self._messages: list[Message] = []

    def put(self, task_number: int, events: list[Any]) -> None:
        self._messages.append((task_number, events))

    def take(self) -> list[Message]:
        """All messages since the last call; those of one task are in the order in which it sent them."""
        messages, self._messages = self._messages, []
        return messages
