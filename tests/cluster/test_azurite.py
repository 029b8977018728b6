"""A job whose checkpoints go into a container of Azure Blob Storage (Azurite), from daemon to restore."""

from __future__ import annotations

import pytest

from tests.cluster import test_bucket
from tests.cluster.nodes import Cluster
from tests.node import test_azurite
from tests.node.test_azurite import AzuriteServer
from tests.object_server import Fault

pytestmark = pytest.mark.chaos

objects = test_azurite.objects
test_durable_in_a_container_gives_the_step_back_after_everything_died = (
    test_bucket.test_durable_in_a_bucket_gives_the_step_back_after_everything_died
)


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (Fault(status=404, code="ContainerNotFound"), "make the container"),
        (Fault(status=403, code="AuthorizationPermissionMismatch"), "Storage Blob Data Contributor"),
    ],
    ids=["no container", "a role that was taken away"],
)
def test_a_container_that_goes_away_and_comes_back(
    nodes: Cluster, bucket: str, objects: AzuriteServer, fault: Fault, hint: str
) -> None:
    assert hint in test_bucket.goes_away_and_comes_back(nodes, bucket, objects, fault)
