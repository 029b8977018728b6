"""A training job's state of any size, and work that stands for its forward and backward."""

from __future__ import annotations

import time

import torch
import xxhash
from torch import nn

WIDTH_MAX = 4096  # square weights of at most 64 MiB in float32: about what a layer of a billion-parameter model has
LAYERS_MIN = 4
COPIES = 3  # a weight and its two AdamW moments
FLOAT_BYTES = 4
CALIBRATION_S = 0.5


class Training:
    """A state of about ``nbytes``: weights and two AdamW moments; ``compute`` stands for forward and backward."""

    def __init__(self, nbytes: float, device: str = "cpu", tensors: int = 0) -> None:
        """``tensors``: about so many, each as large (the optimizer's step counters are not among them); 0: as in a large model."""
        least = round(tensors / COPIES) or LAYERS_MIN
        width = min(WIDTH_MAX, max(1, int((nbytes / COPIES / FLOAT_BYTES / least) ** 0.5)))
        layers = least if tensors else max(least, round(nbytes / COPIES / FLOAT_BYTES / width**2))
        self.model = nn.ParameterList(
            [nn.Parameter(torch.randn(width, width, device=device)) for _ in range(layers)]
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for weight in self.model:
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.step = 0
        self._left, self._right = (torch.randn(512, 512, device=device) for _ in range(2))
        self.products = 0  # matrix products of one forward and backward

    def tensors(self) -> list[torch.Tensor]:
        """Weights and moments; the optimizer's step counters are not among them."""
        states = [self.optimizer.state[weight] for weight in self.model]
        moments = [value for state in states for value in state.values() if torch.is_tensor(value) and value.numel() > 1]
        return [*(weight.data for weight in self.model), *moments]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def digests(self) -> list[str]:
        """Of the bytes of each tensor, on the CPU."""
        return [xxhash.xxh3_64_hexdigest(tensor.numpy().data) for tensor in self.tensors()]

    def spoil(self) -> None:
        """Nothing of the state is left: what a restore or load does not bring back is missed."""
        for tensor in self.tensors():
            tensor.fill_(-1.0)

    def calibrate(self, seconds: float) -> None:
        """From now on compute() is the work of about ``seconds``: a fixed amount, which takes longer when it is disturbed."""
        done, end = 0, time.perf_counter() + CALIBRATION_S
        while time.perf_counter() < end:
            self._left @ self._right
            done += 1
        self.products = max(1, round(done / CALIBRATION_S * seconds))

    def compute(self) -> None:
        for _ in range(self.products):
            self._left @ self._right

    def optimize(self) -> None:
        self.optimizer.step()
        self.step += 1


class Copies:
    """The machine's limit: a memcpy of the same state into warm memory."""

    def __init__(self, training: Training) -> None:
        self.sources = training.tensors()
        self.targets = [torch.empty_like(tensor, device="cpu").fill_(0) for tensor in self.sources]

    def __call__(self) -> None:
        for source, target in zip(self.sources, self.targets, strict=True):
            target.copy_(source)
