"""The Flower ClientApp. In its own module, so that each Ray actor imports it once and keeps the images."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from bench_kit import Workload, load, shuffled
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
workload = lru_cache(load)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One client's local epochs."""
    mine: Workload = workload()
    settings = mine.settings
    x, y = mine.clients[int(context.node_config["partition-id"])]
    model = mine.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for _ in range(settings.epochs):
        for images, labels in shuffled(x, y, settings.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
