"""The conformance suite: what every algorithm must keep, the library's own and a user's (`fedgg check FILE:CLASS`)."""

from __future__ import annotations

from collections.abc import Callable

from fedgg.check import multi_round_properties, single_round_properties
from fedgg.check.single_round_properties import Broken, Skipped
from fedgg.core.algorithm import Algorithm

Property = Callable[[Algorithm], None]

PROPERTIES: dict[str, Property] = {
    "fields are documented settings": single_round_properties.fields_are_settings,
    "arguments are left alone": single_round_properties.arguments_are_left_alone,
    "called again, the same comes out": single_round_properties.the_same_again,
    "rows never look at each other": single_round_properties.rows_are_independent,
    "settings may differ from row to row": single_round_properties.settings_may_be_columns,
    "finite where there is no gradient": single_round_properties.finite_at_zero_drift,
    "a client of one example": single_round_properties.a_client_of_one_example,
    "what is declared sparse is": single_round_properties.declared_messages,
    "neutral setting is FedAvg, bit for bit": multi_round_properties.neutral_is_fedavg,
    "resumed is uninterrupted, bit for bit": multi_round_properties.resumed_is_uninterrupted,
    "clients that miss rounds": multi_round_properties.clients_may_miss_rounds,
    "many rounds on quadratics": multi_round_properties.quadratics_come_closer,
    "learns real digits": multi_round_properties.learns_digits,
    "in other processes the same, bit for bit": multi_round_properties.workers_repeat_the_loop,
}

__all__ = ["PROPERTIES", "Broken", "Property", "Skipped"]
