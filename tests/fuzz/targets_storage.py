"""What lies on storage and in a node's own files: manifests, claims, reports, side files, names, state, settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any

import msgpack

from ckptd.cli.page import _address as announced_address
from ckptd.config_sources import load
from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.daemon import ports
from ckptd.daemon.state import StateDir
from ckptd.identity import NODE_ID_FILE, kept_node_id
from ckptd.persist import lineage, manifest_file, names
from ckptd.persist import report as r
from ckptd.persist.manifest_file import decode
from ckptd.persist.preflight import TOKEN_BYTES_MAX, read_token
from ckptd.persist.side import check_side
from ckptd.persist.storage.base import read_file
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.persist.sums import digest
from ckptd.persist.verify import verify_at
from ckptd.units import parse_budget, parse_bytes
from tests.fuzz.files import folder
from tests.fuzz.target import Target
from tests.node.checkpoints import DEFAULT, JOB, commit_all, epoch_record, make_world, write_all

CHECKPOINT = names.step_dir(JOB, DEFAULT)
SCRATCH_BYTES = 64 << 20  # buffers of a verifying reader


# --- a checkpoint -----------------------------------------------------------------------------------------------
@cache
def checkpoint() -> tuple[dict[str, bytes], tuple[bytes, ...]]:
    """The files of a small committed one, by name, and the reports of its writers."""
    items = {
        rank: [
            LayoutItem("w", "F32", (8, 4), Box((4 * rank, 0), (4, 4)), "param", UNIQUE, 1),
            LayoutItem("mean", "F64", (3,), Box.whole((3,)), "buffer", MAYBE, 1),
        ]
        for rank in range(2)
    }
    world = make_world(items, per_rank=frozenset({"t:mean"}), aliases=[("head", "w")])
    storage = MemoryStorage()
    reports = write_all(storage, world, DEFAULT, "a1")
    commit_all(storage, world, DEFAULT, reports)
    files = {e.name: read_file(storage, f"{CHECKPOINT}/{e.name}", 1 << 20) for e in storage.list(CHECKPOINT)}
    return files, tuple(reports)


def _verify(data: bytes) -> None:
    """All files of a checkpoint as one map. Whatever differs from what was committed is found."""
    try:
        files = msgpack.unpackb(data)
        if not all(type(k) is str and type(v) is bytes for k, v in files.items()):
            raise ValueError
        for name in files:
            names.check_attempt(name.replace(".", "_"))
    except (ValueError, TypeError, AttributeError, CkptdError, msgpack.UnpackException):
        raise CkptdError("no directory is like this") from None
    storage = MemoryStorage()
    for name, content in files.items():
        storage.put_if_absent(name, content)
    report = verify_at(storage, "")
    kept = {n: c for n, c in files.items() if n != names.KEEP}
    wanted = {n: c for n, c in checkpoint()[0].items() if n != names.KEEP}
    if report.ok:
        assert {n: kept.get(n) for n in wanted} == wanted, "damage was not found"


# --- the commit record ------------------------------------------------------------------------------------------
def _manifest(data: bytes) -> bytes:
    found = decode(data, lambda: checkpoint()[0][names.INDEX], "manifest")
    return manifest_file.encode(found)[names.MANIFEST]


def _indexes() -> list[bytes]:
    return [checkpoint()[0][names.INDEX]]


def _manifests() -> list[bytes]:
    return [checkpoint()[0][names.MANIFEST]]


def _sealed(data: bytes) -> bytes:
    """With the right sum, as a writer gone wrong would make it."""
    found = manifest_file._SUM.search(data, 0, manifest_file._SUM_WITHIN_BYTES)
    if found is None:
        return data
    blank = data[: found.start(1)] + manifest_file._NO_SUM + data[found.end(1) :]
    return data[: found.start(1)] + digest(blank).hex().encode() + data[found.end(1) :]


def _sealed_manifest(data: bytes) -> bytes:
    """What readers compute with is within bounds."""
    return _forged(_sealed(data), checkpoint()[0][names.INDEX])


def _sealed_index(data: bytes) -> bytes:
    """Any columns, with the right sums, under the places that the manifest tells."""
    tree = json.loads(checkpoint()[0][names.MANIFEST])
    tree["index"] |= {"size": len(data), "sum": digest(data).hex()}
    return _forged(_sealed(json.dumps(tree, separators=(",", ":")).encode() + b"\n"), data)


def _forged(data: bytes, index: bytes) -> bytes:
    found = decode(data, lambda: index, "manifest")
    files = {**checkpoint()[0], names.MANIFEST: data, names.INDEX: index}
    storage = MemoryStorage()
    for name, content in files.items():
        storage.put_if_absent(name, content)
    verify_at(storage, "")
    return manifest_file.encode(found)[names.MANIFEST]


# --- claims of epochs -------------------------------------------------------------------------------------------
def _claim_files() -> list[bytes]:
    return [lineage._encode(epoch_record(n, 2, [DEFAULT])) for n in (1, 2)]


def _claim(data: bytes) -> Any:
    storage = MemoryStorage()
    storage.begin(names.epochs_dir(JOB))
    storage.put_if_absent(names.record_path(JOB, 1), data)
    return lineage.newest_record(storage, JOB)


def _claim_bodies() -> list[bytes]:
    return [data.partition(b'"claim":')[2][:-2] for data in _claim_files()]


def _sealed_claim(body: bytes) -> Any:
    return _claim(b'{"xxh3_128":"' + digest(body).hex().encode() + b'","claim":' + body + b"}\n")


# --- beside them ------------------------------------------------------------------------------------------------
def _sides() -> list[bytes]:
    return [data for name, data in checkpoint()[0].items() if name.endswith(names.SIDE)]


def _side(data: bytes) -> bytes:
    storage = MemoryStorage()
    storage.put_if_absent("side", data)
    with_sum = _sides()[0][-16:]
    reader = storage.open("side")
    try:
        check_side(reader, with_sum, "side")
    finally:
        reader.close()
    return data


def _name(data: bytes) -> tuple[str, int]:
    """Directory and file names that readers take for ours: each is the very one that we would write."""
    name = data.decode("utf-8", "replace")
    for kind, number, again in (
        ("epoch", names.epoch_of_dir(name), lambda n: names.epoch_dir(JOB, n)),
        ("record", names.epoch_of_record(name), lambda n: names.record_path(JOB, n)),
        ("step", names.step_of_dir(name), lambda n: names.step_dir(JOB, type(DEFAULT)(1, n))),
    ):
        if number is not None:
            assert again(number).rpartition("/")[2] == name, f"{name!r} is no {kind} of ours"
            return kind, number
    assert name.isascii() or not (names.is_attempt(name)), name
    raise ValueError("none of ours")


def _job(data: bytes) -> str:
    job = names.check_job(data.decode("utf-8", "replace"))
    assert job.isascii(), job
    return job


def _token(data: bytes) -> str | None:
    storage = MemoryStorage()
    storage.begin("preflight/tokens")
    storage.put_if_absent("preflight/tokens/n0", data[: TOKEN_BYTES_MAX + 9])
    return read_token(storage, "n0")


# --- a node's own files -----------------------------------------------------------------------------------------
def _state_files() -> list[bytes]:
    record = asdict(epoch_record(3, 2, [DEFAULT]))
    return [json.dumps({"job": JOB, "record": record, "ran": ran}).encode() for ran in (None, record)]


@cache
def state() -> StateDir:
    return StateDir(folder() / "state")


def _state(data: bytes) -> Any:
    (state().path / "epochs" / "j.json").write_bytes(data)
    return state().jobs()


def _ports(data: bytes) -> ports.Ports:
    (state().path / ports.FILE).write_bytes(data)
    found = ports.kept(state(), "n0", "127.0.0.1")
    assert 0 <= found.control < 1 << 16 and 0 <= found.bulk < 1 << 16, found
    return found


def _node_id(data: bytes) -> str:
    (folder() / NODE_ID_FILE).write_bytes(data)
    found = kept_node_id(folder())
    assert 0 < len(found) <= 100 and found.isascii() and found.isprintable() and "/" not in found, found
    return found


def _announcement(data: bytes) -> tuple[str, int]:
    file = folder() / "http"
    file.write_bytes(data)
    host, port = announced_address(file)
    assert 0 <= port < 1 << 16
    return host, port


def _settings(data: bytes) -> Any:
    file = folder() / "ckptd.toml"
    file.write_bytes(data)
    return load(file, {"bind_address": "127.0.0.1"}, environ={}).config


def _size(data: bytes) -> int:
    text = data.decode("utf-8", "replace")
    found = parse_budget(text, 1 << 40)
    assert found >= 0
    return found if text.rstrip().endswith("%") else parse_bytes(text)


SETTINGS = b'node_id = "n0"\nmemory_budget = "70%"\nreplicas = 2\njob_linger_s = 1.5\nplain_loopback = true\nsocket_mode = 438\n'

TARGETS = [
    Target(
        "checkpoint", _verify, lambda: [msgpack.packb(checkpoint()[0])], (CkptdError,), "msgpack",
        allocated_max=SCRATCH_BYTES,
    ),
    Target("manifest", _manifest, _manifests, (CkptdError,), "json", bytes, summed=True),
    Target("manifest-forged", _sealed_manifest, _manifests, (CkptdError,), "json", allocated_max=SCRATCH_BYTES),
    Target("index-forged", _sealed_index, _indexes, (CkptdError,), allocated_max=SCRATCH_BYTES),
    Target("epoch-claim", _claim, _claim_files, (CkptdError,), "json", lineage._encode, summed=True),
    Target("epoch-claim-forged", _sealed_claim, _claim_bodies, (CkptdError,), "json"),
    Target("report", r.decode, lambda: list(checkpoint()[1]), (CkptdError,), "msgpack", r.encode),
    Target("side-file", _side, lambda: _sides()[:1], (CkptdError,), summed=True, allocated_max=SCRATCH_BYTES),
    Target("storage-name", _name, lambda: [b"epoch-000012", b"epoch-1234567.json", b"step-0000000010"], (ValueError,), "text"),
    Target("job-key", _job, lambda: [b"1000/gpt", b"0/a.b-c_d"], (CkptdError,), "text", str.encode, exact=True),
    Target("storage-token", _token, lambda: [b"0" * 32], (CkptdError,), "text"),
    Target("state-file", _state, _state_files, (CkptdError,), "json"),
    Target("ports-file", _ports, lambda: [b'{"control":20000,"bulk":20001}'], (), "json"),
    Target("node-id", _node_id, lambda: [b"host-1f2e3d\n", b"n0"], (CkptdError,), "text"),
    Target("page-address", _announcement, lambda: [b"127.0.0.1:8080\n"], (CkptdError,), "text"),
    Target("settings", _settings, lambda: [SETTINGS], (CkptdError,), "text", allocated_max=16 << 20),
    Target("size", _size, lambda: [b"70%", b"16GiB", b"1.5 TB", b"1048576"], (ValueError,), "text"),
]  # fmt: skip
