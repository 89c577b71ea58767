"""Tiny tensors on one thread: two would mostly wait for each other."""

import torch

torch.set_num_threads(1)
