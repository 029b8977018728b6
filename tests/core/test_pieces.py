"""Pieces in columns, against each byte for itself (P1, P9, P16)."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.state_map import pieces as module
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.columns import Ints, pack
from ckptd.core.state_map.pieces import Form, Loads, Origin, Pieces, Placed
from tests.core.worlds import boxes_in, elements, flat_index, quick, solid_shapes, tilings

WHOLE = Box((0, 0), (4, 3))


def around(draw: st.DrawFn, box: Box) -> Box:
    """A box that ``box`` lies inside of."""
    grown = [(draw(st.integers(0, at)), draw(st.integers(0, 2))) for at in box.offsets]
    sizes = (at + size + more - begin for at, size, (begin, more) in zip(box.offsets, box.sizes, grown, strict=True))
    return Box(tuple(begin for begin, _ in grown), tuple(sizes))


def byte_of(stored: Box, index: Sequence[int], itemsize: int) -> int:
    """Where this element begins, if the box lies in one run."""
    return itemsize * flat_index(stored.sizes, [i - at for i, at in zip(index, stored.offsets, strict=True)])


def value(want: int, index: Sequence[int], itemsize: int) -> bytes:
    return bytes([1 + (want * 41 + hash((*index, 7)) + at) % 255 for at in range(itemsize)])


class Case:
    """Wants that are tiled, and each piece inside of a box that lies in one of two segments, in one buffer with the targets."""

    def __init__(self, draw: st.DrawFn) -> None:
        shapes = draw(st.lists(solid_shapes, min_size=1, max_size=3))
        self.wanted = [
            (draw(boxes_in(draw(st.sampled_from(shapes)), empty=False)), draw(st.sampled_from((1, 2, 4))))
            for _ in range(draw(st.integers(1, 6)))
        ]
        sources = [bytearray(draw(st.integers(0, 3))) for _ in range(2)]
        rows: list[tuple[int, int, int, int]] = []
        self.forms: list[Form] = []
        for want, (box, itemsize) in enumerate(self.wanted):
            for tile in draw(tilings(box.sizes)) or [Box.whole(box.sizes)]:
                inner = Box(tuple(a + b for a, b in zip(tile.offsets, box.offsets, strict=True)), tile.sizes)
                form = Form(inner, around(draw, inner))
                if form not in self.forms:
                    self.forms.append(form)
                segment = draw(st.integers(0, 1))
                rows.append((want, self.forms.index(form), segment, len(sources[segment])))
                sources[segment] += b"".join(value(want, index, itemsize) for index in elements(form.stored))
        self.placed = placed(draw(st.permutations(rows)), self.forms)
        self.sizes = [*map(len, sources)]
        self.memory = bytearray(8) + sources[0] + sources[1]
        self.segments = [8, 8 + len(sources[0])]
        self.flat = [draw(st.booleans()) for _ in self.wanted]
        self.begins: list[int] = []
        for box, itemsize in self.wanted:
            self.begins.append(len(self.memory))
            self.memory += bytes(box.volume * itemsize)


def placed(rows: Sequence[tuple[int, int, int, int]], forms: Sequence[Form]) -> Placed:
    want, form, segment, at = np.array(rows, np.int64).reshape(-1, 4).T
    return Placed(want, form, segment, at, forms)


@quick
@given(st.data(), st.sampled_from((0, 1, 3, module.MOVES_MAX)))
def test_every_byte_that_was_wanted_is_moved_or_left_to_be_copied_as_a_box(data: st.DataObject, most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MOVES_MAX", most)
        case = data.draw(st.composite(Case)())
        came = Placed.decode(msgpack.unpackb(msgpack.packb(case.placed.encode()), use_list=False))
        loads = Loads(case.wanted)
        loads.check(came, case.sizes)
        assert loads.lacking(len(case.wanted)) is None
        targets = [begin if flat else 0 for begin, flat in zip(case.begins, case.flat, strict=True)]
        moves, others = loads.moves(came, targets, case.segments)
    memory = bytearray(case.memory)
    for target, source, nbytes in moves.T.tolist():
        memory[target : target + nbytes] = case.memory[source : source + nbytes]
    for want, (box, stored), segment, at in others:
        outer, itemsize = case.wanted[want]
        for index in elements(box):
            source = case.segments[segment] + at + byte_of(stored, index, itemsize)
            target = case.begins[want] + byte_of(outer, index, itemsize)
            memory[target : target + itemsize] = case.memory[source : source + itemsize]
    assert memory[: case.begins[0]] == case.memory[: case.begins[0]], "what is read is not written to"
    expected = (b"".join(value(want, i, size) for i in elements(box)) for want, (box, size) in enumerate(case.wanted))
    assert memory[case.begins[0] :] == b"".join(expected)
    assert not any(case.flat[want] for want, *_ in others) or most < module.MOVES_MAX, "few runs of bytes are moved"


@quick
@given(st.data())
def test_spans_are_the_bytes_of_each_piece_one_after_the_other(data: st.DataObject) -> None:
    case = data.draw(st.composite(Case)())
    came = case.placed
    items: Ints = np.array([size for _, size in case.wanted], np.int64)[came.want]
    volumes: Ints = np.array([form.box.volume for form in case.forms], np.int64)[came.form]
    keys = dict.fromkeys(range(len(case.wanted)), "k")
    each = np.arange(len(came))
    taken = Pieces(came.want, came.form, came.segment, each, volumes * items, case.forms, ORIGINS, keys)
    for origin, group in taken.by_origin("own", "peer"):
        offsets, lengths = group.spans(came.at)
        begin = case.segments[origin.rank]
        spans = zip(offsets.tolist(), lengths.tolist(), strict=True)
        found = b"".join(case.memory[begin + at : begin + at + length] for at, length in spans)
        each_alone = ((piece, case.wanted[piece.want][1]) for piece in group)
        assert found == b"".join(value(piece.want, i, size) for piece, size in each_alone for i in elements(piece.box))
        assert {piece.source for piece in group} == {origin.source}
    assert {origin for origin, _ in taken.by_origin("peer")} <= {ORIGINS[1]}
    assert sum(len(group) for _, group in taken.by_origin("own", "peer")) == len(taken)
    alone = taken.largest_elements_first()
    assert [piece.stored for piece in alone.brought()] == [piece.box for piece in alone]
    assert alone.itemsize.tolist() == sorted(items.tolist(), reverse=True), "each begins on a multiple of its own element"


ORIGINS = [Origin("own", "a", 0), Origin("peer", "b", 1)]
ONE = [Form(Box((1, 0), (2, 3)), WHOLE)]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ((1, 0, 0, 0), ONE[0]),  # a want that there is not
        ((-1, 0, 0, 0), ONE[0]),
        ((0, 1, 0, 0), ONE[0]),  # a form that there is not
        ((0, 0, 1, 0), ONE[0]),  # a segment that there is not
        ((0, 0, -1, 0), ONE[0]),
        ((0, 0, 0, 1), ONE[0]),  # a byte beyond its end
        ((0, 0, 0, -1), ONE[0]),
        ((0, 0, 0, (1 << 63) - 1), ONE[0]),
        ((0, 0, 0, 0), Form(Box((3, 0), (2, 3)), Box((3, 0), (2, 3)))),  # outside of what is wanted
        ((0, 0, 0, 0), Form(Box((1, 0), (2, 3)), Box((2, 0), (2, 3)))),  # outside of what is stored
        ((0, 0, 0, 0), Form(Box((1, 0), (2, 3)), Box((0, 0), (1 << 62, 1 << 62)))),
        ((0, 0, 0, 0), Form(Box((1,), (2,)), Box((1,), (2,)))),  # of another tensor
    ],
)
def test_what_lies_outside_is_refused(row: tuple[int, int, int, int], form: Form) -> None:
    """Before anything is written: the plan is another process's word."""
    loads = Loads([(WHOLE, 4)])
    with pytest.raises(ValueError, match="piece"):
        loads.check(placed([row], [form]), [48])
    assert loads.lacking(1) == (0, 12)


def test_nothing_is_wanted() -> None:
    """Of a rank that holds objects alone."""
    none = np.empty(0, np.int64)
    assert not [*Pieces(none, none, none, none, none, [], [], {}).by_origin("own", "peer")]
    came, loads = Placed.decode(placed([], []).encode()), Loads([])
    loads.check(came, [])
    assert loads.lacking(0) is None
    moves, others = loads.moves(came, [], [])
    assert (moves.shape, len(others)) == ((3, 0), 0)


def test_what_lacks_is_named() -> None:
    loads = Loads([(Box((0,), (0,)), 4), (WHOLE, 4), (WHOLE, 4)])
    loads.check(placed([(1, 0, 0, 0)], ONE), [48])
    assert loads.lacking(1) is None
    assert loads.lacking(2) == (1, 6)
    loads.check(placed([(1, 0, 0, 0)], [Form(Box(at, (1, 3)), WHOLE) for at in ((0, 0), (3, 0))][:1]), [48])
    loads.check(placed([(1, 0, 0, 0)], [Form(Box((3, 0), (1, 3)), WHOLE)]), [48])
    assert loads.lacking(3) == (2, 12)


def damaged(what: str) -> list[object]:
    where, data, boxes = placed([(0, 0, 0, 0)], ONE).encode()
    if what == "a column less":
        return [where[1:], data, boxes]
    if what == "a longer column":
        columns = {name: np.zeros(1 + (name == "at"), np.int64) for name in module.COLUMNS}
        data, where = pack(columns)
        return [where, data, boxes]
    if what == "a column outside":
        return [where, data[:8], boxes]
    return [where, data, [[(1, 0), (-2, -3), (0, 0), (4, 3)]]]


@pytest.mark.parametrize("what", ["a column less", "a longer column", "a column outside", "a box that ends before it begins"])
def test_what_are_no_pieces_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"pieces|column"):
        Placed.decode(damaged(what))
