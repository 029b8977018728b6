"""A file system whose power can be cut: a sparse image on a loop device, and the file system's own shutdown ioctl.

The ioctl stops everything at once, as a power cut does; mounting again replays the journal. Without a log flush all that
was not made durable is gone. With one the metadata survives and the data that nobody synced does not: the
kernel may write its log at any instant, so a name must not outlive what it stands for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are the same number
LOG_FLUSH, NO_LOG_FLUSH = 1, 2  # their flags are the same, too
IMAGE_BYTES = 320 << 20  # the least XFS takes
MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "ext4-fast": (
        "mkfs.ext4",
        "-q",
        "-F",
        "-O",
        "fast_commit",
    ),  # fsync writes one file's changes, not the whole log
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
PRIVATE_BELOW = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_LIBC = ctypes.CDLL(None, use_errno=True)
NOT_ROOT = "needs root to mount a file system on a loop device"
RETRIES_MAX = 3  # of a umount while the kernel still finishes


class NoDisk(Exception):
    """This machine cannot mount an image; the text says why."""


def shut_down(mount: str, flags: int) -> None:
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flags))
    finally:
        os.close(fd)


@contextmanager
def private_mounts() -> Iterator[None]:
    """This thread, and what it starts, in a mount namespace of their own. Other tests make namespaces, too: a copy of our mount
    in one of those would keep the file system alive, shut down, over a reboot. Raises NoDisk."""
    if os.geteuid() != 0:
        raise NoDisk(NOT_ROOT)
    here, home = os.getcwd(), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        if _LIBC.unshare(NEW_MOUNTS) or _LIBC.mount(b"none", b"/", None, PRIVATE_BELOW, None):
            raise NoDisk(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        _LIBC.setns(home, NEW_MOUNTS)
        os.close(home)
        os.chdir(here)  # setns goes to the root


@contextmanager
def memory_at(place: Path) -> Iterator[Path]:
    """A folder in memory for images: what a disk takes for a flush tells nothing here, and there are many."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "ckptd-power", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        raise NoDisk(f"no tmpfs: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


class Disk:
    """Mounted at ``mount``. Raises NoDisk without root, loop devices or mkfs."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.image, self.mount = kind, place / "image", place / "mount"
        if os.geteuid() != 0:
            raise NoDisk(NOT_ROOT)
        if shutil.which(MKFS[kind][0]) is None:
            raise NoDisk(f"{MKFS[kind][0]} is not installed")
        self.mount.mkdir()
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run([*MKFS[kind], str(self.image)], check=True, capture_output=True)
        try:
            self.up()
        except subprocess.CalledProcessError as error:
            self.image.unlink()
            raise NoDisk(f"no loop device for {kind}: {error.stderr.decode().strip()}") from error

    def up(self) -> None:
        subprocess.run(
            ["mount", "-o", "loop", str(self.image), str(self.mount)], check=True, capture_output=True
        )

    def cut(self, flags: int = NO_LOG_FLUSH) -> None:
        shut_down(str(self.mount), flags)

    def down(self) -> None:
        for left in reversed(range(RETRIES_MAX)):
            done = subprocess.run(["umount", str(self.mount)], capture_output=True, check=False)
            if done.returncode == 0:
                return
            assert left, done.stderr.decode()

    def reboot(self) -> None:
        self.down()
        self.up()

    def close(self) -> None:
        with suppress(AssertionError):
            self.down()
        subprocess.run(["umount", "-l", str(self.mount)], capture_output=True, check=False)
        self.image.unlink(missing_ok=True)
