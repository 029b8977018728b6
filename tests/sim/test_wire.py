"""What a simulated link carries, and what it refuses as the real one does (P14: a message that is too long is no message)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.messages import Certificate, LayoutReply
from ckptd.wire.codec import CONTROL_MESSAGE_BYTES_MAX
from ckptd.wire.outbox import OUTBOX_BYTES_MAX
from tests.sim.wire import SMALL_BYTES, Wire


def layouts(nbytes: int) -> LayoutReply:
    return LayoutReply(1, {"layout": bytes(nbytes)})


def test_a_message_takes_what_its_bytes_take_behind_what_was_sent_before() -> None:
    wire = Wire(bytes_s=1e6)
    first, second = (wire.seconds("a", "b", layouts(10**6), now=0.0) for _ in range(2))
    assert first is not None and second is not None
    assert 1.0 < first < 1.01 and 2.0 < second < 2.02
    other = wire.seconds("a", "c", layouts(10**6), now=0.0)
    assert other is not None and other < 1.01, "another link is another one"
    small = wire.seconds("a", "b", Certificate(1, 1, SnapshotId(1, 1), 0, 1, False), now=0.0)
    assert small is not None and small < SMALL_BYTES / 1e6, "zmq sends it in between"


def test_what_the_real_link_does_not_take_is_not_sent() -> None:
    wire = Wire(bytes_s=1e6)
    assert wire.seconds("a", "b", layouts(CONTROL_MESSAGE_BYTES_MAX), now=0.0) is None
    large = layouts(CONTROL_MESSAGE_BYTES_MAX - 1000)
    fit = OUTBOX_BYTES_MAX // wire.size(large)
    assert [wire.seconds("a", "b", large, now=0.0) is not None for _ in range(fit + 1)] == [True] * fit + [False]
    assert wire.refused == 2
    assert wire.seconds("a", "b", large, now=1000.0) is not None, "what waited is gone"
