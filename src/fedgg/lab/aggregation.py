"""The sections [privacy], [robust] and [attack]: what they make of the clients' messages before `aggregate`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgg.aggregation import RULES, Attack, Budget, ClientPrivacy, NormClip, TrimmedMean
from fedgg.aggregation.byzantine import trimmed_clients
from fedgg.core.algorithm import Algorithm
from fedgg.core.model import Net
from fedgg.core.server import PLAIN, Collector
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import build_rule


@dataclass(frozen=True)
class Aggregation:
    """Attack, privacy, robust rule and server learning rate of an experiment; by default none."""

    collector: Collector = PLAIN
    attack: Attack | None = None
    budget: Budget | None = None
    server_rates: tuple[float, ...] = ()  # the server's learning rate by round; empty: always 1


PLAIN_AGGREGATION = Aggregation()


def aggregation_of(
    experiment: Experiment, algorithm: Algorithm, net: Net, clients: NDArray[np.int64]
) -> tuple[Aggregation, list[str]]:
    """As the experiment says, with notices for the user; `clients` are those that hold examples and can be drawn."""
    privacy, robust, attack = experiment.privacy, experiment.robust, experiment.attack
    cohort = experiment.cohort_of(len(clients))
    collector, attackers, budget, notices = PLAIN, None, None, list[str]()
    if attack is not None:
        if attack.clients > len(clients):
            raise UserError(
                f"attack.clients = {attack.clients} but only {len(clients)} of {experiment.split.clients} clients hold "
                f"examples: take {len(clients)} or fewer"
            )
        attackers = Attack.draw(attack.kind, attack.scale, attack.clients, clients, experiment.seed)
        several = "s" if attack.clients > 1 else ""
        notices.append(f"attack: {attack.kind} by client{several} {', '.join(map(str, sorted(attackers.clients)))}")
    if robust is not None:
        collector = build_rule(robust)
        notices += _too_weak(robust.rule, collector, attack.clients if attack else 0, cohort)
        if _sends_statistics(experiment, net):
            notices.append(
                f"robust.rule = {robust.rule!r} covers the updates, not batch statistics, which are averaged: "
                f"model.statistics = 'frozen' keeps them out of attackers' hands"
            )
    if privacy is not None:
        _refuse_statistics(experiment, net)
        collector = ClientPrivacy(privacy.clip, privacy.noise, experiment.seed)
        state = bool(algorithm.client_memory(net.start)) or experiment.personal is not None
        state = state or experiment.optimiser.state == "kept"
        budget = Budget(len(clients), cohort, privacy.noise, privacy.delta, state, privacy.epsilon_limit)
        notices += _privacy_notices(budget, experiment.rounds)
    return Aggregation(collector, attackers, budget), notices


def _too_weak(rule: str, collector: Collector, attackers: int, cohort: int) -> list[str]:
    """What a registered rule cannot withstand, whichever clients are drawn."""
    if isinstance(collector, TrimmedMean) and trimmed_clients(collector.trim, cohort) == 0:
        return [f"robust.trim = {collector.trim:g} of {cohort} clients removes none: this is a plain mean"]
    if rule in RULES and not isinstance(collector, NormClip) and 2 * attackers >= cohort:
        return [f"{attackers} attackers may be half of a cohort of {cohort}: no rule holds against a majority"]
    return []


def _sends_statistics(experiment: Experiment, net: Net) -> bool:
    return bool(net.moving) and experiment.model.statistics != "frozen"


def _refuse_statistics(experiment: Experiment, net: Net) -> None:
    if _sends_statistics(experiment, net):
        raise UserError(
            f"privacy: model.statistics = {experiment.model.statistics!r} sends batch statistics to the server, which "
            f"no noise protects: set model.statistics = 'frozen', or take a model without them"
        )


def _shown(epsilon: float) -> str:
    return f"{epsilon:.2f}" if epsilon < 1e6 else f"{epsilon:.3g}"


def _privacy_notices(budget: Budget, rounds: int) -> list[str]:
    """What the run will spend, and what weakens the guarantee."""
    if budget.noise == 0:
        return ["privacy.noise = 0: updates are clipped and counted equally, but nothing is protected"]
    affordable = budget.affordable(rounds)
    if affordable == 0:
        raise UserError(
            f"privacy.epsilon_limit = {budget.limit:g} allows no round: the first one spends "
            f"{_shown(budget.epsilon(1))}; take more privacy.noise, fewer of more clients a round, or a larger limit"
        )
    spent = f"privacy: {affordable} rounds spend epsilon {_shown(budget.epsilon(affordable))} at delta {budget.delta:g}"
    spent += f" (accountant: {budget.accountant(affordable)})"
    notices = [spent if affordable == rounds else f"{spent}, which is all that epsilon_limit allows of {rounds}"]
    if budget.client_state and budget.cohort < budget.clients:
        notices.append(
            "privacy: clients of this algorithm keep state between rounds, from which later updates may tell who was "
            "drawn: epsilon counts cohorts as known, and is larger than where clients keep nothing"
        )
    if budget.delta * budget.clients > 1:
        notices.append(
            f"privacy.delta = {budget.delta:g} is more than 1 / {budget.clients} clients: it promises little"
        )
    return notices
