"""One conformance suite for every Transport: TCP plain, TCP with AES-256-GCM, memory (design D4)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptd.wire.bulk import CHUNK_BYTES, TICKETS_MAX, Spans, Ticket, TransferError, Transport
from ckptd.wire.keys import ClusterKey
from ckptd.wire.memory_transport import MemoryNetwork, MemoryTransport
from ckptd.wire.tcp import TcpTransport
from tests.waiting import until

KEY = ClusterKey(bytes(32))
Make = Callable[[], Transport]


@pytest.fixture(params=["tcp none", "tcp aead", "memory"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    network, made = MemoryNetwork(), list[Transport]()

    def build() -> Transport:
        if request.param == "memory":
            made.append(MemoryTransport(network, bulk_key=KEY.bulk))
        else:
            made.append(TcpTransport("127.0.0.1", mode=request.param.split()[1], secret=KEY))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


@pytest.fixture
def sender(make: Make) -> Transport:
    return make()


@pytest.fixture
def receiver(make: Make) -> Transport:
    return make()


def noise(nbytes: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(nbytes))


SIZES = [0, 1, 63, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 12345]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("streams", [1, 3])
def test_the_bytes_arrive(sender: Transport, receiver: Transport, nbytes: int, streams: int) -> None:
    source, into = noise(nbytes), bytearray(nbytes)
    incoming = receiver.expect(memoryview(into), aad=b"snapshot 7")
    sender.push(incoming.ticket, [memoryview(source)], streams=streams)
    assert incoming.done.result(0) == nbytes  # push returns after the receiver knows
    assert into == source


def test_many_spans_of_all_sizes_become_one_row(sender: Transport, receiver: Transport) -> None:
    source, dice = memoryview(noise(CHUNK_BYTES * 2)), random.Random(2)
    spans, at = [source[:0]], 0
    while at < len(source):
        length = dice.choice([1, 7, 64, 5000, 200_000])
        spans.append(source[at : at + length])
        at += length
    spans += [source[5:5]]
    assert len(spans) > 50
    into = bytearray(len(source))
    incoming = receiver.expect(memoryview(into))
    sender.push(incoming.ticket, spans, streams=2)
    assert into == source


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("streams", [1, 3])
def test_the_witness_sees_every_byte_once_when_it_is_there_and_before_done(
    sender: Transport, receiver: Transport, nbytes: int, streams: int
) -> None:
    """P10: what it makes sums of is what stays in the buffer."""
    source, into = noise(nbytes), bytearray(nbytes)
    seen: list[tuple[int, int]] = []

    def witness(offset: int, length: int) -> None:
        assert into[offset : offset + length] == source[offset : offset + length]
        assert not incoming.done.done()
        seen.append((offset, length))

    incoming = receiver.expect(memoryview(into), witness=witness)
    sender.push(incoming.ticket, [memoryview(source)], streams=streams)
    assert incoming.done.result(0) == nbytes
    seen.sort()
    assert all(length > 0 for _, length in seen)
    assert [at for at, _ in seen] == [sum(n for _, n in seen[:i]) for i in range(len(seen))]
    assert sum(length for _, length in seen) == nbytes


def test_more_spans_than_one_system_call_takes(sender: Transport, receiver: Transport) -> None:
    source = memoryview(noise(5000 * 3))
    into = bytearray(len(source))
    incoming = receiver.expect(memoryview(into))
    sender.push(incoming.ticket, [source[i : i + 3] for i in range(0, len(source), 3)])
    assert into == source


def test_a_ticket_crosses_the_wire_as_bytes(sender: Transport, receiver: Transport) -> None:
    into = bytearray(3)
    incoming = receiver.expect(memoryview(into), aad=b"abc")
    ticket = Ticket.decode(incoming.ticket.encode())
    assert ticket == incoming.ticket
    assert ticket.address == receiver.address
    assert ticket.key.hex() not in repr(ticket)
    sender.push(ticket, [memoryview(b"xyz")])
    assert into == b"xyz"


def test_only_the_expected_part_of_a_buffer_is_written(sender: Transport, receiver: Transport) -> None:
    arena = bytearray(b"\xee" * 30_000)
    incoming = receiver.expect(memoryview(arena)[10_000:20_000])
    sender.push(incoming.ticket, [memoryview(bytes(10_000))])
    assert arena == b"\xee" * 10_000 + bytes(10_000) + b"\xee" * 10_000


def test_transfers_run_side_by_side_both_ways(sender: Transport, receiver: Transport) -> None:
    size = CHUNK_BYTES + 99
    pairs = [(sender, receiver, noise(size, i)) for i in range(3)] + [(receiver, sender, noise(size, 9))] * 1
    buffers = [bytearray(size) for _ in pairs]
    with ThreadPoolExecutor(len(pairs)) as pool:
        futures = []
        for (here, there, source), into in zip(pairs, buffers, strict=True):
            incoming = there.expect(memoryview(into))
            futures.append(pool.submit(here.push, incoming.ticket, [memoryview(source)], streams=2))
        for future in futures:
            future.result(20)
    assert buffers == [source for _, _, source in pairs]


@pytest.mark.parametrize("nbytes", [0, 9, 11])
def test_a_push_of_another_length_is_refused_before_it_starts(
    sender: Transport, receiver: Transport, nbytes: int
) -> None:
    incoming = receiver.expect(memoryview(bytearray(10)))
    with pytest.raises(TransferError, match="10"):
        sender.push(incoming.ticket, [memoryview(bytearray(nbytes))])
    assert not incoming.done.done()
    sender.push(incoming.ticket, [memoryview(bytearray(10))])


def test_a_ticket_serves_once(sender: Transport, receiver: Transport) -> None:
    into = bytearray(10)
    incoming = receiver.expect(memoryview(into))
    sender.push(incoming.ticket, [memoryview(b"0123456789")])
    with pytest.raises(TransferError, match="ticket"):
        sender.push(incoming.ticket, [memoryview(b"XXXXXXXXXX")])
    assert into == b"0123456789"


def test_a_ticket_expires(sender: Transport, receiver: Transport) -> None:
    incoming = receiver.expect(memoryview(bytearray(10)), ttl_s=0.05)
    with pytest.raises(TransferError, match="expired"):
        incoming.done.result(5)
    with pytest.raises(TransferError, match="ticket"):
        sender.push(incoming.ticket, [memoryview(bytes(10))])


def test_an_unknown_ticket_and_a_wrong_key_are_refused(sender: Transport, receiver: Transport) -> None:
    into = bytearray(b"untouched!")
    incoming = receiver.expect(memoryview(into))
    with pytest.raises(TransferError, match="does not know the ticket"):
        sender.push(replace(incoming.ticket, id=bytes(16)), [memoryview(bytes(10))])
    with pytest.raises(TransferError, match="does not accept the proof"):
        sender.push(replace(incoming.ticket, key=bytes(32)), [memoryview(bytes(10))])
    assert into == b"untouched!"
    assert not incoming.done.done()
    sender.push(incoming.ticket, [memoryview(bytes(10))])  # nobody used it up


def test_nobody_there(sender: Transport, make: Make) -> None:
    gone = make()
    incoming = gone.expect(memoryview(bytearray(10)))
    gone.close()
    with pytest.raises(TransferError, match="closed"):
        incoming.done.result(0)
    with pytest.raises(TransferError, match="cannot connect"):
        sender.push(incoming.ticket, [memoryview(bytes(10))])
    with pytest.raises(TransferError, match="closed"):
        gone.expect(memoryview(bytearray(1)))


def test_a_cancelled_expectation_is_over_at_once(sender: Transport, receiver: Transport) -> None:
    incoming = receiver.expect(memoryview(bytearray(10)))
    incoming.cancel()
    incoming.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        incoming.done.result(0)
    with pytest.raises(TransferError, match="ticket"):
        sender.push(incoming.ticket, [memoryview(bytes(10))])


def test_a_cancelled_push_ends_promptly_on_both_sides(sender: Transport, receiver: Transport) -> None:
    cancelled = threading.Event()
    cancelled.set()
    incoming = receiver.expect(memoryview(bytearray(10)), ttl_s=0.3)
    with pytest.raises(TransferError, match="cancelled"):
        sender.push(incoming.ticket, [memoryview(bytes(10))], cancelled=cancelled)
    with pytest.raises(TransferError):
        incoming.done.result(5)


def test_a_failed_transfer_lets_go_of_the_buffer(sender: Transport, receiver: Transport) -> None:
    """Whoever waits for done may free the memory."""
    into = bytearray(10)
    incoming = receiver.expect(memoryview(into))
    incoming.cancel()
    seen: Future[bool] = Future()
    incoming.done.add_done_callback(lambda _: seen.set_result(True))
    assert seen.result(5)
    del incoming
    until(lambda: _resizes(into), 5, "the transport still holds the buffer")


def _resizes(buffer: bytearray) -> bool:
    """A bytearray that somebody has a view of cannot change its length."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


def test_tickets_are_bounded(receiver: Transport) -> None:
    incoming = [receiver.expect(memoryview(bytearray(1))) for _ in range(TICKETS_MAX)]
    with pytest.raises(TransferError, match=str(TICKETS_MAX)):
        receiver.expect(memoryview(bytearray(1)))
    incoming[0].cancel()
    receiver.expect(memoryview(bytearray(1)))


def test_buffers_and_aad_are_checked(receiver: Transport) -> None:
    for buffer, aad in (
        (memoryview(b"readonly"), b""),
        (memoryview(bytearray(10))[::2], b""),
        (memoryview(bytearray(10)), bytes(5000)),
    ):
        with pytest.raises(TransferError):
            receiver.expect(buffer, aad=aad)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"\x80", bytes(9000), b"\x86" + b"\xa2id\xc4\x10" + bytes(16), Ticket(b"", b"", "", 1, "none").encode(),
     Ticket(bytes(16), bytes(32), "", -1, "none").encode(), Ticket(bytes(16), bytes(32), "", 1, "tls").encode()],  # type: ignore[arg-type]
)  # fmt: skip
def test_what_is_no_ticket_is_refused(data: bytes) -> None:
    with pytest.raises(TransferError):
        Ticket.decode(data)


@pytest.mark.parametrize("address", ["", "localhost:1", "127.0.0.1", "127.0.0.1:x", "host.example:80"])
def test_a_ticket_with_a_strange_address_is_refused(sender: Transport, address: str) -> None:
    ticket = Ticket(bytes(16), bytes(32), address, 0, "none")
    with pytest.raises(TransferError, match=r"address|cannot connect"):
        sender.push(ticket, [])


def test_spans_are_cut_where_asked() -> None:
    spans = Spans([memoryview(b"abc"), memoryview(b""), memoryview(b"defg"), memoryview(b"h")])
    assert spans.nbytes == 8
    for start in range(9):
        for stop in range(start, 9):
            assert b"".join(spans.cut(start, stop - start)) == b"abcdefgh"[start:stop]
