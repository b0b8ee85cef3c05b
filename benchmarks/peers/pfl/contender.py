"""pfl-research: FederatedAveraging over a simulated backend; several workers under torchrun, as its guide advises.

Workers get users by their number of images (`user_id_to_weight`), so that none waits for a straggler. A callback waits
for the driver; the first of several workers passes the command on to the others, which would otherwise train on in the
turn of another contender.
"""

import os
import subprocess
import sys

import numpy as np
import torch
import torch.nn.functional as F
from bench_kit import DriverConnection, load
from torch import nn

ENDLESS = 1_000_000  # rounds; the driver ends the run


def main() -> None:
    workers = int(sys.argv[1])
    if workers > 1 and "LOCAL_RANK" not in os.environ:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", __file__, str(workers)]
        sys.exit(subprocess.call([sys.executable, *words]))
    driver = DriverConnection() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    simulate(driver)


def simulate(driver: DriverConnection | None) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    workload = load()
    settings = workload.settings
    module = with_loss(workload.model())
    np.random.seed(0)
    torch.manual_seed(0)

    def dataset_of(user: int) -> Dataset:
        """A user's images, shuffled for each round: pfl takes the batches in order."""
        x, y = workload.clients[user]
        order = torch.randperm(len(y))
        return Dataset((x[order], y[order]), user_id=str(user))

    class Driver(TrainingProcessCallback):
        def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
            if driver is not None:
                driver.ready("pfl")
            if not self.another_round():
                sys.exit(0)
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
            if driver is not None:
                driver.done()
            return not self.another_round(), Metrics()

        def another_round(self) -> bool:
            """The driver's command, in every worker."""
            wanted = torch.zeros(1)
            if driver is not None:
                wanted[0] = driver.round_wanted(lambda: workload.accuracy(module))
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(wanted, src=0)
            return bool(wanted)

    users = list(range(len(workload.clients)))
    sizes = {user: len(workload.clients[user][1]) for user in users}
    data = FederatedDataset(dataset_of, get_user_sampler("minimize_reuse", users), user_id_to_weight=sizes)
    model = PyTorchModel(
        module,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=settings.momentum),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,
            train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=settings.epochs, local_learning_rate=settings.lr, local_batch_size=settings.batch
        ),
        callbacks=[Driver()],
        send_metrics_to_platform=False,
    )


def with_loss(module: nn.Module) -> nn.Module:
    """The interface that pfl expects of a module: loss and metrics; the kit measures the accuracy."""

    def loss(x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        module.eval() if is_eval else module.train()
        return F.cross_entropy(module(x), y)

    module.loss = loss
    module.metrics = lambda x, y: {}
    return module


if __name__ == "__main__":
    main()
