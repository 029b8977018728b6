"""torchft over ckptd: ``Manager(..., checkpoint_transport=CkptdTransport(client))``.

Each replica group is a job of its own, ``Client.connect(job=f"run.{group}")`` on each of its ranks. A group that others are to be
healed from saves its step into its node's memory, and trains on; who is behind reads it from there, wherever he is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchft.checkpointing.transport import CheckpointTransport

from ckptd.core.errors import CkptdError
from ckptd_client import tree
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.reader import Reading, open_job

AGAIN_S = 0.05  # until the sender has saved
LOCAL = "local part of a DTensor"  # a key
NAME = "state of rank {}"


class CkptdTransport(CheckpointTransport[Any]):
    """``state_dict``: what this rank has of what is handed over, where there are DTensors in it: one that comes is laid out as the
    one in its place (``lambda: manager._manager_state_dict()``). ``level``: "sealed", this node's memory; "protected" where the
    sender's node may die before all have read."""

    def __init__(self, client: Client, state_dict: Callable[[], Any] | None = None, *, level: str = "sealed") -> None:
        self._client, self._state_dict, self._level = client, state_dict, level
        self._rank = int(os.environ.get("RANK", "0"))  # in the replica group: its counterpart is of the same rank
        self._sent = -1

    def metadata(self) -> str:
        """Raises CkptdError: no daemon."""
        node = self._client.node
        if node is None:
            raise CkptdError("no daemon has been heard of", where=self._client.job, hint="start `ckptd run` on this node")
        return json.dumps({"job": self._client.job, "nodes": [node]})

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """All ranks of the replica group. Raises CkptdError when the step is not saved in time, TypeError naming what is no plain
        value and no tensor."""
        if step == self._sent:
            return  # others are behind as well
        boxes: list[Box] = []

        def take(path: str, tensor: Tensor) -> str:
            boxes.append(Box(f"{self._rank}/{len(boxes)}", tensor.detach(), tensor.shape, (0,) * tensor.ndim, role="extra"))
            return boxes[-1].key

        plain = tree_map_only(DTensor, lambda value: {LOCAL: value.to_local()}, state_dict)
        blob = Blob(NAME.format(self._rank), tree.encode(plain, "state", take))
        with self._client.saving(step, self._level, timeout=timeout.total_seconds()) as save:
            save.add(*boxes, blob)
        self._sent = step

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Raises TimeoutError: the sender has not saved that step in time."""
        limit_s, said, pause = timeout.total_seconds(), json.loads(metadata), threading.Event()
        deadline = time.monotonic() + limit_s
        path, job, nodes = self._client._session.link.path, said["job"], said["nodes"]
        while True:
            try:
                left_s = max(AGAIN_S, deadline - time.monotonic())
                with open_job(job, step, socket=path, nodes=nodes, timeout_s=left_s) as found:
                    state = self._read(found)
                    break
            except CkptdError as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"timed out after {limit_s:g} s: {error}") from error
            pause.wait(AGAIN_S)
        return self._laid_out(state, self._state_dict() if self._state_dict is not None else None)

    def _read(self, found: Reading) -> Any:
        made: dict[str, Tensor] = {}

        def find(key: str) -> Tensor:
            dtype, shape = found.tensors[key]
            return made.setdefault(key, torch.empty(shape, dtype=dtype))

        state = tree.decode(found[NAME.format(self._rank)], find)
        found.read((key, (0,) * part.ndim, part.shape, part) for key, part in made.items())
        return state

    def _laid_out(self, value: Any, like: Any) -> Any:
        """DTensors again. ``like``: what is in the same place here."""
        if isinstance(value, dict) and LOCAL in value:
            if not isinstance(like, DTensor):
                raise CkptdError("a DTensor was sent", where=self._client.job, hint="CkptdTransport(client, state_dict=...)")
            made: Any = DTensor
            return made(value[LOCAL].to(like.device), like._spec, requires_grad=False)
        if isinstance(value, dict):
            return type(value)((key, self._laid_out(one, _at(like, key))) for key, one in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._laid_out(one, _at(like, number)) for number, one in enumerate(value))
        return value


def _at(like: Any, key: Any) -> Any:
    try:
        return like[key]
    except (TypeError, LookupError):
        return None


__all__ = ["CkptdTransport"]
