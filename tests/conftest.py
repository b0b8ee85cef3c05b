"""One torch thread for each test process: two threads on a busy machine are many times slower."""

import torch

torch.set_num_threads(1)
