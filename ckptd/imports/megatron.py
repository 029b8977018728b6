"""Megatron-Core's `torch_dist` checkpoints: files of torch.distributed.checkpoint beside a common.pt and a metadata.json."""

from __future__ import annotations

import json
from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.imports import dcp, torch_file
from ckptd.imports.dcp import Plans

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = "iteration"
RELEASE = "release"  # in the tracker, of weights that no training wrote


def load(path: str, foreign: set[str]) -> tuple[Plans, int]:
    """(what was saved, the step that it says). common.pt is one of its objects, as the adapter keeps it. Raises CkptdError."""
    from ckptd_client.integrations.dcp_names import COMMON, COMMON_FILE

    folder = _folder(Path(path))
    plans = dcp.load_plans(str(folder), foreign)
    common = folder / COMMON_FILE
    if not common.is_file():
        raise CkptdError("torn: no common.pt", where=str(folder), hint="take another copy of it, or an older one")
    said = torch_file.load(str(common), foreign)
    plans.objects[COMMON] = common.read_bytes()
    step = said.get(ITERATION) if isinstance(said, dict) else None
    return plans, step if type(step) is int and step >= 0 else 0


def _folder(path: Path) -> Path:
    """The checkpoint itself, or of a folder of several the one that its tracker names."""
    from ckptd_client.integrations.dcp_names import BACKEND, CONFIG_FILE

    tracker = path / TRACKER
    if tracker.is_file():
        newest = tracker.read_text(errors="replace").strip()
        path = path / (newest if newest == RELEASE else f"iter_{int(newest) if newest.isdecimal() else 0:07d}")
    try:
        said = json.loads((path / CONFIG_FILE).read_bytes())
        backend = said["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "name the folder that metadata.json lies in: .../iter_0001000"
        text = "torn, or no distributed checkpoint of Megatron-Core: no metadata.json of one"
        raise CkptdError(text, where=str(path), hint=hint) from error
    if backend != BACKEND:
        hint = f"load it with Megatron, and save it again with --ckpt-format {BACKEND}"
        raise CkptdError(f"its tensors lie there as {backend!r}", where=str(path), hint=hint)
    return path
