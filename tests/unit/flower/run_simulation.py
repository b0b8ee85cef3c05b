"""A program: one experiment in Flower's own simulation, with Ray. Arguments: experiment, run folder, nodes."""

from __future__ import annotations

import sys

from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.simulation import run_simulation

from fedgg.flower import client_app, server_app

if __name__ == "__main__":
    experiment, out, nodes = sys.argv[1:]
    config = {"out": out, "wait": 300}  # a busy machine takes minutes to start the clients' processes
    backend: BackendConfig = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local"},  # not the Ray cluster that somebody else has, or had, on this machine
    }
    run_simulation(server_app(experiment, config), client_app(experiment, config), int(nodes), backend_config=backend)
