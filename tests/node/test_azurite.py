"""A container of Azure Blob Storage as storage, by Azurite, with faults in between: all that is asked of a bucket of S3."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from azure.storage.blob import generate_container_sas

from ckptd.cli import checks
from ckptd.config import Config
from ckptd.core.errors import CkptdError
from ckptd.daemon.state import StateDir
from ckptd.daemon.storage import open_storage
from ckptd.observe.health import Health
from ckptd.persist.names import MANIFEST, step_dir
from ckptd.persist.opening import find_checkpoints, verify
from ckptd.persist.preflight import probe, winners
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage import object_store
from ckptd.persist.storage.base import AWAY, NotFound, StorageError, read_file
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.object_store import ObjectStorage
from tests.azurite_server import ACCOUNT, KEY, AzuriteServer, why_not
from tests.node import test_object_deaths as deaths
from tests.node import test_object_store as moto
from tests.node.checkpoints import JOB, check_all, save
from tests.node.storage_conformance import MAX_BYTES, ONE, StorageConformance, commit, pattern, put
from tests.node.test_persist_crash import tiny_world
from tests.object_server import Fault, Request

pytestmark = pytest.mark.chaos  # a process that npm installs


@pytest.fixture(scope="module")
def objects() -> Iterator[AzuriteServer]:
    """In the place of moto's server."""
    if reason := why_not():
        pytest.skip(reason)
    server = AzuriteServer()
    yield server
    server.close()


soon, storage, _small_parts, brief, place = moto.soon, moto.storage, moto._small_parts, moto.brief, deaths.place


class TestAzurite(StorageConformance):
    @pytest.fixture
    def storage(self, bucket: str) -> ObjectStorage:
        return storage_at(bucket, create=True)


# --- what is asked of S3 as well ------------------------------------------------------------------------------------
test_whoever_hears_nothing_finds_out_that_it_was_his = moto.test_whoever_hears_nothing_finds_out_that_it_was_his
test_a_storm_of_errors_is_sat_out = moto.test_a_storm_of_errors_is_sat_out
test_a_body_that_ends_early_is_no_data = moto.test_a_body_that_ends_early_is_no_data
test_a_body_that_comes_slowly_is_read = moto.test_a_body_that_comes_slowly_is_read
test_stock_readers_find_one_attempt_and_nothing_else = moto.test_stock_readers_find_one_attempt_and_nothing_else
test_a_late_discard_meets_a_commit_and_leaves_it_alone = moto.test_a_late_discard_meets_a_commit_and_leaves_it_alone
test_a_commit_whose_files_went_meanwhile_is_none = moto.test_a_commit_whose_files_went_meanwhile_is_none
test_a_job_lives_in_a_bucket = moto.test_a_job_lives_in_a_bucket
test_commands_take_a_bucket_where_they_take_a_directory = moto.test_commands_take_a_bucket_where_they_take_a_directory
test_what_is_imported_may_go_into_a_bucket = moto.test_what_is_imported_may_go_into_a_bucket
test_a_death_at_every_request_leaves_old_or_new = deaths.test_a_death_at_every_request_leaves_old_or_new
test_a_death_in_retention_never_takes_the_last = deaths.test_a_death_in_retention_never_takes_the_last
test_whoever_dies_in_a_commit_leaves_all_of_it_or_nothing = deaths.test_whoever_dies_in_a_commit_leaves_all_of_it_or_nothing
test_whoever_dies_in_deleting_is_made_up_for = deaths.test_whoever_dies_in_deleting_is_made_up_for


# --- uploads --------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("_small_parts")
def test_an_upload_shows_at_its_end_and_leaves_nothing_when_it_is_given_up(storage: ObjectStorage, objects: AzuriteServer) -> None:
    """Its blocks are nobody's until then, and Azure forgets them after a week."""
    out = storage.put(f"{ONE}/file")
    out.write(pattern(11 << 20))
    assert storage.list(ONE) == [], "two of its blocks are there already"
    with pytest.raises(NotFound):
        storage.open(f"{ONE}/file")
    out.abort()
    assert storage.list(ONE) == []
    put(storage, f"{ONE}/file", pattern(11 << 20))
    assert objects.blob(storage.root, f"{ONE}/file").download_blob().readall() == pattern(11 << 20)
    assert read_file(storage, f"{ONE}/file", MAX_BYTES) == pattern(11 << 20)


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("which", ["comp=block&", "comp=blocklist"], ids=["a part", "the end"])
def test_an_upload_that_failed_is_final(storage: ObjectStorage, objects: AzuriteServer, which: str) -> None:
    """P11: the file is not there, whatever is asked of it afterwards."""
    fails = lambda request: which in f"{request.query}&" and request.method == "PUT"  # noqa: E731
    assert moto.fails_for_good(storage, objects, fails, "AuthorizationPermissionMismatch") == []


def test_what_is_gone_already_stops_no_delete(storage: ObjectStorage) -> None:
    """Azure deletes 256 blobs with one request, and none of the next ones where one is not there."""
    there = [f"a/{number:03}" for number in range(0, 300, 7)]
    for path in there:
        storage.put_if_absent(path, b"")
    storage._delete([f"a/{number:03}" for number in range(300)], "a")
    assert storage.list("a") == []


# --- what it refuses ------------------------------------------------------------------------------------------------
REFUSALS = [
    (403, "AuthenticationFailed", errno.EACCES, "AZURE_STORAGE_ACCOUNT_KEY"),
    (403, "AuthorizationFailure", errno.EACCES, "firewall"),
    (403, "AuthorizationPermissionMismatch", errno.EACCES, "Storage Blob Data Contributor"),
    (404, "ContainerNotFound", AWAY, "make the container"),
    (503, "ServerBusy", errno.EBUSY, "fewer requests"),
    (500, "OperationTimedOut", errno.EBUSY, "failed in itself"),
    (501, "NotImplemented", errno.EOPNOTSUPP, "conditional PUT"),
]


@pytest.mark.parametrize(("status", "code", "number", "hint"), REFUSALS)
def test_each_refusal_has_its_hint(
    bucket: str, objects: AzuriteServer, status: int, code: str, number: int, hint: str
) -> None:
    assert moto.refused(bucket, objects, status, code, hint) == {number}


def test_a_container_that_was_never_there_and_an_account_that_nobody_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="ContainerNotFound: The specified container does not exist") as caught:
        storage_at("az://no-such-container/x", create=True)
    assert caught.value.errno == AWAY and "RequestId" not in str(caught.value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IGl0cyBrZXk=")
    with pytest.raises(StorageError, match="AuthorizationFailure") as caught:
        storage_at(bucket, create=True)
    assert caught.value.errno == errno.EACCES and "AZURE_STORAGE_ACCOUNT_KEY" in caught.value.hint
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/account")  # discard: nobody listens there
    with pytest.raises(StorageError, match="does not answer") as caught:
        storage_at(bucket, create=True)
    assert caught.value.errno == AWAY and "AZURE_STORAGE_ENDPOINT" in caught.value.hint


def token(objects: AzuriteServer, bucket: str, rights: str, ends_in: timedelta) -> str:
    """A shared access signature."""
    name, ends = bucket.removeprefix("az://").partition("/")[0], datetime.now(timezone.utc) + ends_in
    begins = ends - timedelta(hours=2)
    return str(generate_container_sas(ACCOUNT, name, account_key=KEY, permission=rights, expiry=ends, start=begins))


@pytest.mark.parametrize(
    ("rights", "ends_in", "text", "hint"),
    [
        ("rwl", timedelta(hours=1), "not authorized to perform this operation", "a SAS token read, write, delete, list"),
        ("rwdl", timedelta(hours=-1), "AuthorizationFailure", "the SAS token has ended"),
        ("rwdl", timedelta(hours=1), "", ""),
    ],
    ids=["no deletes", "ended", "enough"],
)
def test_what_a_token_allows(
    bucket: str, objects: AzuriteServer, monkeypatch: pytest.MonkeyPatch, rights: str, ends_in: timedelta, text: str, hint: str
) -> None:
    """A newcomer's."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token(objects, bucket, rights, ends_in))
    if not text:
        assert probe(storage_at(bucket, create=True)) > 0
        return
    with pytest.raises(CkptdError, match=text) as caught:
        probe(storage_at(bucket, create=True))
    assert hint in caught.value.hint


def test_the_account_as_people_write_it(bucket: str, objects: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure shows endpoints with a slash at their end, and gives connection strings (a newcomer)."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{objects.url}/{ACCOUNT}/")
    assert probe(storage_at(bucket, create=True)) > 0
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=x")
    with pytest.raises(StorageError, match="AZURE_STORAGE_CONNECTION_STRING is not read") as caught:
        storage_at(bucket)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint


def test_a_damaged_pointer_is_one_problem(storage: ObjectStorage, bucket: str, objects: AzuriteServer) -> None:
    """Nothing is said of a folder that nobody made (a newcomer)."""
    save(storage, tiny_world(1), moto.OLD)
    objects.blob(bucket, f"{step_dir(JOB, moto.OLD)}.pointer").upload_blob(b"garbage", overwrite=True)
    (problem,) = verify(f"{bucket}/{step_dir(JOB, moto.OLD)}").problems
    assert "damaged pointer" in problem


def test_a_container_that_disappears_is_away_and_back(storage: ObjectStorage, bucket: str, objects: AzuriteServer) -> None:
    """P4: nothing is taken for an empty storage, or for another one."""
    storage.put_if_absent("file", b"here")
    marker = objects.blob(bucket, object_store.MARKER)
    kept = marker.download_blob().readall()
    for instead in (b"another one", None):
        if instead is not None:
            marker.upload_blob(instead, overwrite=True)
        else:
            marker.delete_blob()
        for call in (lambda: storage.list("none"), lambda: storage.open("none"), lambda: commit(storage, ONE)):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.errno == AWAY and caught.value.hint, caught.value
    marker.upload_blob(kept)
    assert storage.list("none") == [] and read_file(storage, "file", 10) == b"here"


# --- before a job relies on it, and while it does -------------------------------------------------------------------
def denied(request: Request) -> Fault:
    return Fault(status=403, code="AuthorizationPermissionMismatch")


@pytest.mark.parametrize("what", ["comp=list", "comp=batch", ""], ids=["lists", "deletes", "everything"])
def test_what_a_container_refuses_is_said_before_a_job_relies_on_it(
    bucket: str, objects: AzuriteServer, tmp_path: Path, what: str
) -> None:
    settings = Config(storage_root=bucket, state_dir=tmp_path / "state", plain_loopback=True)
    with objects.failing(lambda request: denied(request) if what in request.query else None):
        for call in (
            lambda: checks.storage(settings),
            lambda: open_storage(bucket, "n0", Health(), StateDir(settings.state_dir), fresh=True),
        ):
            with pytest.raises(CkptdError, match="AuthorizationPermissionMismatch") as caught:
                call()
            assert "Storage Blob Data Contributor" in caught.value.hint and bucket in caught.value.where, caught.value


def test_preflight_takes_it_and_leaves_nothing(bucket: str, objects: AzuriteServer, tmp_path: Path) -> None:
    """Conditions are part of what is signed: nothing on the way can take them away unseen."""
    said = checks.storage(Config(storage_root=bucket, state_dir=tmp_path / "state", plain_loopback=True))
    assert said.ok and "conditional PUT are fine" in said.text, said
    assert probe(storage_at(bucket)) > 0 and winners(storage_at(bucket)) == 1
    assert set(objects.keys(bucket)) == {object_store.MARKER, object_store.CLOCK}


def test_a_restore_lists_nothing_and_pointers_are_read_once(storage: ObjectStorage, objects: AzuriteServer) -> None:
    """Azure writes an entity tag otherwise in a list than where it answers for the blob."""
    save(storage, world := tiny_world(1), moto.OLD)
    fresh = ObjectStorage(storage.root)
    objects.requests.clear()
    with Checkpoint.at(fresh, step_dir(JOB, moto.OLD)) as checkpoint:
        check_all(checkpoint, world)
    assert objects.requests and not [request for request in objects.requests if "comp=list" in request.query]
    above = step_dir(JOB, moto.OLD).rpartition("/")[0]
    fresh.pointers(above)
    objects.requests.clear()
    assert [pointer.name for pointer in fresh.pointers(above)] == [step_dir(JOB, moto.OLD).rpartition("/")[2]]
    assert [request.path for request in objects.requests if request.path.endswith(".pointer")] == []


def test_stock_readers_read_what_verify_names(storage: ObjectStorage, bucket: str, objects: AzuriteServer) -> None:
    save(storage, tiny_world(1), moto.OLD, "a1")
    pointer = f"{bucket}/{step_dir(JOB, moto.OLD)}"
    assert find_checkpoints(bucket) == [pointer] and verify(pointer).ok
    place = storage.locate(step_dir(JOB, moto.OLD)).removeprefix(f"{bucket}/")
    assert objects.blob(bucket, f"{place}/{MANIFEST}").download_blob().readall() == read_file(
        storage, f"{step_dir(JOB, moto.OLD)}/{MANIFEST}", MAX_BYTES
    )
