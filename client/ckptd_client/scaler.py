"""torch.amp.GradScaler without its ``.item()``: state_dict() would wait for the device (design D6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScalerState:
    """The state as tensors that are copied like any other; loading is the scaler's own."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler: Any = self.scaler
        if not scaler.is_enabled():
            return {}
        scale, tracker = scaler._scale, scaler._growth_tracker
        return {
            "scale": scaler._init_scale if scale is None else scale,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
        if plain:
            self.scaler.load_state_dict(plain)
