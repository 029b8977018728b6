"""A void names what was written past a fence, to every rank, and no more than fits (D6)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.grants import REPEAT_S
from ckptd.core.protocol.written import KEYS_MAX, NAME_BYTES_MAX, OWNERS_MAX, bounded, checked, merged
from tests.core.granting import POLICY, steward
from tests.core.machines import EPOCH, Member, only, record_of, sent


def test_every_node_hears_what_was_written_also_one_that_has_sealed() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    node.others["b"].sealed(grant, 7, 1)
    mark = node.mark
    node.feed(ev.RankMissed(0, grant, "written", None, {"model": ("model.w",)}))
    found = [void.written for void in node.said(msg.Void, "b", mark) if void.grant == grant]
    assert found == [{"model": ("model.w",)}]


def test_what_another_rank_found_is_added_and_said_again() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    node.feed(ev.RankMissed(0, grant, "written", None, {"model": ("model.w",)}))
    mark = node.mark
    node.others["b"].missed(grant, 1, "written", {"model": ("model.b",), "ema": ()})
    (void,) = [void for void in node.said(msg.Void, "b", mark) if void.grant == grant]
    assert void.written == {"model": ("model.b", "model.w"), "ema": ()}


def test_it_is_said_until_everyone_has_answered() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    node.feed(ev.RankMissed(0, grant, "written", None, {"model": ("model.w",)}))
    mark = node.mark
    node.tick(REPEAT_S)
    assert [void.written for void in node.said(msg.Void, "b", mark)] == [{"model": ("model.w",)}]
    node.others["b"].missed(grant, 1, "void")
    mark = node.mark
    node.tick(REPEAT_S)
    assert [void for void in node.said(msg.Void, "b", mark) if void.grant == grant] == []


def test_a_node_tells_its_ranks_and_the_steward() -> None:
    node = Member(record_of("abc"), POLICY)
    node.slots(1, 1, 2)
    node.grant(7)
    done = node.order(msg.Void(EPOCH, 1, "rank 0 missed it", written={"model": ("model.w",)}))
    assert only(done, ins.TellWritten) == [ins.TellWritten(1, {"model": ("model.w",)})]
    done = node.feed(ev.RankMissed(1, 1, "written", None, {"ema": ("ema.w",)}))
    assert [missed.written for missed in sent(done, msg.Missed, "a")] == [{"ema": ("ema.w",)}]


def test_as_much_is_named_as_fits() -> None:
    keys = [f"model.{n}" for n in range(KEYS_MAX)]
    assert bounded({"model": keys}) == {"model": tuple(sorted(keys))}
    assert bounded({"model": [*keys, "one.more"]}) == {"model": ()}, "the owner in their place"
    assert bounded({"a": keys, "b": ["b.w"]}) == {"a": tuple(sorted(keys)), "b": ()}
    assert bounded({"model": ["w" * (NAME_BYTES_MAX + 1)]}) == {"model": ()}
    assert bounded({"m" * (NAME_BYTES_MAX + 1): ["w"], "model": ["w"]}) == {"model": ("w",)}
    assert len(bounded({f"o{n}": () for n in range(2 * OWNERS_MAX)})) == OWNERS_MAX


def test_all_of_an_owner_includes_its_keys() -> None:
    assert merged({"model": ()}, {"model": ("w",)}) == merged({"model": ("w",)}, {"model": ()}) == {"model": ()}
    assert merged({}, {"model": ("w",)}) == merged({"model": ("w",)}, {}) == {"model": ("w",)}
    assert merged({"model": ("a", "b")}, {"model": ("b", "c")}) == {"model": ("a", "b", "c")}


@pytest.mark.parametrize(
    "wrong",
    [
        None, [], "model", {1: []}, {"model": None}, {"model": "w"}, {"model": [1]}, {"model": ["w" * 2000]},
        {"model": ["w"] * (KEYS_MAX + 1)}, {f"o{n}": [] for n in range(OWNERS_MAX + 1)}, {"m" * 2000: []},
    ],
)  # fmt: skip
def test_what_no_client_sends_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="written"):
        checked(wrong)
    assert checked({"model": ["w", "b"]}) == {"model": ("b", "w")}
