"""What an operator can set: each value has one name, in TOML (``memory_budget``), in the environment
(``CKPTD_MEMORY_BUDGET``) and as a flag (``--memory-budget``). Units are in the names: ``_s``, ``_bytes``, ``_steps``.

``config_sources.load`` reads the three and says where each value came from; this file says what there is.
"""

from __future__ import annotations

import ipaddress
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ckptd.core.errors import CkptdError
from ckptd.core.pacing.slowdown import FLOOR_BYTES_S, OVERHEAD_MAX
from ckptd.core.policy import Policy
from ckptd.core.redundancy.policies import AUTO, FORMS, REPLICAS_MAX, Replicas, parse
from ckptd.core.storage_root import in_bucket, storage_root
from ckptd.identity import NODE_ID_PATTERN, address_of, kept_node_id, uid_of
from ckptd.units import machine_memory_bytes, parse_budget

SYSTEM_RUN_DIR = Path("/run/ckptd")
SYSTEM_STATE_DIR = Path("/var/lib/ckptd")
SOCKET_NAME = "ckptd.sock"
HTTP_SUFFIX = ".http"
SOCKET_PATH_BYTES_MAX = 107  # sun_path, less its NUL
PORT_MAX = 65535
FIRST_PORT, PORTS = 20000, 8000  # a daemon's own choice: below those that systems give away and below Kubernetes' node ports
DAY_S = 86400.0
MONTH_S = 30 * DAY_S
FLUSH_EVERY_S = 600.0  # where no cadence is set
LABEL_CHARACTERS_MAX = 128
PACING_FLOOR_MIN_BYTES_S = 16 * 1024  # slower, and a stream's receiver might take it for dead

Seconds = Annotated[float, Field(gt=0, le=DAY_S)]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
_POLICY = Policy()


def _default_state_dir() -> Path:
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    given = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(given or Path.home() / ".local" / "state") / "ckptd"
    except RuntimeError as error:  # a uid of a container that no one gave a name
        raise CkptdError("this user has no home directory", hint="set CKPTD_STATE_DIR or --state-dir") from error


def loopback_key_file() -> Path:
    """Where this user's daemons on this machine keep the key that they share when none is configured."""
    return (SYSTEM_RUN_DIR if os.geteuid() == 0 else _default_state_dir()) / "loopback.key"


def _default_socket(values: dict[str, Any]) -> Path:
    if os.geteuid() == 0:
        return SYSTEM_RUN_DIR / SOCKET_NAME
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "ckptd" / SOCKET_NAME if runtime else Path(values["state_dir"]) / SOCKET_NAME


def _default_flush_every_s(values: dict[str, Any]) -> float:
    """Who names a storage root and nothing else does not want to find it empty after a power cut."""
    return 0.0 if values.get("flush_every_steps") else FLUSH_EVERY_S


def _set(default: Any, group: str, text: str, unit: str = "", **bounds: Any) -> Any:
    """A field: its group in the documentation, its one-line meaning, its unit where the name does not carry it."""
    kind = "default_factory" if callable(default) else "default"
    return Field(
        **{kind: default}, description=text, json_schema_extra={"group": group, "unit": unit}, **bounds
    )


def _of_policy(name: str, group: str, text: str, unit: str = "", **bounds: Any) -> Any:
    """A field of core.policy.Policy, with its default."""
    return _set(getattr(_POLICY, name), group, text, unit, **bounds)


def _in_both_forms(values: dict[str, Any]) -> dict[str, Any]:
    """What cannot be read is left for its field to refuse. Raises ValueError when the two contradict each other: of parity
    ``replicas`` says how many losses it survives, so that all that `ckptd config` prints can be given again."""
    text, copies = values.get("redundancy"), values.get("replicas")
    try:
        asked = parse(str(text)) if text is not None else None
        short = Replicas(int(copies)) if copies is not None else None
    except (OverflowError, ValueError):
        return values
    if text is None:
        return values if short is None else {**values, "redundancy": short.text}
    means = 1 if asked is None else asked.tolerates
    if short is not None and short.copies != means:
        said = AUTO if asked is None else asked.text
        raise ValueError(
            f"redundancy={said} and {short.text} contradict each other: give one of the two, replicas is the short form"
        )
    return {**values, "replicas": means, "redundancy": str(text)}


class Config(BaseSettings):
    """All settings of one daemon, validated; ``Config()`` is all defaults (neither file nor environment is read)."""

    model_config = SettingsConfigDict(
        env_prefix="CKPTD_", env_ignore_empty=True, extra="forbid", frozen=True, validate_default=True
    )

    node_id: str = _set("", "identity", "name of this node; empty: made from the host name and kept in state_dir",
                        pattern=f"^({NODE_ID_PATTERN})?$")  # fmt: skip
    domain: str = _set("", "identity", "failure domain (rack, switch, PDU); empty: the node itself")
    parallel_group: str = _set(
        "", "identity", "tensor- or pipeline-parallel group of this node's ranks: copies go to other groups first",
        max_length=LABEL_CHARACTERS_MAX)  # fmt: skip
    state_dir: Path = _set(
        _default_state_dir, "identity", "epochs and identity, kept over restarts; this daemon's alone"
    )
    socket: Path = _set(_default_socket, "identity", "unix socket for the ranks")
    socket_mode: int = _set(
        0o666, "identity", "rights of that socket; each user sees only his own jobs", "octal", ge=0, le=0o777
    )

    bind_address: str = _set(
        "127.0.0.1", "network", "IPv4 address or interface for control and bulk; never guessed"
    )
    advertise_address: str = _set(
        "", "network", "IPv4 address others reach this node at; empty: bind_address"
    )
    control_port: Port = _set(0, "network", "control link", "TCP port, 0: any")
    bulk_port: Port = _set(0, "network", "bulk streams", "TCP port, 0: any")
    key_file: Path | None = _set(
        None, "network", "cluster key (`ckptd keygen`), the same on every node, mode 0600"
    )
    plain_loopback: bool = _set(False, "network", "no key_file but a key of this user, made here; on loopback addresses only")
    bulk_mode: Literal["auto", "none", "aead"] = _set(
        "auto", "network", "protection of bulk bytes; auto: none on loopback, aead (AES-256-GCM) elsewhere")  # fmt: skip
    bulk_streams: int = _set(2, "network", "TCP streams of one transfer", "streams", ge=1, le=64)
    connections_max: int = _set(
        1024, "network", "of each listener: ranks, control, bulk", "connections", ge=1, le=65536
    )

    memory_budget: str = _set(
        "70%", "memory", "for snapshots: own, peers', restore", "bytes, GiB or % of memory"
    )
    user_budget: str = _set(
        "50%", "memory", "a user's share of it: what he may have while another one trains or lacks memory",
        "bytes, GiB or % of memory_budget"
    )
    redundancy: str = _set("replicas=1", "memory", f"how a snapshot outlives nodes: {FORMS}")
    replicas: int = _of_policy(
        "replicas", "memory", "short for redundancy: copies in other failure domains; beside parity, the losses it survives",
        "copies", ge=0, le=REPLICAS_MAX)  # fmt: skip
    own_slots: int = _of_policy(
        "own_slots", "memory", "own generations: 2 captures after protection, 3 also during it, 4 never waits",
        "slots per rank", ge=2, le=16,
    )  # fmt: skip
    peer_sets: int = _of_policy(
        "peer_sets", "memory", "generations kept for each rank protected here: one goes only when the next is there",
        "sets", ge=2, le=16,
    )  # fmt: skip
    job_linger_s: Annotated[float, Field(ge=0, le=DAY_S)] = _set(
        _POLICY.job_linger_s, "memory", "a finished job's memory is kept this long, and until it is durable; "
        "so is what is known of a dead job that has nothing in memory")  # fmt: skip
    orphan_linger_s: Annotated[float, Field(ge=0, le=MONTH_S)] = _of_policy(
        "orphan_linger_s", "memory", "no rank lives: what is durable goes after this, the rest where memory is short")
    orphan_drop: bool = _of_policy(
        "orphan_drop", "memory", "then, where memory is short, also the last complete snapshot of a job without a rank"
    )

    drain_on_stop_s: Annotated[float, Field(ge=0, le=DAY_S)] = _set(
        0.0, "memory", "on SIGTERM, hand away what only this node holds for at most so long, then stop; 0: off")  # fmt: skip

    fence_timeout_s: Seconds = _set(
        30.0, "training", "the optimizer waits for a copy this long, then the step is void"
    )
    audit_every: int = _set(
        100,
        "training",
        "compare slot and source every n-th snapshot, and in the one after a hidden write; 0: never",
        "snapshots",
        ge=0,
    )
    grant_margin_max_steps: int = _of_policy("grant_margin_max_steps", "training", "how far ahead captures are granted",
                                             ge=1, le=100_000)  # fmt: skip

    pacing: Literal["off", "aimd", "windows"] = _set(
        "aimd", "pacing", "off: never; aimd: by step times; windows: also only in the gaps ranks mark"
    )
    overhead_max: float = _set(
        OVERHEAD_MAX, "pacing", "how much longer steps may take, on average, with our captures and our traffic beside them",
        "share of a step",
        gt=0, le=1,
    )  # fmt: skip
    pacing_floor_bytes_s: int = _set(
        FLOOR_BYTES_S, "pacing", "never slower than this, whatever it costs training", "bytes/s",
        ge=PACING_FLOOR_MIN_BYTES_S,
    )  # fmt: skip
    pacing_deadline_s: Seconds = _of_policy(
        "pacing_deadline_s", "pacing", "a copy is made within this, whatever it costs training"
    )

    storage_root: str | None = _set(
        None, "durable", "shared directory, s3://bucket/prefix or az://container/prefix, for durable checkpoints; none: memory only"
    )
    cache_dir: Path | None = _set(
        None, "durable", "local directory that keeps what restores read of durable checkpoints, so that the next ones need not"
    )
    cache_budget: str = _set("10%", "durable", "room for it", "bytes, GiB or % of its file system")
    flush_every_steps: int = _of_policy(
        "flush_every_steps", "durable", "make durable every n steps; 0: off", ge=0
    )
    flush_every_s: Annotated[float, Field(ge=0)] = _set(
        _default_flush_every_s, "durable", "and every n seconds; 0: off"
    )
    dedup: bool = _set(
        False, "durable", "what did not change since the newest durable step is not written again but named where it lies"
    )
    compress: bool = _set(
        False, "durable", "what becomes smaller by it is compressed; stock readers do not see it, `ckptd export` does"
    )
    row_deltas: Annotated[tuple[str, ...], NoDecode] = _set(
        (), "durable", "large tables (embeddings) of which only the rows that changed are written", "patterns of keys, by commas"
    )
    consolidate: bool = _set(
        False, "durable", "checkpoints that stay for good get their parameters as whole tensors beside them"
    )
    keep_last: int = _of_policy(
        "keep_last", "durable", "newest durable checkpoints to keep", "checkpoints", ge=1
    )
    keep_every_steps: int = _of_policy(
        "keep_every_steps", "durable", "and every multiple of n steps; 0: none", ge=0
    )
    breakpoint_grace_s: Seconds = _of_policy(
        "breakpoint_grace_s", "durable", "ranks dead, nobody back: flush memory then"
    )
    write_timeout_s: Seconds = _of_policy(
        "write_timeout_s", "durable", "parity that a checkpoint has to wait for, all nodes' parts of it, and again for its commit"
    )

    inventory_timeout_s: Seconds = _of_policy(
        "inventory_timeout_s", "timeouts", "restore waits this long for holders"
    )
    join_timeout_s: Seconds = _of_policy("join_timeout_s", "timeouts", "all ranks must join within this")
    restore_timeout_s: Seconds = _of_policy("restore_timeout_s", "timeouts", "fetch and load of a restore")
    steward_timeout_s: Seconds = _of_policy(
        "steward_timeout_s", "timeouts", "steward silent: the next node speaks"
    )
    replicate_retry_s: Seconds = _of_policy(
        "replicate_retry_s", "timeouts", "pause before a failed replica is sent anew"
    )

    http_address: str = _set("127.0.0.1", "page", "loopback address of the status page")
    http_port: Port = _set(0, "page", "status page: /metrics, /healthz, /status, /ls", "TCP port, 0: any")
    http_users: Annotated[tuple[str, ...], NoDecode] = _set(
        (), "page", "users who see all jobs, beside root and the daemon's own", "user names, by commas")  # fmt: skip

    nice: int = _set(5, "process", "priority below training", "nice level", ge=-20, le=19)
    log_level: Literal["debug", "info", "warning", "error"] = _set(
        "info", "process", "least severe line to log"
    )
    log_format: Literal["text", "json"] = _set("text", "process", "one line per event: key=value, or JSON")

    # --- checks -------------------------------------------------------------------------------------------------
    @model_validator(mode="before")
    @classmethod
    def _two_forms(cls, values: Any) -> Any:
        """``replicas`` and ``redundancy`` say the same: whichever was given makes the other."""
        return _in_both_forms(values) if isinstance(values, dict) else values

    @field_validator("redundancy")
    @classmethod
    def _canonical(cls, text: str) -> str:
        found = parse(text)
        return AUTO if found is None else found.text

    @field_validator("key_file", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("storage_root", mode="before")
    @classmethod
    def _root(cls, value: Any) -> Any:
        if value is None or value == "":
            return None
        try:
            root = storage_root(str(value))
        except CkptdError as error:
            raise ValueError(f"{error.what} [{error.where}]: {error.hint}") from error
        return root if in_bucket(root) else os.path.abspath(os.path.expanduser(root))

    @field_validator("state_dir", "socket", "key_file", "cache_dir")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.abspath(path.expanduser()))

    @field_validator("socket")
    @classmethod
    def _fits_sun_path(cls, path: Path) -> Path:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"a socket path has at most {SOCKET_PATH_BYTES_MAX} bytes")
        return path

    @field_validator("socket_mode", mode="before")
    @classmethod
    def _octal(cls, value: Any) -> Any:
        return int(value, 8) if isinstance(value, str) else value

    @field_validator("bind_address", "advertise_address", "http_address")
    @classmethod
    def _to_ip(cls, value: str) -> str:
        return address_of(value) if value else value

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> str:
        parse_budget(str(value), machine_memory_bytes())
        return str(value)

    @field_validator("user_budget", "cache_budget", mode="before")
    @classmethod
    def _share(cls, value: Any) -> str:
        parse_budget(str(value), machine_memory_bytes())
        return str(value)

    @field_validator("http_users", "row_deltas", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("row_deltas")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if not pattern or '"' in pattern:
                raise ValueError(f"{pattern!r} is no pattern of keys: write model.emb*,model.table without brackets or quotes")
        return patterns

    @field_validator("http_users")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            uid_of(name)
        return names

    @model_validator(mode="after")
    def _together(self) -> Config:
        address = ipaddress.IPv4Address(self.bind_address)
        if address.is_unspecified and not self.advertise_address:
            raise ValueError(
                f"bind_address {address} needs advertise_address: which address do others reach this node at?"
            )
        if self.plain_loopback and not ipaddress.IPv4Address(self.advertise()).is_loopback:
            raise ValueError(
                f"plain_loopback is for loopback only, not {self.advertise()}: set key_file instead"
            )
        if self.compress and self.dedup:
            raise ValueError("compress or dedup, not both: what did not change is found by the sums of what was not compressed")
        if self.compress and find_spec("zstandard") is None:
            raise ValueError("compress needs zstandard: pip install 'ckptd[compress]'")
        if not ipaddress.IPv4Address(self.http_address).is_loopback:
            raise ValueError(f"http_address {self.http_address} is not a loopback address")
        return self

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # config_sources merges the others, and remembers which was which

    # --- what the daemon asks -----------------------------------------------------------------------------------
    def policy(self) -> Policy:
        """The core's knobs."""
        names = Policy.__dataclass_fields__.keys() - {"durable", "redundancy"}
        chosen = parse(self.redundancy) or Replicas(self.replicas)
        values = {name: getattr(self, name) for name in names}
        return Policy(**values, redundancy=chosen, durable=self.storage_root is not None)

    def memory_budget_bytes(self) -> int:
        return parse_budget(self.memory_budget, machine_memory_bytes())

    def cache_budget_bytes(self, whole_bytes: int) -> int:
        """whole_bytes: of the file system of ``cache_dir``."""
        return parse_budget(self.cache_budget, whole_bytes)

    def user_budget_bytes(self) -> int:
        """Of each user: his jobs' own slots, replicas and restores on this node."""
        return parse_budget(self.user_budget, self.memory_budget_bytes())

    def advertise(self) -> str:
        """The IPv4 address other nodes use."""
        return self.advertise_address or self.bind_address

    def bulk_mode_in_force(self) -> Literal["none", "aead"]:
        if self.bulk_mode != "auto":
            return self.bulk_mode
        return "none" if ipaddress.IPv4Address(self.advertise()).is_loopback else "aead"

    def http_file(self) -> Path:
        """Where the status page's host:port is written: beside the socket, readable by whoever may connect there."""
        return self.socket.with_suffix(HTTP_SUFFIX)

    def http_uids(self) -> tuple[int, ...]:
        return tuple(uid_of(name) for name in self.http_users)

    def with_identity(self) -> Config:
        """``node_id`` as given, else as kept in ``state_dir``, else made now and kept. Raises CkptdError."""
        return self if self.node_id else self.model_copy(update={"node_id": kept_node_id(self.state_dir)})
