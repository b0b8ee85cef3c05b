"""The conformance suite: what every algorithm must keep, the library's own and a user's (`fedgg check FILE:CLASS`)."""

from __future__ import annotations

from collections.abc import Callable

from fedgg.check import behaviour, laws
from fedgg.check.laws import Broken, Skipped
from fedgg.core.algorithm import Algorithm

Property = Callable[[Algorithm], None]

PROPERTIES: dict[str, Property] = {
    "fields are documented settings": laws.fields_are_settings,
    "arguments are left alone": laws.arguments_are_left_alone,
    "called again, the same comes out": laws.the_same_again,
    "rows never look at each other": laws.rows_are_independent,
    "settings may differ from row to row": laws.settings_may_be_columns,
    "finite where there is no gradient": laws.finite_at_zero_drift,
    "a client of one example": laws.a_client_of_one_example,
    "what is declared sparse is": laws.declared_messages,
    "neutral setting is FedAvg, bit for bit": behaviour.neutral_is_fedavg,
    "resumed is uninterrupted, bit for bit": behaviour.resumed_is_uninterrupted,
    "clients that miss rounds": behaviour.clients_may_miss_rounds,
    "many rounds on quadratics": behaviour.quadratics_come_closer,
    "learns real digits": behaviour.learns_digits,
    "in other processes the same, bit for bit": behaviour.workers_repeat_the_loop,
}

__all__ = ["PROPERTIES", "Broken", "Property", "Skipped"]
