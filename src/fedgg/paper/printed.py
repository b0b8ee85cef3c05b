"""What the paper prints: Wu, Liu and Xue, Global Update Guided Federated Learning, CCC 2022, Tables 1 to 4."""

from __future__ import annotations

# Highest test accuracy in per cent over 100 rounds: mean and spread over three repetitions, by beta and data set.
ACCURACY: dict[float, dict[str, dict[str, tuple[float, float]]]] = {
    0.5: {  # Table 1
        "svhn": {"FedAvg": (79.6, 0.3), "FedProx": (79.7, 0.4), "SCAFFOLD": (78.2, 0.3), "FedGG": (80.0, 0.2)},
        "cifar10": {"FedAvg": (69.2, 0.4), "FedProx": (69.0, 0.4), "SCAFFOLD": (70.1, 0.3), "FedGG": (71.1, 0.2)},
        "cifar100": {"FedAvg": (60.1, 0.2), "FedProx": (59.8, 0.2), "SCAFFOLD": (61.0, 0.1), "FedGG": (61.6, 0.1)},
    },
    0.1: {  # Table 2
        "svhn": {"FedAvg": (70.3, 0.2), "FedProx": (70.1, 0.3), "SCAFFOLD": (64.4, 0.2), "FedGG": (70.8, 0.3)},
        "cifar10": {"FedAvg": (61.6, 0.3), "FedProx": (60.5, 0.2), "SCAFFOLD": (61.2, 0.3), "FedGG": (63.8, 0.1)},
        "cifar100": {"FedAvg": (52.0, 0.3), "FedProx": (50.0, 0.2), "SCAFFOLD": (53.3, 0.2), "FedGG": (55.2, 0.2)},
    },
}

# Rounds to FedAvg's accuracy at round 100, and the speed-up printed beside them; None: a dash, "<1x" beside it.
ROUNDS: dict[float, dict[str, dict[str, tuple[int, float] | None]]] = {
    0.5: {  # Table 3
        "svhn": {"FedAvg": (100, 1.0), "FedProx": (88, 1.13), "SCAFFOLD": None, "FedGG": (65, 1.53)},
        "cifar10": {"FedAvg": (100, 1.0), "FedProx": (80, 1.25), "SCAFFOLD": (59, 1.69), "FedGG": (47, 2.12)},
        "cifar100": {"FedAvg": (100, 1.0), "FedProx": None, "SCAFFOLD": (89, 1.12), "FedGG": (70, 1.42)},
    },
    0.1: {  # Table 4
        "svhn": {"FedAvg": (100, 1.0), "FedProx": (95, 1.05), "SCAFFOLD": None, "FedGG": (75, 1.33)},
        "cifar10": {"FedAvg": (100, 1.0), "FedProx": (90, 1.11), "SCAFFOLD": (100, 1.0), "FedGG": (38, 2.63)},
        "cifar100": {"FedAvg": (100, 1.0), "FedProx": None, "SCAFFOLD": (81, 1.23), "FedGG": (57, 1.75)},
    },
}
