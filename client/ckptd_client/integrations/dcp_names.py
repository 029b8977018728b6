"""What the adapters of torch.distributed.checkpoint and of Megatron-Core save beside what a plan names: objects of bytes."""

from __future__ import annotations

PREFIX = "_dcp."
PLANNER_DATA = f"{PREFIX}planner_data"  # of the metadata, encoded as other objects are
COMMON = f"{PREFIX}common.pt"  # Megatron's file of that name
