"""A Flower app, before and after fedgg: the same training loop with FedAvg by Flower, then with FedGG by fedgg.

    python examples/from_flower.py flower     # Flower's own FedAvg
    python examples/from_flower.py fedgg      # FedGG: two lines differ at the server, two at the client

It needs `pip install "fedgg[flower]"`, and runs in Flower's simulation on the digits of scikit-learn.
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch import nn

import fedgg

CLIENTS, ROUNDS = 4, 5
ALGORITHM = fedgg.FedGG(mu=0.0, first_step="push", push=0.5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def examples(client: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of a client, sorted by label so that clients differ; every fifth example is the server's (None)."""
    x, y = load_digits(return_X_y=True)
    is_test = np.arange(len(x)) % 5 == 0
    if client is None:
        chosen = np.flatnonzero(is_test)
    else:
        train = np.flatnonzero(~is_test)
        chosen = np.array_split(train[np.argsort(y[train], kind="stable")], CLIENTS)[client]
    return torch.tensor(x[chosen] / 16, dtype=torch.float32), torch.tensor(y[chosen])


def train_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int = 2) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = examples(None)
    return MetricRecord({"accuracy": float((model(x).argmax(1) == y).float().mean())})


def client_app(with_fedgg: bool) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        x, y = examples(int(context.node_config["partition-id"]))
        torch.manual_seed(int(context.node_config["partition-id"]))
        if with_fedgg:
            with fedgg.flower.guided(ALGORITHM, model, message, context) as guide:
                train_loop(model, x, y)
            reply: Message = guide.reply({"num-examples": len(x)})
            return reply
        train_loop(model, x, y)
        metrics = MetricRecord({"num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def server_app(with_fedgg: bool) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = net()
        options: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
        strategy = fedgg.flower.strategy(ALGORITHM, model, **options) if with_fedgg else FedAvg(**options)
        initial = ArrayRecord(model.state_dict())
        result = strategy.start(grid, initial_arrays=initial, num_rounds=ROUNDS, evaluate_fn=evaluate)
        for number, metrics in sorted(result.evaluate_metrics_serverapp.items()):
            print(f"round {number}: accuracy {metrics['accuracy']:.3f}", flush=True)

    return app


if __name__ == "__main__":
    chosen = sys.argv[1:] == ["fedgg"]
    one_core_each: BackendConfig = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app(chosen), client_app(chosen), CLIENTS, backend_config=one_core_each)
