"""The command line, as a person and as a script use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli import main
from ckptd.cli.flags import text_of, unit_of
from ckptd.cli.settings import printable
from ckptd.config import Config
from ckptd.core.ids import SnapshotId
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, save, small_world
from tests.node.commands import Cli, places
from tests.node.status_page import Page

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


# --- start ----------------------------------------------------------------------------------------------------------
def test_the_console_script_starts_without_torch_or_the_daemon() -> None:
    """`ckptd status` in a loop must cost little: what is heavy is imported by the command that needs it."""
    code = "import sys; from ckptd.cli import app; print(*sorted(m for m in sys.modules if '.' not in m or 'ckptd.' in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "torch",
        "numpy",
        "zmq",
        "uvicorn",
        "starlette",
        "uvloop",
        "ckptd.daemon",
        "ckptd.persist",
        "ckptd.arena",
    }
    assert not heavy & set(loaded)


def test_python_m_ckptd_is_ckptd() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ckptd", "version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", ran.stdout)


def test_every_command_explains_itself(cli: Cli) -> None:
    shown = cli("--help")
    commands = "run keygen config preflight plan status ls verify diff gc export import demo version"
    for name in commands.split():
        assert name in shown.out
        assert cli(name, "--help").code == 0


def test_wrong_usage_exits_with_2(cli: Cli) -> None:
    assert cli("run", "--no-such-flag").code == 2
    assert cli("nonsense").code == 2


# --- config ---------------------------------------------------------------------------------------------------------
def test_config_says_where_each_value_came_from(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("replicas = 2\nplain_loopback = true\n")
    monkeypatch.setenv("CKPTD_OWN_SLOTS", "4")
    found = json.loads(
        cli("config", "--json", "--config", file, "--keep-last", "9", "--no-plain-loopback").out
    )
    assert set(found) == set(Config.model_fields)
    assert (found["replicas"]["value"], found["replicas"]["from"]) == (2, f"file:{file}")
    assert (found["own_slots"]["value"], found["own_slots"]["from"]) == (4, "env:CKPTD_OWN_SLOTS")
    assert (found["keep_last"]["value"], found["keep_last"]["from"]) == (9, "flag:--keep-last")
    assert (found["plain_loopback"]["value"], found["plain_loopback"]["from"]) == (
        False,
        "flag:--plain-loopback",
    )
    assert found["nice"]["from"] == "default"
    assert found["join_timeout_s"]["unit"] == "seconds"


def test_config_prints_a_table_for_people(cli: Cli) -> None:
    shown = cli("config", "--memory-budget", "3GiB")
    assert re.search(r"memory_budget +3GiB +.* flag:--memory-budget", shown.out)
    assert shown.code == 0


def test_errors_have_what_where_and_hint(cli: Cli) -> None:
    failed = cli("config", "--config", "/no/such.toml")
    assert failed.code == 1
    assert failed.out == ""
    assert failed.err.startswith("error: no such configuration file [/no/such.toml]\n  hint: ")


def test_every_setting_is_in_the_manual_and_the_manual_names_no_other() -> None:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text()
    section = text[text.index("## 4. Settings") : text.index("## 5.")]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert [row[0] for row in rows] == list(Config.model_fields)
    for name, default, unit, meaning in rows:
        assert unit == (unit_of(name) or "-"), name
        assert meaning == text_of(name), name
        if Config.model_fields[name].default_factory is None:  # those that depend on the user are written out
            assert default == manual_default(name), name


def manual_default(name: str) -> str:
    value = printable(name, Config.model_fields[name].default)
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_the_variables_that_the_code_reads_are_known_to_the_settings() -> None:
    """Or else a daemon would refuse to start because of a variable that a client of the same version set."""
    from ckptd.config_sources import OTHER_PREFIXES, OTHER_VARIABLES, variable_name

    known = OTHER_VARIABLES | {variable_name(name) for name in Config.model_fields}
    files = [path for top in ("ckptd", "client", "deploy") for path in (ROOT / top).rglob("*.*")]
    for path in [path for path in files if path.suffix in (".py", ".sh", ".service")]:
        for found in re.findall(r'["{ =](CKPTD_[A-Z_]+)[":=}]', path.read_text()):
            assert found in known or found.startswith(OTHER_PREFIXES), f"{path}: {found}"


# --- keygen ---------------------------------------------------------------------------------------------------------
def test_keygen_writes_a_private_file_and_never_overwrites_one(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    assert cli("keygen", path).code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    written = path.read_bytes()
    again = cli("keygen", path)
    assert again.code == 1
    assert "key file" in again.err
    assert path.read_bytes() == written


# --- status and ls, from a real page --------------------------------------------------------------------------------
STATUS = {
    "node": {"id": "n0", "version": "1.2.3", "pid": 7, "domain": "rack1", "control": "tcp://a", "bulk": "b"},
    "memory": {"budget_bytes": 4 * GIB, "used_bytes": GIB, "own_bytes": GIB, "peer_bytes": 0, "scratch_bytes": 0},
    "storage": {"root": "/mnt/[red]ckpt", "ok": True},
    "health": {"ok": True, "problems": [], "facts": {}},
    "jobs": [
        {
            "job": "0/gpt", "epoch": 3, "phase": "running", "steward": "n0", "world": 4, "wanted": 1, "level": 0,
            "degraded": True, "newest": {"sealed": 120, "protected": 118, "durable": -1}, "lag": {"sealed": 0},
            "nodes": [{"node": "n1", "domain": "rack2", "up": False}],
            "ranks": [{"rank": 0, "node": "n0", "step": 120, "free_slots": 2}],
            "outlook": [
                {"failure": "process", "victim": "", "exact": True, "step": 120, "source": "own", "lost_steps": 3,
                 "lost_steps_worst": 7, "lost_s": 1.5, "move_bytes": 0, "restore_s": 0.05, "basis": ["own: 4 seals"],
                 "not_measured": []},
                {"failure": "node", "victim": "n1", "exact": False, "step": 118, "source": "peer", "lost_steps": 5,
                 "lost_steps_worst": 9, "move_bytes": GIB, "basis": ["own: 4 seals"], "not_measured": ["decide"]},
                {"failure": "all", "victim": "", "exact": True, "step": -1, "source": "", "lost_steps": 123,
                 "lost_steps_worst": 123, "move_bytes": 0, "basis": [], "not_measured": ["nothing to restore"]},
            ],
        }
    ],
}  # fmt: skip
LISTED = {
    "rows": [
        {
            "job": "0/gpt",
            "epoch": 3,
            "step": 120,
            "level": 0,
            "wanted": 1,
            "durable": False,
            "where": ["memory"],
        },
        {
            "job": "0/gpt",
            "epoch": 3,
            "step": 100,
            "level": 1,
            "wanted": 1,
            "durable": True,
            "where": ["memory", "storage"],
        },
        {
            "job": "0/gpt",
            "epoch": 2,
            "step": 50,
            "level": -1,
            "wanted": 0,
            "durable": True,
            "keep": True,
            "where": ["storage"],
        },
        {
            "job": "0/gpt",
            "epoch": 1,
            "step": 70,
            "level": -1,
            "wanted": 0,
            "durable": True,
            "abandoned": True,
            "where": ["storage"],
        },
    ],
    "errors": [],
}


@pytest.fixture
def answers() -> dict[str, dict[str, Any]]:
    return {"status": json.loads(json.dumps(STATUS)), "ls": json.loads(json.dumps(LISTED))}


@pytest.fixture
def page(tmp_path: Path, answers: dict[str, dict[str, Any]]) -> Iterator[None]:
    served = Page(tmp_path, answers)
    yield
    served.stop()


@pytest.mark.usefixtures("page")
def test_status_for_machines_is_what_the_daemon_said(cli: Cli, tmp_path: Path) -> None:
    shown = cli("status", "--json", *places(tmp_path))
    assert json.loads(shown.out) == STATUS
    assert shown.code == 0


@pytest.mark.usefixtures("page")
def test_status_for_people(cli: Cli, tmp_path: Path) -> None:
    shown = cli("status", *places(tmp_path))
    for text in (
        "n0  domain rack1",
        "1.0 GiB of 4.0 GiB",
        "/mnt/[red]ckpt",
        "DEGRADED: 0 of 1",
        "job 0/gpt: epoch 3",
    ):
        assert text in shown.out
    assert re.search(r"protected +118", shown.out)
    assert re.search(r"durable +- ", shown.out)
    assert re.search(r"n1 +rack2 +DOWN", shown.out)
    assert re.search(r"a process +step 120 +own memory +3 +up to 7 +1\.5 s +0 B +about 50 ms", shown.out)
    lost = r"one node, worst n1 +step 118 +peer memory +5 +up to 9 +not measured yet +1\.0 GiB +not measured yet"
    assert re.search(lost, shown.out)
    assert re.search(r"all nodes +the beginning +- +123 +up to 123 .* -", shown.out)
    for note in ("measured: own: 4 seals;", "not measured yet: decide\n", "perhaps better than shown"):
        assert note in shown.out
    assert "nothing to restore" not in shown.out


@pytest.mark.usefixtures("page")
def test_status_does_not_call_protected_what_only_a_dead_steward_said(
    cli: Cli, tmp_path: Path, answers: dict[str, dict[str, Any]]
) -> None:
    """A user read "protection: 1 of 1" for ten seconds after the steward's node was gone."""
    job = answers["status"]["jobs"][0]
    job.update(steward="n1", steward_up=False, level=1, degraded=False)
    shown = " ".join(cli("status", *places(tmp_path)).out.split())
    assert "NOT KNOWN NOW: steward n1 is down, all below is of before" in shown
    assert "protection was: 1 of 1 domains" in shown


@pytest.mark.usefixtures("page")
def test_status_names_the_problems(cli: Cli, tmp_path: Path, answers: dict[str, dict[str, Any]]) -> None:
    problem = {"kind": "storage", "text": "disk full", "job": "", "first": 1.7e9, "count": 3}
    answers["status"]["health"] = {"ok": False, "problems": [problem]}
    answers["status"]["jobs"] = []
    shown = cli("status", *places(tmp_path))
    assert shown.code == 0  # it answered; launch scripts wait for that
    assert "disk full" in shown.out
    assert "no job of yours" in shown.out


@pytest.mark.usefixtures("page")
def test_status_promises_nothing_from_storage_that_is_away(cli: Cli, tmp_path: Path, answers: dict[str, dict[str, Any]]) -> None:
    warned = "what comes from there comes once it is"
    answers["status"]["jobs"][0]["outlook"][0]["source"] = "durable"
    assert warned not in cli("status", *places(tmp_path)).out
    answers["status"]["storage"]["ok"] = False
    assert warned in cli("status", *places(tmp_path)).out


@pytest.mark.usefixtures("page")
def test_ls_for_machines_and_people(cli: Cli, tmp_path: Path) -> None:
    assert json.loads(cli("ls", "--json", *places(tmp_path)).out) == LISTED
    shown = cli("ls", *places(tmp_path))
    assert re.search(r"120 +protected\(0\) degraded +memory", shown.out)
    assert re.search(r"100 +protected\(1\), durable +memory \+ storage", shown.out)
    assert re.search(r"50 +durable +storage +keep", shown.out)
    assert re.search(r"70 +durable +storage +left behind", shown.out)


@pytest.mark.usefixtures("page")
def test_ls_tells_what_could_not_be_read(
    cli: Cli, tmp_path: Path, answers: dict[str, dict[str, Any]]
) -> None:
    answers["ls"] = {"rows": [], "errors": ["0/gpt: storage is gone"]}
    shown = cli("ls", *places(tmp_path))
    assert shown.code == 1
    assert "storage is gone" in shown.out


@pytest.mark.usefixtures("page")
def test_a_user_without_a_daemon_of_his_own_means_the_machines(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.cli.page.SYSTEM_RUN_DIR", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "mine"))
    assert cli("status").code == 0
    assert cli("status", "--socket", tmp_path / "other.sock").code == 1  # who names one means that one


def test_without_a_daemon_status_says_how_to_start_one(cli: Cli, tmp_path: Path) -> None:
    for command in ("status", "ls"):
        failed = cli(command, *places(tmp_path))
        assert failed.code == 1
        assert "no ckptd daemon runs here" in failed.err
        assert "ckptd run" in failed.err


def test_a_daemon_that_is_gone_is_told_from_one_that_never_was(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    (tmp_path / "ckptd.http").write_text(f"127.0.0.1:{port}\n")
    failed = cli("status", *places(tmp_path))
    assert failed.code == 1
    assert "is gone" in failed.err and "its keeper starts it again" in failed.err


def test_a_daemon_that_hangs_is_told_from_one_that_is_gone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.cli.page.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "ckptd.http").write_text(f"127.0.0.1:{silent.getsockname()[1]}\n")
        failed = cli("status", *places(tmp_path))
    assert failed.code == 1
    assert "has not answered for 0 s" in failed.err and "finds its memory as it was" in failed.err


@pytest.mark.usefixtures("page")
def test_status_of_one_job_and_those_that_run_first(cli: Cli, tmp_path: Path, answers: dict[str, dict[str, Any]]) -> None:
    job = answers["status"]["jobs"][0]
    answers["status"]["jobs"] = [{**job, "job": "0/dead", "phase": "orphaned"}, {**job, "job": "0/gpt", "phase": "running"}]
    shown = cli("status", *places(tmp_path)).out
    assert 0 < shown.index("job 0/gpt") < shown.index("job 0/dead")
    for name in ("gpt", "0/gpt"):
        assert [job["job"] for job in json.loads(cli("status", name, "--json", *places(tmp_path)).out)["jobs"]] == ["0/gpt"]
    failed = cli("status", "other", *places(tmp_path))
    assert failed.code == 1 and "known: 0/dead, 0/gpt" in failed.err


# --- durable checkpoints, without a daemon ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("storage")
    storage, world = PosixStorage(str(root)), small_world(rows=60)
    for step in (10, 20):
        save(storage, world, SnapshotId(1, step), keep=step == 10)
    return root


def test_ls_of_a_directory_needs_no_daemon(cli: Cli, stored: Path) -> None:
    rows = json.loads(cli("ls", stored, "--json").out)["rows"]
    assert [(row["job"], row["epoch"], row["step"], row["keep"]) for row in rows] == [
        (JOB, 1, 20, False),
        (JOB, 1, 10, True),
    ]
    assert re.search(rf"{JOB} +1 +10 +durable +storage +keep", cli("ls", stored).out)
    assert cli("ls", stored / "absent").code == 1


def test_verify_reads_everything_back(cli: Cli, stored: Path) -> None:
    shown = cli("verify", stored)
    assert shown.code == 0
    assert shown.out.count("ok       ") == 2
    assert json.loads(cli("verify", stored, "--json").out)["ok"] is True


def test_verify_names_the_damage_and_exits_with_1(cli: Cli, stored: Path, tmp_path: Path) -> None:
    """P10."""
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    damaged = sorted(copy.rglob("step-0000000020/*.safetensors"))[0]
    with damaged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    shown = cli("verify", copy)
    assert shown.code == 1
    assert "DAMAGED" in shown.out
    assert damaged.name in shown.out
    assert shown.out.count("ok       ") == 1  # the other one is fine
    assert cli("verify", damaged.parent, "--json").code == 1


def test_verify_of_nothing_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert "no checkpoint here" in cli("verify", tmp_path).err
    assert cli("verify", tmp_path / "absent").code == 1


@pytest.mark.parametrize("name", ["\x1b]0;all is well\x07\x1b[2J", "\udcff"])
def test_a_name_writes_nothing_into_the_terminal_of_who_looks(cli: Cli, tmp_path: Path, name: str) -> None:
    """D20: a user makes directories below his own. Another one, whose name is no text, ended the command in a traceback."""
    place = tmp_path / name / "step-0000000001"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    shown = cli("verify", tmp_path)
    assert shown.code == 1 and "DAMAGED" in shown.out and "\x1b" not in shown.out
    shown = cli("verify", place.parent / "absent")
    assert shown.code == 1 and "no such directory" in shown.err
    assert "\x1b" not in shown.err


@pytest.mark.parametrize("root", ["abfs://bucket/x", "gs://bucket/x", "http://host/x", "GS:/bucket"])
@pytest.mark.parametrize("command", [("config", "--storage-root"), ("preflight", "--storage-root"), ("ls",), ("verify",)])
def test_a_storage_root_that_is_no_directory_is_refused_in_words(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, command: tuple[str, ...]
) -> None:
    """P4, P15: a local directory of that name would be called durable."""
    monkeypatch.chdir(tmp_path)
    shown = cli(*command, root)
    assert shown.code != 0
    assert "not supported" in shown.err
    assert not list(tmp_path.glob("*:"))


def test_a_file_address_is_the_directory_that_it_names(cli: Cli, stored: Path) -> None:
    assert cli("verify", f"file://{stored}").code == 0
    assert json.loads(cli("ls", f"file://{stored}", "--json").out)["rows"]
    assert "another host" in cli("config", "--storage-root", "file://host/x").err
    said = json.loads(cli("config", "--storage-root", f"file://{stored}", "--json").out)
    assert str(stored) in json.dumps(said) and "file:" not in json.dumps(said)


@pytest.mark.parametrize("refused", [PermissionError(13, "Permission denied", "/mnt/x"), OSError(28, "No space left on device")])
def test_what_the_system_refuses_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: OSError
) -> None:
    """`ckptd ls` of a directory that one may not enter, `ckptd config > /dev/full`."""

    def app() -> None:
        raise refused

    monkeypatch.setattr("ckptd.cli.app.app", app)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {refused}\n"
