"""What an object store or the way to it refused, in words: the one place where obstore's exceptions become ours."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Mapping

from ckptd.core.storage_root import AZURE
from ckptd.persist.storage.base import AWAY, NotFound, StorageError
from ckptd.persist.storage.object_service import token_ended

TEXT_CHARS_MAX = 300  # of what the store or the library said
_CODE = re.compile(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)(?:\s*RequestId:.*?)?</Message>)?", re.DOTALL)
_STATUS = re.compile(r"(?:status code:|\(code:) ([0-9]{3})")

_RIGHTS = (
    "the credentials need s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject and "
    "s3:AbortMultipartUpload below the prefix"
)
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the daemon, or give its node or pod a role"
_EXPIRED = "the credentials have run out: restart the daemon with new ones, or give its node or pod a role, which renews them"
_BUCKET = "make the bucket, or correct storage_root, AWS_ENDPOINT_URL and AWS_REGION; a running daemon goes on once it is back"
_SKEW = "this node's clock and the store's differ by more than 15 minutes: set this node's (chrony, ntpd)"
_ROOM = "raise the bucket's quota, or keep fewer checkpoints if keep_last is above 1"
_THROTTLED = "the store asks for fewer requests: spread jobs over more prefixes, or flush more rarely"
_LACKS = "the store lacks what ckptd needs: conditional PUT, If-None-Match as well as If-Match, and multipart uploads"
_ODD = "somebody has put an object there whose name has an empty or relative part (`a//b`, `a/../b`), which stops lists: delete it"
_FAILED = "the store failed in itself, or what stands before it: its log or status page says; daemons go on as soon as it answers"
_BROKEN = "answers break off, or 8 MiB take longer than a minute: look at the network from this node to the store"
_UNREACHABLE = "does {} answer from this node? daemons go on as soon as it does"

_STATUSES: dict[str, tuple[int, str]] = {
    "429": (errno.EBUSY, _THROTTLED),
    "500": (errno.EBUSY, _FAILED),
    "501": (errno.EOPNOTSUPP, _LACKS),
    "502": (errno.EBUSY, _FAILED),
    "503": (errno.EBUSY, _THROTTLED),
    "504": (errno.EBUSY, _FAILED),
    "507": (errno.ENOSPC, _ROOM),
}
# What the store's own code, or the status, means.
_S3: dict[str, tuple[int, str]] = {
    **_STATUSES,
    "NoSuchBucket": (AWAY, _BUCKET),
    "PermanentRedirect": (AWAY, "the bucket lies in another region: set AWS_REGION"),
    "AuthorizationHeaderMalformed": (errno.EACCES, "the bucket lies in another region: set AWS_REGION"),
    "RequestTimeTooSkewed": (errno.EACCES, _SKEW),
    "ExpiredToken": (errno.EACCES, _EXPIRED),
    "TokenRefreshRequired": (errno.EACCES, _EXPIRED),
    "InvalidAccessKeyId": (errno.EACCES, _CREDENTIALS),
    "SignatureDoesNotMatch": (errno.EACCES, _CREDENTIALS),
    "AccessDenied": (errno.EACCES, _RIGHTS),
    "QuotaExceeded": (errno.EDQUOT, _ROOM),
    "XMinioStorageFull": (errno.ENOSPC, _ROOM),
    "InternalError": (errno.EBUSY, _FAILED),
    "SlowDown": (errno.EBUSY, _THROTTLED),
    "TooManyRequests": (errno.EBUSY, _THROTTLED),
    "NotImplemented": (errno.EOPNOTSUPP, _LACKS),
    "401": (errno.EACCES, _CREDENTIALS),
    "403": (errno.EACCES, _RIGHTS),
}
_AZURE_RIGHTS = "an identity needs the role Storage Blob Data Contributor on the container; a SAS token read, write, delete, list"
_AZURE_CREDENTIALS = (
    "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN for the daemon, or give its node or pod an identity; where they are "
    "right, this node's clock is more than 15 minutes off (chrony, ntpd)"
)
_CONTAINER = (
    "make the container, or correct storage_root and AZURE_STORAGE_ACCOUNT_NAME; a running daemon goes on once it is back"
)
_AZURE_ENDPOINT = "the endpoint of AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_ENDPOINT,"
_ENDPOINT = "correct AZURE_STORAGE_ENDPOINT: some stores want the account's name in its path, as in http://host:10000/account"
_ARCHIVED = "a rule of the account has archived it: bring it back to an online tier, and keep the rule away from this prefix"
_AZURE: dict[str, tuple[int, str]] = {
    **_STATUSES,
    "ContainerNotFound": (AWAY, _CONTAINER),
    "ContainerBeingDeleted": (AWAY, _CONTAINER),
    "ResourceNotFound": (AWAY, _ENDPOINT),
    "AuthenticationFailed": (errno.EACCES, _AZURE_CREDENTIALS),
    "AuthorizationFailure": (errno.EACCES, f"{_AZURE_CREDENTIALS}; or the account's firewall keeps it out"),
    "AuthorizationPermissionMismatch": (errno.EACCES, _AZURE_RIGHTS),
    "InsufficientAccountPermissions": (errno.EACCES, _AZURE_RIGHTS),
    "InvalidAuthenticationInfo": (errno.EACCES, _AZURE_CREDENTIALS),
    "NoAuthenticationInformation": (errno.EACCES, _AZURE_CREDENTIALS),
    "PublicAccessNotPermitted": (errno.EACCES, _AZURE_CREDENTIALS),
    "ExpiredToken": (errno.EACCES, "the SAS token has ended: restart the daemon with a new one, or use an identity"),
    "BlobArchived": (errno.EIO, _ARCHIVED),
    "InternalError": (errno.EBUSY, _FAILED),
    "OperationTimedOut": (errno.EBUSY, _FAILED),
    "ServerBusy": (errno.EBUSY, _THROTTLED),
    "401": (errno.EACCES, _AZURE_CREDENTIALS),
    "403": (errno.EACCES, _AZURE_RIGHTS),
}
_SIGNED = {"AuthenticationFailed", "AuthorizationFailure"}  # of a signature, which may be a token's
# Of these no answer of the store is there to be understood.
_METADATA = ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "api/token")  # where a role's credentials are asked for
_NO_ANSWER = ("error sending request", "connection", "timed out", "timeout", "dns error")


def store_error(error: Exception, what: str, where: str) -> StorageError:
    """error: of obstore. One that is ours already stays as it is."""
    if isinstance(error, StorageError):
        return error
    told = str(error).partition("\n\nDebug source")[0]
    found, status = _CODE.search(told), _STATUS.search(told)
    code = found[1] if found else status[1] if status else ""
    known: Mapping[str, tuple[int, str]] = _AZURE if where.startswith(AZURE) else _S3
    if isinstance(error, FileNotFoundError) and code not in known:
        return NotFound(f"{what}: no such object", where=where, errno=errno.ENOENT)
    if any(place in told for place in _METADATA):
        text = "no credentials: none in the environment, and the node's metadata service gives none"
        return StorageError(f"{what}: {text}", where=where, hint=known["401"][1], errno=errno.EACCES)
    if not code and "response body" in told:
        return StorageError(f"{what}: the answer did not come whole: {_short(told)}", where=where, hint=_BROKEN, errno=AWAY)
    if not code and any(word in told.lower() for word in _NO_ANSWER):
        hint = _UNREACHABLE.format(_AZURE_ENDPOINT if known is _AZURE else "AWS_ENDPOINT_URL")
        return StorageError(f"{what}: the store does not answer: {_short(told)}", where=where, hint=hint, errno=AWAY)
    if "path segment" in told:
        return StorageError(f"{what}: {_short(told)}", where=where, hint=_ODD, errno=errno.EINVAL)
    if known is _AZURE and code in _SIGNED and token_ended(time.time()):
        code = "ExpiredToken"
    number, hint = known.get(code) or known.get(status[1] if status else "") or (errno.EIO, "")
    text = f"{found[1]}: {found[2] or ''}".rstrip(": ") if found else _short(told)
    return StorageError(f"{what}: {text}", where=where, hint=hint, errno=number)


def is_wordless(error: Exception) -> bool:
    """A refusal without a code: the answer to a HEAD has no body, which would say what the status means."""
    told = str(error)
    return _CODE.search(told) is None and "status code: 4" in told


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS_MAX else f"{line[:TEXT_CHARS_MAX]}..."
