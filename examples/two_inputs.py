"""A model with two inputs: an image of a digit, and whole numbers beside it, which an embedding reads."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedgg


class ImageAndQuestion(nn.Module):
    """Is the digit larger than the number asked for?"""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.question = nn.Embedding(10, 16)
        self.head = nn.Sequential(nn.Linear(32 + 16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.cat([self.image(image / 16), self.question(question)], 1))
        return answer


images, digits = load_digits(return_X_y=True)
questions = np.random.default_rng(0).integers(0, 10, len(images))
answers = (digits > questions).astype(int)
x_train = {"image": images[:1500], "question": questions[:1500]}
x_test = {"image": images[1500:], "question": questions[1500:]}

run = fedgg.run(
    {"rounds": 15, "split": {"clients": 5, "beta": 0.5}, "local": {"batch": 32, "lr": 0.05}},
    model=ImageAndQuestion,
    data=(x_train, answers[:1500], x_test, answers[1500:]),
    algorithm=fedgg.FedGG(mu=0.1),
)
print(f"accuracy {run.rounds[-1]['test_accuracy']:.3f}")
print(f"first answers {run.predict(x_test)[:5]}, right {answers[1500:1505]}")
