"""The conformance suite: properties of every algorithm, built in or the user's (`fedgg check FILE:CLASS`)."""

from __future__ import annotations

from collections.abc import Callable

from fedgg.check import hook_properties as single_round_properties
from fedgg.check import multi_round_properties
from fedgg.check.hook_properties import Broken, Skipped
from fedgg.core.algorithm import Algorithm

Property = Callable[[Algorithm], None]

PROPERTIES: dict[str, Property] = {
    "fields are documented settings": single_round_properties.fields_are_settings,
    "arguments are not modified": single_round_properties.arguments_are_not_modified,
    "repeated calls give the same result": single_round_properties.repeated_calls_agree,
    "rows are independent": single_round_properties.rows_are_independent,
    "settings may differ from row to row": single_round_properties.settings_may_be_columns,
    "finite at zero gradient": single_round_properties.finite_at_zero_drift,
    "a client of one example": single_round_properties.a_client_of_one_example,
    "sparse messages are as declared": single_round_properties.sparse_messages_are_as_declared,
    "neutral setting is FedAvg, bit for bit": multi_round_properties.neutral_is_fedavg,
    "resumed equals uninterrupted, bit for bit": multi_round_properties.resumed_equals_uninterrupted,
    "clients that miss rounds": multi_round_properties.clients_may_miss_rounds,
    "many rounds on quadratics": multi_round_properties.approaches_optimum_of_quadratics,
    "learns real digits": multi_round_properties.learns_digits,
    "clients with AdamW": multi_round_properties.holds_under_adamw,
    "worker processes agree, bit for bit": multi_round_properties.workers_give_the_same,
}

__all__ = ["PROPERTIES", "Broken", "Property", "Skipped"]
