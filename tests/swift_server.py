"""OpenStack Swift on this machine: a proxy with its S3 API and one account, container and object server, one copy of everything.

Unlike moto it refuses what does not have the sum that was sent with it, and has many servers behind its answers.
"""

from __future__ import annotations

import configparser
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from tests.object_server import Forward, S3Server
from tests.waiting import until

REGION = "us-east-1"
ACCOUNT, USER, KEY = "test", "tester", "secret"
BACKENDS = ("account", "container", "object")
FILTERS = "catch_errors gatekeeper listing_formats bulk s3api tempauth copy slo dlo versioned_writes"  # of S3 none needs memcached
# With one disk, one that is left alone for a minute after a few slow answers would be all of them.
PATIENCE = {"error_suppression_limit": "1000000", "conn_timeout": "10", "node_timeout": "60"}
DISK = "disk"
PARTITIONS_LOG2 = 2
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 10.0
LOG_BYTES_SHOWN = 2000
# What the script of this name runs.
RUN = "import sys; from swift.{module}.server import main; sys.argv[0] = 'swift-{role}-server'; sys.exit(main())"


def why_not(folder: Path) -> str:
    """The reason why Swift cannot run here; "": it can."""
    if find_spec("swift") is None:
        return "swift is not installed"
    probe = folder / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.swift.metadata", b"x" * 4000)
    except OSError as error:
        return f"Swift keeps an object's metadata in extended attributes, and {folder} has none: {error}"
    finally:
        probe.unlink()
    return ""


class SwiftServer(S3Server):
    """All that it writes lies in a folder of its own, which goes with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="swift-"))
        self._running: list[subprocess.Popen[bytes]] = []
        ports = _free_ports(1 + len(BACKENDS))
        swift = f"http://127.0.0.1:{ports['proxy']}"
        super().__init__(Forward(swift), (f"{ACCOUNT}:{USER}", KEY), swift, together=True)
        try:
            self._configure(ports)
            self._build_rings(ports)
            for role in ports:
                self._start(role)
            for role, port in ports.items():
                until(partial(self._listens, port), START_TIMEOUT_S, f"Swift's {role} server listens")
            until(self._answers, START_TIMEOUT_S, "Swift's S3 API answers")
        except BaseException:
            self.close()
            raise

    def logs(self) -> str:
        """The end of what each server said."""
        found = [(path.stem, path.read_bytes()[-LOG_BYTES_SHOWN:].decode(errors="replace")) for path in self.folder.glob("*.log")]
        return "\n".join(f"== {role}\n{said}" for role, said in sorted(found) if said)

    def close(self) -> None:
        """Each server is one process."""
        super().close()
        for one in self._running:
            one.kill()
        for one in self._running:
            one.wait(STOP_TIMEOUT_S)
        self._running.clear()
        shutil.rmtree(self.folder)

    def _configure(self, ports: dict[str, int]) -> None:
        (self.folder / DISK).mkdir()
        salt = {"swift_hash_path_suffix": secrets.token_hex(8), "swift_hash_path_prefix": secrets.token_hex(8)}
        self._write("swift", {"swift-hash": salt})
        for role in BACKENDS:
            self._write(role, {
                "DEFAULT": self._common(ports[role]) | {"devices": str(self.folder), "mount_check": "false"},
                "pipeline:main": {"pipeline": f"{role}-server"},
                f"app:{role}-server": {"use": f"egg:swift#{role}"},
            })  # fmt: skip
        sections = {f"filter:{name}": {"use": f"egg:swift#{name}"} for name in FILTERS.split()}
        sections["filter:tempauth"][f"user_{ACCOUNT}_{USER}"] = f"{KEY} .admin"
        sections["filter:s3api"] |= {"location": REGION, "max_upload_part_num": "10000"}
        self._write("proxy", {
            "DEFAULT": self._common(ports["proxy"]),
            "pipeline:main": {"pipeline": f"{FILTERS} proxy-server"},
            "app:proxy-server": {"use": "egg:swift#proxy", "account_autocreate": "true"} | PATIENCE,
            **sections,
        })  # fmt: skip

    def _common(self, port: int) -> dict[str, str]:
        """workers: with none, a server is one process."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        where = {"bind_ip": "127.0.0.1", "bind_port": str(port), "swift_dir": str(self.folder), "user": user, "workers": "0"}
        return where | {"recon_cache_path": str(self.folder), "fallocate_reserve": "0", "log_level": "INFO"}

    def _write(self, name: str, sections: dict[str, dict[str, str]]) -> None:
        file = configparser.RawConfigParser()
        file.read_dict(sections)
        with (self.folder / f"{name}.conf").open("w") as out:
            file.write(out)

    def _build_rings(self, ports: dict[str, int]) -> None:
        """Which disk holds what: here the only one holds all, once."""
        script = (
            "import sys; from swift.common.ring import RingBuilder\n"
            "path, port, power, disk = sys.argv[1:]\n"
            "ring = RingBuilder(int(power), 1, 0)\n"
            "ring.add_dev(dict(id=0, region=1, zone=1, weight=1, ip='127.0.0.1', port=int(port), device=disk, meta='',\n"
            "    replication_ip='127.0.0.1', replication_port=int(port)))\n"
            "ring.rebalance()\n"
            "ring.get_ring().save(path)\n"
        )
        for role in BACKENDS:
            arguments = [str(self.folder / f"{role}.ring.gz"), str(ports[role]), str(PARTITIONS_LOG2), DISK]
            subprocess.run([sys.executable, "-c", script, *arguments], check=True, cwd=self.folder, capture_output=True)

    def _start(self, role: str) -> None:
        script = RUN.format(role=role, module="obj" if role == "object" else role)
        command = [sys.executable, "-c", script, str(self.folder / f"{role}.conf"), "-v"]
        with (self.folder / f"{role}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
            )

    def _listens(self, port: int) -> bool:
        for one in self._running:
            assert one.poll() is None, f"a server of Swift ended with {one.returncode}:\n{self.logs()}"
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    def _answers(self) -> bool:
        try:
            self.client.list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True


def _free_ports(count: int) -> dict[str, int]:
    """By role, proxy first. They are all held until the last one is found, so that no two are the same."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return dict(zip(("proxy", *BACKENDS), found, strict=True))
