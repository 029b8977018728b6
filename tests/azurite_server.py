"""Azurite, Microsoft's own stand-in for Azure Blob Storage, behind a server with faults.

It holds all in memory, and is a process of its own, which npm installs (`make .azurite/.installed`).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError
from azure.storage.blob import BlobServiceClient

from ckptd.demo.job import free_port
from tests.object_server import FaultyServer, Forward
from tests.waiting import until

PROGRAM = Path(__file__).resolve().parents[1] / ".azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "devstoreaccount1"
# The only account that it has; its key is public.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 10.0


def why_not() -> str:
    """The reason why it cannot run here; "": it can."""
    return "" if PROGRAM.exists() else "Azurite is not installed: make .azurite/.installed"


class AzuriteServer(FaultyServer):
    scheme = "az://"

    def __init__(self) -> None:
        port = free_port()
        command = [PROGRAM, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", str(port)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
        # It writes a file of settings into the directory that it is started in.
        self._folder = tempfile.TemporaryDirectory(prefix="azurite-")
        self._running = subprocess.Popen(
            command, cwd=self._folder.name, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        super().__init__(Forward(f"http://127.0.0.1:{port}"), together=True)
        # A client for whoever tests, which needs no way around the faults.
        connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        self.client: Any = BlobServiceClient.from_connection_string(
            f"{connection}BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};", retry_total=0
        )
        try:
            until(self._answers, START_TIMEOUT_S, "Azurite answers")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.client.close()
        super().close()
        os.killpg(self._running.pid, 15)
        self._running.wait(STOP_TIMEOUT_S)
        self._log.close()
        self._folder.cleanup()

    def environment(self) -> dict[str, str]:
        """Of whoever shall use it."""
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        return {"AZURE_STORAGE_ENDPOINT": f"{self.url}/{ACCOUNT}", **keys}

    def new_bucket(self) -> str:
        """Its name. Requests are counted from here on."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.client.create_container(name)
        self.requests.clear()
        return name

    def keys(self, root: str) -> list[str]:
        """Of all blobs below a storage root, relative to it."""
        name, _, prefix = root.removeprefix(self.scheme).partition("/")
        found = self.client.get_container_client(name).list_blobs(name_starts_with=f"{prefix}/")
        return [blob.name.removeprefix(f"{prefix}/") for blob in found]

    def read(self, root: str, key: str) -> bytes:
        """As Azure's own library has it. key: one of ``keys``."""
        found: bytes = self.blob(root, key).download_blob().readall()
        return found

    def blob(self, root: str, path: str) -> Any:
        """A client of one, from Azure's own library."""
        name, _, prefix = root.removeprefix(self.scheme).partition("/")
        return self.client.get_blob_client(name, f"{prefix}/{path}")

    def _answers(self) -> bool:
        assert self._running.poll() is None, Path(f"/proc/self/fd/{self._log.fileno()}").read_text()
        try:
            self.client.get_account_information()
        except AzureError:
            return False
        return True
