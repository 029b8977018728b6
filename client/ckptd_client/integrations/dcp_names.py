"""What the adapters of torch.distributed.checkpoint and of Megatron-Core save beside what a plan names: objects of bytes. And the
files that Megatron-Core writes beside torch's."""

from __future__ import annotations

PREFIX = "_dcp."
PLANNER_DATA = f"{PREFIX}planner_data"  # of the metadata, encoded as other objects are
COMMON_FILE, CONFIG_FILE = "common.pt", "metadata.json"
BACKEND = "torch_dist"  # as the second says
COMMON = f"{PREFIX}{COMMON_FILE}"
