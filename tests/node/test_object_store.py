"""A bucket as storage under faults: lost answers, storms of errors, cut bodies, refusals."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from ckptd.cli import checks
from ckptd.config import Config
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.daemon.state import StateDir
from ckptd.daemon.storage import IDENTITIES, identities, open_storage
from ckptd.observe.health import Health
from ckptd.persist.commits import list_commits
from ckptd.persist.lineage import claim_epoch, newest_record
from ckptd.persist.names import DATA, KEEP, MANIFEST, epoch_dir, step_dir
from ckptd.persist.opening import find_checkpoints, verify
from ckptd.persist.preflight import check_tokens, probe, winners
from ckptd.persist.reader import Checkpoint
from ckptd.persist.retention import retain
from ckptd.persist.storage import object_file, object_service, object_store
from ckptd.persist.storage.base import AWAY, Sight, StorageError, read_file
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.object_store import ObjectStorage
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import JOB, check_all, epoch_record, save
from tests.node.commands import Cli
from tests.node.storage_conformance import (
    MAX_BYTES,
    ONE,
    OTHER,
    POINTER,
    TOP,
    begin,
    commit,
    committed,
    names,
    pattern,
    put,
)
from tests.node.test_persist_crash import tiny_world
from tests.object_server import Fault, Faults, FaultyServer, ObjectServer, Request

OLD, NEW = SnapshotId(1, 10), SnapshotId(1, 20)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second try comes at once."""
    monkeypatch.setattr(object_service, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(object_service, "RETRY_PAUSE_MAX_S", 0.002)


@pytest.fixture
def storage(bucket: str) -> ObjectStorage:
    return storage_at(bucket, create=True)


def on(wanted: Callable[[Request], bool], fault: Fault, times: int = 1) -> Faults:
    """The first so many requests that are wanted."""
    left = [times]

    def found(request: Request) -> Fault | None:
        if not wanted(request) or not left[0]:
            return None
        left[0] -= 1
        return fault

    return found


def of_pointer(request: Request) -> bool:
    return request.method == "PUT" and request.path.endswith(".pointer")


# --- answers that are lost, late or cut -----------------------------------------------------------------------------
LOST = [Fault(lost=True), Fault(status=500, done=True)]


@pytest.mark.parametrize("fault", LOST, ids=["lost", "late"])
def test_whoever_hears_nothing_finds_out_that_it_was_his(storage: ObjectStorage, objects: ObjectServer, fault: Fault) -> None:
    """P4, P12: the library sends it once more and is refused; or it gives up, and nobody knows."""
    begin(storage, ONE)
    with objects.failing(on(of_pointer, fault)):
        assert commit(storage, ONE)
    begin(storage, OTHER)
    with objects.failing(on(of_pointer, fault)):
        assert not commit(storage, OTHER), "it was another one's"
    for turn in (storage.hide, storage.reveal, storage.hide, storage.drop):
        with objects.failing(on(of_pointer, fault)):
            assert turn(POINTER)
    storage.discard(OTHER)
    assert storage.list(TOP) == []
    with objects.failing(on(lambda request: request.method == "PUT", fault)):
        assert storage.put_if_absent("name", b"mine")
    with objects.failing(on(lambda request: request.method == "PUT", fault)):
        assert not storage.put_if_absent("name", b"mine"), "of equal bytes, too"


BUSY, BROKEN, LATE = Fault(status=503, code="SlowDown"), Fault(status=500), Fault(status=500, done=True)
STORMS = [(BUSY, "fewer requests"), (BROKEN, "failed in itself"), (LATE, "failed in itself")]


@pytest.mark.parametrize(("fault", "hint"), STORMS, ids=["busy", "broken", "broken after it was carried out"])
def test_a_storm_of_errors_is_sat_out(storage: ObjectStorage, objects: ObjectServer, fault: Fault, hint: str) -> None:
    """Every other answer is one; a longer storm is an error with a hint, which preflight does not call a want of abilities."""
    with objects.failing(lambda request: fault if request.number % 2 else None):
        assert commit(storage, begin(storage, ONE))
        assert committed(storage) == f"manifest of {ONE}"
        assert storage.hide(POINTER) and storage.drop(POINTER)
        assert storage.put_if_absent("name", b"mine") and not storage.put_if_absent("name", b"mine")
    with objects.failing(lambda request: fault):
        for call in (lambda: storage.list(TOP), lambda: storage.open("name"), lambda: probe(storage)):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.errno == errno.EBUSY and hint in caught.value.hint, caught.value


def test_a_body_that_ends_early_is_no_data(storage: ObjectStorage, objects: ObjectServer) -> None:
    data = pattern(100_000)
    storage.put_if_absent("file", data)
    dest = bytearray(len(data))
    reads = lambda request: request.method == "GET" and request.path.endswith("file")  # noqa: E731
    with objects.failing(on(reads, Fault(cut=1000), times=1)):
        reader = storage.open("file")
        with suppress(StorageError):  # sent once more, or an error: never less than was asked for
            reader.read_into(0, memoryview(dest))
            assert dest == data
    with objects.failing(on(reads, Fault(cut=1000), times=1000)), pytest.raises(StorageError):
        storage.open("file").read_into(0, memoryview(dest))
    storage.open("file").read_into(0, memoryview(dest))
    assert dest == data


@pytest.fixture
def brief(bucket: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """One request may last 0.2 s, and is tried three times."""
    monkeypatch.setattr(object_service, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(object_service, "RETRIES_MAX", 2)
    return storage_at(bucket, create=True)


def of_file(request: Request) -> bool:
    return request.method == "GET" and request.path.endswith("file")


def test_a_body_that_comes_slowly_is_read(brief: ObjectStorage, objects: ObjectServer) -> None:
    """Within the time of a request; beyond it the rest is asked for, not the whole once more."""
    data, dest = pattern(100_000), bytearray(100_000)
    brief.put_if_absent("file", data)
    for pause_s in (0.02, 0.08):
        since = len(objects.requests)
        with objects.failing(on(of_file, Fault(slow_s=pause_s))):
            brief.open("file").read_into(0, memoryview(dest))
        asked = [request.sent for request in objects.requests[since:] if of_file(request)]
        assert dest == data and len(asked) == (1 if pause_s == 0.02 else 2) and sum(asked[1:]) < len(data), asked
        dest[:] = bytes(len(dest))


def test_a_body_that_stalls_is_asked_for_again_and_given_up_in_words(brief: ObjectStorage, objects: ObjectServer) -> None:
    """Each time before its first byte, or after some of it."""
    data, dest = pattern(100_000), bytearray(100_000)
    brief.put_if_absent("file", data)
    for fault, text, hint in (
        (Fault(slow_s=0.5), "does not answer", "AWS_ENDPOINT_URL"),
        (Fault(slow_s=0.15), "did not come whole", "network"),
    ):
        with objects.failing(on(of_file, fault)):
            brief.open("file").read_into(0, memoryview(dest))
        assert dest == data
        with objects.failing(on(of_file, fault, times=1000)), pytest.raises(StorageError, match=text) as caught:
            brief.open("file").read_into(0, memoryview(dest))
        assert caught.value.errno == AWAY and hint in caught.value.hint, caught.value


# --- uploads --------------------------------------------------------------------------------------------------------
def uploads(objects: ObjectServer, storage: ObjectStorage) -> list[str]:
    name = storage.root.removeprefix("s3://").partition("/")[0]
    return [item["Key"] for item in objects.client.list_multipart_uploads(Bucket=name).get("Uploads", ())]


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_file, "PART_BYTES", 5 << 20)


@pytest.mark.usefixtures("_small_parts")
def test_parts_are_summed_and_an_upload_that_is_given_up_leaves_nothing(storage: ObjectStorage, objects: ObjectServer) -> None:
    data = pattern(11 << 20)
    put(storage, f"{ONE}/file", data)
    assert read_file(storage, f"{ONE}/file", MAX_BYTES) == data
    name, _, prefix = storage.root.removeprefix("s3://").partition("/")
    told = objects.client.head_object(Bucket=name, Key=f"{prefix}/{ONE}/file", ChecksumMode="ENABLED")
    assert told["ETag"].strip('"').endswith("-3") and told.get("ChecksumSHA256"), told
    out = storage.put(f"{ONE}/other")
    out.write(data)
    out.abort()
    out.abort()
    assert uploads(objects, storage) == [] and names(storage, ONE) == ["file"]


def fails_for_good(storage: ObjectStorage, objects: FaultyServer, fails: Callable[[Request], bool], code: str) -> list[str]:
    """An upload of three parts of which some requests are refused. What is there of it afterwards."""
    out = storage.put(f"{ONE}/file")
    with objects.failing(on(fails, Fault(status=403, code=code), times=1000)):
        with suppress(StorageError):  # a part may be told of by the next write, or by the end
            out.write(pattern(11 << 20))
        with pytest.raises(StorageError):
            out.finish()
    with pytest.raises(StorageError):
        out.finish()
    out.abort()
    return [entry.name for entry in storage.list(ONE)]


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("which", ["partNumber=2", "uploadId"], ids=["a part", "the end"])
def test_an_upload_that_failed_is_final(storage: ObjectStorage, objects: ObjectServer, which: str) -> None:
    """P11: the file is not there, whatever is asked of it afterwards."""
    fails = lambda request: which in request.query and (which != "uploadId" or request.method == "POST")  # noqa: E731
    assert fails_for_good(storage, objects, fails, "AccessDenied") == []
    if which == "uploadId" or Version(version("obstore")) >= Version("0.12"):  # Python 3.10 takes an earlier one
        assert uploads(objects, storage) == []


# --- what the store refuses -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "code", "number", "hint"),
    [
        (403, "AccessDenied", errno.EACCES, "s3:PutObject"),
        (403, "InvalidAccessKeyId", errno.EACCES, "AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", errno.EACCES, "run out"),
        (403, "RequestTimeTooSkewed", errno.EACCES, "clock"),
        (404, "NoSuchBucket", AWAY, "make the bucket"),
        (429, "TooManyRequests", errno.EBUSY, "fewer requests"),
        (507, "XMinioStorageFull", errno.ENOSPC, "quota"),
        (501, "NotImplemented", errno.EOPNOTSUPP, "conditional PUT"),
    ],
)
def test_each_refusal_has_its_hint(
    bucket: str, objects: ObjectServer, status: int, code: str, number: int, hint: str
) -> None:
    assert refused(bucket, objects, status, code, hint) == {number}


def refused(bucket: str, objects: FaultyServer, status: int, code: str, hint: str) -> set[int]:
    """What each call is refused by that can tell why; all are, with this hint and the place."""
    storage = storage_at(bucket)
    calls: list[Callable[[], object]] = [
        lambda: storage.put_if_absent("file", b""), lambda: storage.list("a"), lambda: storage.open("file"),
        lambda: storage.hide(POINTER), lambda: put(storage, f"{ONE}/file", b"x"), lambda: storage.delete("file"),
    ]  # fmt: skip
    telling, found = 2 if status == 404 else 3, set()  # a HEAD's 404 may be either
    with objects.failing(lambda request: Fault(status=status, code=code)):
        for at, call in enumerate(calls):
            with pytest.raises(StorageError) as caught:
                call()
            if at < telling:
                found.add(caught.value.errno)
                assert hint in caught.value.hint and bucket in str(caught.value), caught.value
    return found


def test_a_bucket_that_disappears_is_away_and_back(storage: ObjectStorage, bucket: str, objects: ObjectServer) -> None:
    """P4: nothing is taken for an empty storage, or for another one."""
    storage.put_if_absent("file", b"here")
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    marker = f"{prefix}/{object_store.MARKER}"
    kept = objects.client.get_object(Bucket=name, Key=marker)["Body"].read()
    for instead in (None, b"another one"):
        objects.client.delete_object(Bucket=name, Key=marker)
        if instead is not None:
            objects.client.put_object(Bucket=name, Key=marker, Body=instead)
        for call in (lambda: storage.list("none"), lambda: storage.open("none"), lambda: commit(storage, ONE)):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.errno == AWAY and caught.value.hint, caught.value
    objects.client.put_object(Bucket=name, Key=marker, Body=kept)
    assert storage.list("none") == [] and read_file(storage, "file", 10) == b"here"
    again = storage_at(bucket, create=False, marked=True, identity=storage.identity)
    assert again.list("none") == [] and again.identity == storage.identity != ""


def test_a_bucket_that_was_never_there(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket") as caught:
        storage_at("s3://no-such-bucket/x", create=True)
    assert caught.value.errno == AWAY
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens there
    with pytest.raises(StorageError, match="does not answer") as caught:
        storage_at(bucket, create=True)
    assert caught.value.errno == AWAY and "AWS_ENDPOINT_URL" in caught.value.hint
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="no credentials") as caught:
        storage_at(bucket, create=True)
    assert caught.value.errno == errno.EACCES and "AWS_ACCESS_KEY_ID" in caught.value.hint


# --- before a job relies on it --------------------------------------------------------------------------------------
def test_a_store_that_ignores_conditions_is_refused(storage: ObjectStorage, objects: ObjectServer, bucket: str) -> None:
    """P12: each start of a job would believe that it is the newest, and a late commit would replace an earlier one."""
    assert probe(storage) > 0 and winners(storage) == 1
    assert objects.keys(bucket) == [object_store.MARKER], "the probe leaves nothing"
    with objects.failing(lambda request: Fault(blind=True)), pytest.raises(CkptdError, match="second writer take a name") as caught:
        probe(storage)
    assert "conditional PUT" in caught.value.hint
    with objects.failing(lambda request: Fault(blind=True)):
        assert winners(storage) > 1


def denied(request: Request) -> Fault:
    return Fault(status=403, code="AccessDenied")


def unlisted(request: Request) -> Fault | None:
    return Fault(late=True) if "list-type" in request.query else None


@pytest.mark.parametrize(
    ("faults", "text", "hint"),
    [
        (denied, "put: AccessDenied", "s3:PutObject"),
        (lambda request: denied(request) if request.method == "PUT" else None, "put: AccessDenied", "s3:PutObject"),
        (lambda request: denied(request) if "list-type" in request.query else None, "list: AccessDenied", "s3:ListBucket"),
        (lambda request: denied(request) if request.method == "POST" else None, "delete: AccessDenied", "s3:DeleteObject"),
        (unlisted, "what was put is not listed", "lists at once"),
    ],
    ids=["everything", "puts", "lists", "deletes", "lists late"],
)
def test_what_a_bucket_refuses_is_said_before_a_job_relies_on_it(
    bucket: str, objects: ObjectServer, tmp_path: Path, faults: Faults, text: str, hint: str
) -> None:
    """By preflight, and by a daemon that begins; one that comes back to its memory goes on, and health says it."""
    settings = Config(storage_root=bucket, state_dir=tmp_path / "state", plain_loopback=True)
    state, health = StateDir(settings.state_dir), Health()
    with objects.failing(faults):
        for call in (lambda: checks.storage(settings), lambda: open_storage(bucket, "n0", Health(), state, fresh=True)):
            with pytest.raises(CkptdError, match=text) as caught:
                call()
            assert hint in caught.value.hint and bucket in caught.value.where, caught.value
        assert open_storage(bucket, "n0", health, state, fresh=False)[1] == ""
    assert [text in problem.text and hint in problem.text for problem in health.problems()] == [True]


def test_the_daemon_and_the_commands_take_a_bucket(
    bucket: str, objects: ObjectServer, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15: its identity is kept, another one in its place is refused, the commands read it, and preflight says what it found."""
    state = StateDir(tmp_path / "state")
    storage, token = open_storage(bucket, "n0", Health(), state, fresh=True)
    assert storage is not None and check_tokens(storage, {"n0": token, "n1": "elsewhere"}) == ["n1"]
    assert identities(state.path) == {bucket: storage.identity}
    settings = Config(storage_root=f"{bucket}/", state_dir=state.path, plain_loopback=True)
    assert settings.storage_root == bucket
    said = checks.storage(settings)
    assert said.ok and "conditional PUT are fine" in said.text, said
    ahead_s = ObjectStorage.clock_s
    monkeypatch.setattr(ObjectStorage, "clock_s", lambda self, path: ahead_s(self, path) + 1000)
    said = checks.storage(settings)
    assert said.ok is False and "chrony" in said.hint, said
    save(storage, tiny_world(1), OLD)
    (row,) = json.loads(cli("ls", bucket, "--json").out)["rows"]
    assert (row["job"], row["step"], row["durable"]) == (JOB, 10, True)
    assert "its files are below s3://" in cli("verify", bucket).out
    assert cli("verify", f"{bucket}/none").code == 1
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    objects.client.put_object(Bucket=name, Key=f"{prefix}/{object_store.MARKER}", Body=b"another")
    with pytest.raises(CkptdError, match="another storage stands in the place") as caught:
        open_storage(bucket, "n0", Health(), state, fresh=True)
    assert str(state.path / IDENTITIES) in caught.value.hint


def test_a_restore_lists_nothing(storage: ObjectStorage, objects: ObjectServer) -> None:
    save(storage, world := tiny_world(1), OLD)
    fresh = ObjectStorage(storage.root)
    objects.requests.clear()
    with Checkpoint.at(fresh, step_dir(JOB, OLD)) as checkpoint:
        check_all(checkpoint, world)
    assert objects.requests and not [request for request in objects.requests if "list-type" in request.query]


def test_stock_readers_find_one_attempt_and_nothing_else(storage: ObjectStorage, bucket: str, objects: ObjectServer) -> None:
    """Its own prefix has the files of this attempt alone, under their names; `locate` says where that is."""
    save(storage, tiny_world(1), OLD, "lost")
    storage.hide(step_dir(JOB, OLD))
    storage.drop(step_dir(JOB, OLD))
    begin(storage, f"{step_dir(JOB, OLD)}.other.part")
    save(storage, tiny_world(1), OLD, "a1")
    place = storage.locate(step_dir(JOB, OLD)).removeprefix(f"{bucket}/")
    assert place == f"{step_dir(JOB, OLD)}.a1.part"
    found = [key.removeprefix(f"{place}/") for key in objects.keys(bucket) if key.startswith(f"{place}/")]
    assert {MANIFEST, "index.columns"} < set(found) and all(name.count(".") for name in found)
    assert sum(name.endswith(DATA) for name in found) == len([name for name in names(storage, step_dir(JOB, OLD)) if DATA in name])
    pointer = f"{bucket}/{step_dir(JOB, OLD)}"
    assert find_checkpoints(bucket) == find_checkpoints(pointer) == find_checkpoints(f"{bucket}/{JOB}") == [pointer]
    assert verify(pointer).ok and find_checkpoints(f"{bucket}/none") == []
    assert verify(pointer).place == storage.locate(step_dir(JOB, OLD)) == f"{bucket}/{place}"


# --- two at once, and a whole life ---------------------------------------------------------------------------------
def test_a_late_discard_meets_a_commit_and_leaves_it_alone(storage: ObjectStorage) -> None:
    """P12: of two who decide on one attempt at once one wins, and the other one sees that."""
    commit(storage, begin(storage, ONE))
    storage.discard(ONE)
    assert committed(storage) == f"manifest of {ONE}"
    storage.hide(POINTER)
    storage.discard(ONE)
    assert storage.reveal(POINTER) and committed(storage) == f"manifest of {ONE}"


def test_a_commit_whose_files_went_meanwhile_is_none(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A committer stood still while another attempt was committed, this one discarded, and the other one deleted again."""
    begin(storage, ONE)
    look = ObjectStorage._look

    def late(self: ObjectStorage, pointer: str) -> object:
        found = look(self, pointer)
        monkeypatch.setattr(ObjectStorage, "_look", look)
        other = ObjectStorage(storage.root)
        commit(other, begin(other, OTHER))
        other.discard(ONE)
        assert other.hide(POINTER) and other.drop(POINTER)
        return found

    monkeypatch.setattr(ObjectStorage, "_look", late)
    with pytest.raises(StorageError):
        commit(storage, ONE)
    assert [pointer.sight for pointer in storage.pointers(TOP)] == [Sight.DROPPED]


def test_a_job_lives_in_a_bucket(storage: ObjectStorage) -> None:
    """P12: claims, commits, marks and retention, as anywhere else."""
    assert claim_epoch(storage, JOB, epoch_record(1, 2)) == (True, 1)
    assert claim_epoch(storage, JOB, epoch_record(1, 2, nonce="another"))[0] is False
    assert newest_record(storage, JOB) == epoch_record(1, 2)
    for step in (10, 20):
        save(storage, tiny_world(step), SnapshotId(1, step), keep=step == 10)
    assert {info.snapshot.step: info.keep for info in list_commits(storage, JOB)} == {10: True, 20: False}
    assert retain(storage, JOB, Policy(keep_last=1), grace_s=0).deleted == []
    assert storage.unmark(step_dir(JOB, OLD), KEEP)
    done = retain(storage, JOB, Policy(keep_last=1), grace_s=0)
    assert [snapshot.step for snapshot in done.hidden] == [10] and len(done.deleted) == 1
    assert names(storage, epoch_dir(JOB, 1)) == ["step-0000000020"]
    assert verify_at(storage, step_dir(JOB, NEW)).ok


def test_commands_take_a_bucket_where_they_take_a_directory(
    storage: ObjectStorage, bucket: str, cli: Cli, tmp_path: Path
) -> None:
    world = tiny_world(1)
    for snapshot in (OLD, NEW):
        save(storage, world, snapshot)
    assert storage.hide(step_dir(JOB, OLD))
    old, new = (f"{bucket}/{step_dir(JOB, snapshot)}" for snapshot in (OLD, NEW))
    (key, *_), found = world.values.keys(), cli("ls", "--tensors", "*", new, "--json")
    assert key[0] in {row["key"] for row in json.loads(found.out)["tensors"]}
    assert cli("diff", new, new, "--json").code == 0
    assert "no checkpoint" in cli("diff", new, old).err, "readers do not see what is hidden"
    assert [row["kind"] for row in json.loads(cli("gc", bucket, "--dry-run", "--json").out)["left"]]
    assert cli("gc", bucket).code == 0 and storage.reveal(step_dir(JOB, OLD)), "what is hidden is not gc's"
    (tmp_path / "here").mkdir()
    assert cli("export", new, str(tmp_path / "here/all.pt"), "--to", "torch", "--only", key[0]).code == 0
    assert "not a bucket" in cli("export", new, f"{bucket}/all.pt", "--to", "torch").err


def test_what_is_imported_may_go_into_a_bucket(bucket: str, cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.arange(6.0)}}, tmp_path / "old.pt")
    ran = cli("import", str(tmp_path / "old.pt"), "--from", "torch", "--job", "new", "--storage-root", bucket, "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    shown = cli("ls", "--tensors", "*", f"{bucket}/{report['job']}/epoch-000001/step-{report['step']:010}", "--json")
    assert [row["key"] for row in json.loads(shown.out)["tensors"]] == ["model.weight"]
    assert cli("import", str(tmp_path / "old.pt"), "--from", "torch", "--job", "new", "--storage-root", bucket).code != 0
