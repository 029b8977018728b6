"""The way to a bucket: which service it is of, and how often and how long it is asked (docs/OPERATIONS.md, Object stores)."""

from __future__ import annotations

import errno
import os
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qs

from obstore.store import AzureStore, S3Store

from ckptd.core.storage_root import AZURE, bucket_and_prefix
from ckptd.persist.storage.base import StorageError

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config

RETRIES_MAX = 6  # of one request, by obstore, with exponential backoff and jitter
RETRY_FIRST_S, RETRY_PAUSE_MAX_S = 0.1, 5.0
RETRY_WITHIN_S = 60.0
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 60.0  # of one request with its body: a part, a range

AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
AZURE_HINT = "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN or a role, for the daemon"

Service: TypeAlias = S3Store | AzureStore


def connect(root: str) -> Service:
    """Credentials, endpoint and region as the service's own tools find them in the environment, or from the node's role. Raises
    StorageError where it is plain that there is no way."""
    bucket, prefix = bucket_and_prefix(root)
    if not root.startswith(AZURE):
        config: S3Config = {} if os.environ.get("AWS_CHECKSUM_ALGORITHM") else {"checksum_algorithm": "SHA256"}
        return S3Store(bucket, prefix=prefix or None, config=config, client_options=_client(AWS_ENDPOINTS), retry_config=_retries())
    endpoint = _first(AZURE_ENDPOINTS).rstrip("/")  # as Azure shows it, it ends in a slash
    account: AzureConfig = {"endpoint": endpoint} if endpoint else {}
    client = _client(AZURE_ENDPOINTS)
    try:
        return AzureStore(bucket, prefix=prefix or None, config=account, client_options=client, retry_config=_retries())
    except Exception as error:
        text = str(error).partition("\n")[0].partition("error: ")[2]
        if os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
            text += " (AZURE_STORAGE_CONNECTION_STRING is not read)"
        raise StorageError(f"no way to the storage account: {text}", where=root, hint=AZURE_HINT, errno=errno.EACCES) from error


def token_ended(now_s: float) -> bool:
    """Does the environment's SAS token say that its time is over?"""
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN") or os.environ.get("AZURE_STORAGE_SAS_KEY") or ""
    try:
        ends = datetime.fromisoformat(parse_qs(token.lstrip("?"))["se"][0].replace("Z", "+00:00"))
    except (KeyError, ValueError):
        return False
    return (ends if ends.tzinfo else ends.replace(tzinfo=timezone.utc)).timestamp() <= now_s


def _first(names: tuple[str, ...]) -> str:
    return next(filter(None, map(os.environ.get, names)), "")


def _client(endpoints: tuple[str, ...]) -> ClientConfig:
    return {
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "allow_http": _first(endpoints).startswith("http://"),
    }


def _retries() -> RetryConfig:
    return {
        "max_retries": RETRIES_MAX,
        "retry_timeout": timedelta(seconds=RETRY_WITHIN_S),
        "backoff": {
            "init_backoff": timedelta(seconds=RETRY_FIRST_S),
            "max_backoff": timedelta(seconds=RETRY_PAUSE_MAX_S),
            "base": 2,
        },
    }
