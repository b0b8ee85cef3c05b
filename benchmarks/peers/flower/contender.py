"""Flower: FedAvg in its simulation runtime (Ray), two actors of one CPU each.

`evaluate_fn`, which the strategy calls before the first round and after each round, waits for the driver.
"""

import os
import sys
import time

# By default Ray lowers the priority of its actors, so that other processes would slow Flower more than the others.
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")

import ray
from bench_kit import DriverConnection, load
from client import app as client_app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

ENDLESS = 1_000_000  # rounds; the driver ends the run
ACTORS = 2


class Stop(Exception):
    """The driver has ended the run; raised in the strategy, it ends the simulation."""


def server_of(driver: DriverConnection, workload) -> ServerApp:
    app, model = ServerApp(), workload.model()

    def after_round(number: int, arrays: ArrayRecord) -> None:
        def score() -> float:
            model.load_state_dict(arrays.to_torch_state_dict())
            return workload.accuracy(model)

        if number:
            driver.done()
        else:
            driver.ready("flwr", "ray")
        if not driver.round_wanted(score):
            raise Stop

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while not ray.is_initialized():  # the runtime starts in parallel
            time.sleep(0.1)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(workload.clients))
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ENDLESS, evaluate_fn=after_round)

    return app


def main() -> None:
    driver, workload = DriverConnection(), load()
    try:
        run_simulation(
            server_app=server_of(driver, workload),
            client_app=client_app,
            num_supernodes=len(workload.clients),
            backend_config={
                "init_args": {"num_cpus": ACTORS},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    except Stop:
        sys.exit(0)


if __name__ == "__main__":
    main()
