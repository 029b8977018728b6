"""Settings: file, environment, flags in that order of strength, provenance, and every way to get them wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ckptd import identity, units
from ckptd.config import FLUSH_EVERY_S, Config
from ckptd.config_sources import load
from ckptd.core.errors import CkptdError
from ckptd.core.policy import Policy
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from tests import places

NO_FILE = Path("/nonexistent/ckptd.toml")


def settings(
    file: Path | None = None, flags: dict[str, object] | None = None, environ: dict[str, str] | None = None
) -> Any:
    return load(file, flags, environ or {}, system_file=NO_FILE)


def toml(folder: Path, text: str) -> Path:
    path = folder / "ckptd.toml"
    path.write_text(text)
    return path


def test_later_sources_are_stronger_and_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    file = toml(tmp_path, "replicas = 2\nown_slots = 2\nkeep_last = 9\nmemory_budget = 1048576\n")
    found = settings(file, {"keep_last": "7", "nice": None}, {"CKPTD_OWN_SLOTS": "4", "CKPTD_KEEP_LAST": "8"})
    assert (found.config.replicas, found.config.own_slots, found.config.keep_last) == (2, 4, 7)
    assert found.config.memory_budget_bytes() == 1 << 20
    assert found.origins["replicas"] == f"file:{file}"
    assert found.origins["own_slots"] == "env:CKPTD_OWN_SLOTS"
    assert found.origins["keep_last"] == "flag:--keep-last"
    assert found.origins["nice"] == "default"


def test_the_file_is_the_flag_or_the_variable_or_the_systems(tmp_path: Path) -> None:
    file = toml(tmp_path, "replicas = 3\n")
    assert load(None, {}, {"CKPTD_CONFIG": str(file)}, NO_FILE).config.replicas == 3
    assert load(None, {}, {}, file).config.replicas == 3
    assert load(None, {}, {}, NO_FILE).config.replicas == Policy().replicas
    with pytest.raises(CkptdError, match="no such configuration file"):
        settings(tmp_path / "absent.toml")


def test_defaults_read_neither_file_nor_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_REPLICAS", "5")
    assert Config().replicas == Policy().replicas


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ({"environ": {"CKPTD_REPLICA": "2"}}, "did you mean replicas"),
        ({"flags": {"flush_every": "2"}}, "did you mean flush_every_s"),
        ({"text": "keep_lasst = 3\n"}, "did you mean keep_last"),
        ({"text": "zzz = 3\n"}, "ckptd config"),
        ({"text": "[memory]\nreplicas = 3\n"}, "flat"),
    ],
)
def test_unknown_names_are_errors_with_a_hint(source: dict[str, Any], hint: str, tmp_path: Path) -> None:
    text = source.pop("text", None)
    with pytest.raises(CkptdError) as caught:
        settings(toml(tmp_path, text) if text else None, **source)
    assert hint in caught.value.hint
    assert caught.value.where


def test_other_programs_variables_are_left_alone() -> None:
    theirs = {"CKPTD_AUTOSTART": "1", "CKPTD_FAILPOINT": "a:kill", "CKPTD_SERVICE_HOST": "10.0.0.1"}
    theirs |= {"CKPTD_PORT_9650_TCP": "tcp://10.0.0.1:9650", "CKPTD_SERVICE_PORT": "9650"}
    assert settings(environ=theirs).config == Config()


def test_empty_variables_count_as_unset() -> None:
    assert settings(environ={"CKPTD_KEY_FILE": ""}).origins["key_file"] == "default"


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CkptdError) as caught:
        settings(toml(tmp_path, "replicas = = 2\n"))
    assert caught.value.where.endswith("ckptd.toml")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"keep_last": "0"}, "keep_last"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": "17"}, "replicas"),
        ({"peer_sets": "1"}, "peer_sets"),
        ({"redundancy": "raid"}, "write replicas=K, xor(N), rs(K,M) or auto"),
        ({"redundancy": "xor(1)"}, "at least 2"),
        ({"memory_budget": "120%"}, "between 0% and 100%"),
        ({"memory_budget": "12 parsecs"}, "not a size"),
        ({"bulk_mode": "tls"}, "bulk_mode"),
        ({"bind_address": "myhost.example"}, "neither an IPv4 address nor an interface"),
        ({"bind_address": "0.0.0.0"}, "needs advertise_address"),
        ({"advertise_address": "10.1.2.3", "plain_loopback": True}, "loopback only"),
        ({"http_address": "10.1.2.3"}, "not a loopback address"),
        ({"socket": "/" + "x" * 120}, "at most 107 bytes"),
        ({"http_users": "no-such-user-here"}, "no user"),
        ({"node_id": "../up"}, "node_id"),
        ({"control_port": "70000"}, "control_port"),
        ({"join_timeout_s": "0"}, "join_timeout_s"),
    ],
)
def test_bad_values_are_refused_by_name_and_origin(flags: dict[str, object], text: str) -> None:
    with pytest.raises(CkptdError) as caught:
        settings(flags=flags)
    assert text in caught.value.what


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(CkptdError) as caught:
        settings(flags={"replicas": "x"}, environ={"CKPTD_NICE": "99"})
    assert "replicas" in caught.value.what
    assert "nice" in caught.value.what
    assert caught.value.where == "flag:--replicas, env:CKPTD_NICE"


def test_policy_is_the_cores_with_equal_defaults_but_for_the_cadence() -> None:
    cadence = {"flush_every_s": FLUSH_EVERY_S}
    assert Config(storage_root=Path("/mnt")).policy() == dataclasses.replace(Policy(), **cadence)
    assert Config().policy() == dataclasses.replace(Policy(), durable=False, **cadence)
    assert Config(replicas=3, flush_every_s=60.0).policy().flush_every_s == 60.0


def test_a_cadence_in_steps_is_the_only_one_unless_both_are_set() -> None:
    assert Config(flush_every_steps=10).flush_every_s == 0
    assert Config(flush_every_steps=10, flush_every_s=5).flush_every_s == 5
    assert Config(flush_every_s=0).flush_every_s == 0


@pytest.mark.parametrize(
    ("text", "policy", "replicas"),
    [
        ("xor(4)", Parity(3, 1), 1),
        ("rs(4, 2)", Parity(4, 2), 2),
        ("replicas=3", Replicas(3), 3),
        ("2", Replicas(2), 2),
        ("auto", Replicas(1), 1),
    ],
)
def test_redundancy_is_accepted_in_all_its_forms(text: str, policy: Redundancy, replicas: int) -> None:
    config = settings(environ={"CKPTD_REDUNDANCY": text}).config
    assert (config.policy().redundancy, config.replicas, config.policy().replicas) == (
        policy,
        replicas,
        replicas,
    )
    assert config.redundancy in (policy.text, "auto")
    assert Config(**config.model_dump()) == config, "what is printed can be given again"


def test_replicas_is_the_short_form_of_redundancy() -> None:
    found = settings(flags={"replicas": "2"})
    assert (found.config.redundancy, found.config.policy().redundancy) == ("replicas=2", Replicas(2))
    assert found.origins["redundancy"] == found.origins["replicas"] == "flag:--replicas"
    assert Config(replicas=2, redundancy="replicas=2") == found.config


@pytest.mark.parametrize("text", ["xor(4)", "replicas=1", "auto", "rs(4,3)"])
def test_two_forms_that_differ_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CkptdError, match="contradict each other: give one of the two"):
        settings(flags={"replicas": "2", "redundancy": text})
    with pytest.raises(CkptdError, match="contradict each other: give one of the two"):
        settings(toml(tmp_path, f'replicas = 2\nredundancy = "{text}"\n'))


@pytest.mark.parametrize("number", ["inf", "1e400", "nan"])
def test_a_number_that_is_none_is_refused_by_name(number: str, tmp_path: Path) -> None:
    """Infinity ended the daemon's start with an OverflowError (fuzzer)."""
    with pytest.raises(CkptdError, match="replicas"):
        settings(toml(tmp_path, f"replicas = {number}\n"))


def test_beside_parity_the_short_form_is_the_losses_it_survives(tmp_path: Path) -> None:
    """`ckptd config` prints both, and what it prints can be given again: xor survives one loss, so this is no contradiction."""
    found = settings(toml(tmp_path, 'replicas = 1\nredundancy = "xor(3)"\n'))
    assert found.config.policy().redundancy == Parity(2, 1)
    assert "the losses it survives" in str(Config.model_fields["replicas"].description)


def test_the_stronger_sources_form_replaces_the_weaker_ones(tmp_path: Path) -> None:
    found = settings(toml(tmp_path, "replicas = 2\n"), {"redundancy": "xor(4)"})
    assert (found.config.redundancy, found.config.replicas) == ("xor(4)", 1)
    assert found.origins["replicas"] == "flag:--redundancy"
    found = settings(toml(tmp_path, 'redundancy = "xor(4)"\n'), environ={"CKPTD_REPLICAS": "2"})
    assert (found.config.redundancy, found.config.replicas) == ("replicas=2", 2)


def test_a_policy_has_both_forms_too() -> None:
    assert Policy(replicas=2).redundancy == Replicas(2)
    assert Policy(redundancy=Parity(4, 2)).replicas == 2
    assert dataclasses.replace(Policy(), replicas=0).redundancy == Replicas(0)
    with pytest.raises(ValueError, match="contradict"):
        Policy(replicas=3, redundancy=Parity(4, 2))


def test_every_setting_says_what_it_is_and_limits_carry_their_unit() -> None:
    from ckptd.cli.flags import group_of, text_of, unit_of

    for name, field in Config.model_fields.items():
        assert text_of(name), name
        assert group_of(name), name
        if field.annotation in (int, float):
            assert unit_of(name), f"{name}: a number without a unit"


def test_bulk_mode_follows_the_address() -> None:
    assert Config().bulk_mode_in_force() == "none"
    assert Config(advertise_address="10.0.0.7").bulk_mode_in_force() == "aead"
    assert Config(advertise_address="10.0.0.7", bulk_mode="none").bulk_mode_in_force() == "none"
    assert Config(bind_address="0.0.0.0", advertise_address="10.0.0.7").advertise() == "10.0.0.7"


def test_an_interface_stands_for_its_address() -> None:
    assert Config(bind_address="lo").bind_address == "127.0.0.1"


def test_socket_mode_is_octal_as_text() -> None:
    assert Config(socket_mode="0600").socket_mode == 0o600
    assert Config(socket_mode=0o660).socket_mode == 0o660


def test_users_by_name_and_number() -> None:
    assert Config(http_users="root, 1234").http_uids() == (0, 1234)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config(key_file=Path("my.key")).key_file == tmp_path / "my.key"
    assert Config(storage_root="").storage_root is None


def test_an_ordinary_users_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert Config().state_dir == tmp_path / "state" / "ckptd"
    assert Config().socket == tmp_path / "run" / "ckptd" / "ckptd.sock"
    assert Config().http_file() == tmp_path / "run" / "ckptd" / "ckptd.http"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Config().socket == tmp_path / "state" / "ckptd" / "ckptd.sock"


def test_the_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path / "state")
    made = config.with_identity().node_id
    assert made
    assert config.with_identity().node_id == made
    assert Config(node_id="n1", state_dir=tmp_path / "other").with_identity().node_id == "n1"
    assert not (tmp_path / "other").exists()
    assert [path.name for path in (tmp_path / "state").iterdir()] == [identity.NODE_ID_FILE]


def test_two_starters_agree_on_one_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loser of the race takes the winner's: link() refuses, nothing is overwritten."""
    monkeypatch.setattr(Path, "exists", lambda self: False)  # both looked before either wrote
    assert identity.kept_node_id(tmp_path) == identity.kept_node_id(tmp_path)


def test_cloned_images_get_different_identities(tmp_path: Path) -> None:
    assert identity.kept_node_id(tmp_path / "a") != identity.kept_node_id(tmp_path / "b")


def test_an_identity_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CkptdError, match="identity"):
        Config(state_dir=tmp_path / "file").with_identity()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1024", 1024),
        ("1KiB", 1024),
        ("1.5GiB", 3 << 29),
        ("2 GB", 2 * 10**9),
        ("512m", 512 << 20),
        ("7B", 7),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "12 apples", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        units.parse_bytes(text)


def test_budgets_and_their_print() -> None:
    assert units.parse_budget("50%", 1000) == 500
    assert units.parse_budget("2KiB", 1000) == 2048
    assert [units.format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip


def fake_machine(folder: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, cgroups


def test_machine_memory_is_the_smallest_limit_around_us(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/slurm/step\n")
    inner = cgroups / "slurm" / "step"
    inner.mkdir(parents=True)
    assert units.machine_memory_bytes(proc, cgroups) == 8 << 30
    (inner / "memory.max").write_text("max\n")
    (cgroups / "slurm" / "memory.max").write_text(f"{2 << 30}\n")
    assert units.machine_memory_bytes(proc, cgroups) == 2 << 30


def test_machine_memory_under_cgroup_v1(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/job\n")
    (cgroups / "memory" / "job").mkdir(parents=True)
    (cgroups / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{1 << 30}\n")
    assert units.machine_memory_bytes(proc, cgroups) == 1 << 30


@places.for_root
def test_a_directory_of_the_machines_settings_that_nobody_may_enter() -> None:
    """Made under umask 077 for the key that lies there: every command of every other user ended in a traceback."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ckptd.config_sources import load\n"
        "from ckptd.core.errors import CkptdError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: load(environ={}, system_file=Path(sys.argv[1]))\n"
        "except CkptdError as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "ckptd.toml"
        ran = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, check=False)
    assert "cannot be read: Permission denied" in ran.stdout and f"chmod 755 {folder}" in ran.stdout, ran.stderr
