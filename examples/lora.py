"""Fine-tune a transformer by LoRA on a hundred clients: pip install peft transformers; python examples/lora.py

The adapters and the classifier train and travel; all other parameters are frozen, and in memory once for all clients.
Without network access the transformer has random weights: put `from_pretrained(...)` in their place for a real one. The
input is the embedded digits as sequences of 64 tokens, one for each pixel.
"""

import resource
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import fedgg


class Adapted(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
        config = BertConfig(
            vocab_size=17, num_attention_heads=4, max_position_embeddings=64, num_labels=classes, **sizes
        )
        lora = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
        self.transformer = get_peft_model(BertForSequenceClassification(config), lora)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.transformer(input_ids=pixels.flatten(1).long()).logits
        return logits


EXPERIMENT = fedgg.Experiment(
    rounds=20,
    data={"source": "digits", "normalise": "none"},  # token ids are not scaled
    split={"clients": 100, "scheme": "iid"},
    algorithm={"name": "fedavg"},
    optimiser={"name": "adamw"},
    local={"epochs": 5, "batch": 8, "lr": 0.01},
    server={"cohort": 10},
    engine={"name": "fused"},  # one process, whose memory is measured
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = fedgg.run(EXPERIMENT, model=Adapted, out=folder)
        checkpoint = max(path.stat().st_size for path in Path(folder).glob("checkpoint/*"))
    total = sum(parameter.numel() for parameter in run.model().parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"test accuracy {100 * run.test_accuracy[-1]:.1f}%")
    print(f"{run.summary['parameters']:,} of {total:,} parameters travel, {run.summary['bytes'] / 1e6:.1f} MB in all")
    print(f"largest checkpoint {checkpoint / 1e3:.0f} kB, peak memory of the process {peak:.0f} MB")


if __name__ == "__main__":
    main()
