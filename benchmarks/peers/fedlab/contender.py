"""FedLab: its standalone pipeline with the serial trainer, one client after another on one thread.

Its SGD trainer has neither momentum nor weights by examples; both are added in the methods that FedLab provides for
this, `local_process` and `global_update`. The pipeline's `evaluate`, called after each round, waits for the driver.
"""

import contextlib
import sys
from types import ModuleType

for name in ("torchvision", "torchvision.transforms"):  # see requirements.txt: imported by FedLab, not used here
    sys.modules[name] = ModuleType(name)
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]

import torch
from bench_kit import DriverConnection, Workload, load, shuffled
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.aggregator import Aggregators
from fedlab.utils.serialization import SerializationTool

ENDLESS = 1_000_000  # rounds; the driver ends the run


class Stop(Exception):
    """The driver has ended the run."""


class Clients:
    """The interface that FedLab expects of a data set: batches of one client."""

    def __init__(self, workload: Workload):
        self._workload = workload

    def get_dataloader(self, client: int, batch_size: int):
        return shuffled(*self._workload.clients[client], batch_size)


class Trainer(SGDSerialClientTrainer):
    """SGD with momentum that starts at zero for every client; the update has the number of examples."""

    def __init__(self, workload: Workload):
        super().__init__(workload.model(), num_clients=len(workload.clients))
        self._workload = workload
        self.setup_dataset(Clients(workload))
        self.setup_optim(workload.settings.epochs, workload.settings.batch, workload.settings.lr)

    def local_process(self, payload, id_list):
        settings = self._workload.settings
        for client in id_list:
            self.optimizer = torch.optim.SGD(self._model.parameters(), settings.lr, momentum=settings.momentum)
            batches = self.dataset.get_dataloader(client, self.batch_size)
            examples = torch.tensor(float(len(self._workload.clients[client][1])))
            self.cache.append([*self.train(payload[0], batches), examples])


class Server(SyncServerHandler):
    def global_update(self, buffer):
        models, examples = zip(*buffer, strict=True)
        mean = Aggregators.fedavg_aggregate(list(models), torch.stack(examples))
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    """A pipeline that waits for the driver before each round."""

    def __init__(self, handler: Server, trainer: Trainer, driver: DriverConnection, workload: Workload):
        super().__init__(handler, trainer)
        self._driver, self._workload = driver, workload

    def main(self) -> None:
        self._driver.ready("fedlab")
        self.wait()
        super().main()

    def evaluate(self) -> None:
        self._driver.done()
        self.wait()

    def wait(self) -> None:
        if not self._driver.round_wanted(lambda: self._workload.accuracy(self.handler.model)):
            raise Stop


def main() -> None:
    driver, workload = DriverConnection(), load()
    torch.manual_seed(0)
    server = Server(workload.model(), global_round=ENDLESS, sample_ratio=1.0)
    with contextlib.suppress(Stop):
        Pipeline(server, Trainer(workload), driver, workload).main()


if __name__ == "__main__":
    main()
