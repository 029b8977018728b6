"""The rule language (D18): where what a rank holds lies in the logical tensor, against cutting a real one by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, Client, copied, numbered, own, padded, shard
from ckptd_client.rules import Axis, laid, text_of
from ckptd_client.runs import boxes_of

from tests.node.rank_daemon_double import RankDaemonDouble


def axes_at(**at: tuple[int, int]) -> Any:
    """Name -> (ranks, own place)."""
    return lambda over: Axis(tuple(range(at[over][0])), at[over][1])


def wrong(whole: torch.Tensor, rule: Any, local: torch.Tensor, **at: tuple[int, int]) -> list[Any]:
    """Boxes that hold something else in ``whole`` than this rank has where the rule says; and what is in none of them. Elements
    below zero are padding."""
    found = laid("w", rule, tuple(local.shape), axes_at(**at))
    if found.shape != tuple(whole.shape):
        return [found.shape]
    differing: list[Any] = []
    covered = torch.zeros(local.shape, dtype=torch.int64)
    for box, where in boxes_of(found.runs, found.shape):
        here = tuple(slice(start, start + size) for start, size in zip(where, box.sizes, strict=True))
        there = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
        covered[here] += 1
        differing += [] if torch.equal(local[here], whole[there]) else [box]
    return differing + ([] if torch.equal(covered, (local >= 0).long()) else [covered])


def test_a_part_of_each_of_several_as_torch_chunk_cuts() -> None:
    """Fused query, key and value under tensor parallelism: each is cut by itself."""
    whole = torch.arange(20 * 3.0).view(20, 3)
    q, k, v = whole.split((12, 4, 4))
    for at in range(2):
        mine = torch.cat([part.chunk(2)[at] for part in (q, k, v)])
        assert wrong(whole, shard(0, over="tp", parts=(12, 4, 4)), mine, tp=(2, at)) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_cuts_one_inside_the_other(seed: int) -> None:
    """By indices: each cut is made on a list of numbers, in the plainest way there is."""
    draw = random.Random(seed)
    ranks = {"tp": draw.randint(1, 4), "dp": draw.randint(1, 3)}
    unit, dims = draw.randint(1, 3), draw.randint(1, 3)
    sizes = [unit * draw.randint(1, 12) for _ in range(dims)]
    whole = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    dim = draw.randrange(dims)
    split = unit * draw.randint(0, sizes[dim] // unit)
    parts = (split, sizes[dim] - split)
    other = draw.randrange(dims)
    for tp in range(ranks["tp"]):
        for dp in range(ranks["dp"]):
            def even(index: list[int], count: int, at: int) -> list[int]:
                units = [index[i : i + unit] for i in range(0, len(index), unit)]
                base, more = divmod(len(units), count)
                begin = at * base + min(at, more)
                return [i for one in units[begin : begin + base + (at < more)] for i in one]

            index = list(range(sizes[dim]))
            kept = even(index[:split], ranks["tp"], tp) + even(index[split:], ranks["tp"], tp)
            local = whole.index_select(dim, torch.tensor(kept, dtype=torch.long))
            have = local.shape[other]
            share = -(-have // ranks["dp"])
            local = local.narrow(other, min(dp * share, have), max(0, min(share, have - dp * share)))
            rule = [
                shard(dim, over="tp", parts=parts, widths="even", unit=unit),
                shard(other, over="dp", parts=(have,)) if other != dim else shard(other, over="dp", parts=(len(kept),)),
            ]
            assert wrong(whole, rule, local, tp=(ranks["tp"], tp), dp=(ranks["dp"], dp)) == []


def test_widths_and_orders() -> None:
    whole = torch.arange(10.0)
    assert wrong(whole, shard(0, over="tp", widths=(7, 0, 3)), whole[7:7], tp=(3, 1)) == []
    assert wrong(whole, shard(0, over="tp", widths=(7, 0, 3)), whole[7:], tp=(3, 2)) == []
    assert wrong(whole, shard(0, over="tp", parts=(4, 6), widths=((4, 0), (1, 5))), whole[[0, 1, 2, 3, 4]], tp=(2, 0)) == []
    assert wrong(whole, shard(0, over="ep", unit=2, order=((4, 0), (1, 2, 3))), whole[[8, 9, 0, 1]], ep=(2, 0)) == []
    assert wrong(whole, shard(0, over="ep", unit=2, order=((4, 0), (1, 2, 3))), whole[2:8], ep=(2, 1)) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (own("mean"), 'own("mean")'), (shard(0, over="tp"), 'shard(0, "tp")'),
        ([shard(-1, over="tp", parts=[4, 6], unit=2), padded(0, 10), copied("dp")],
         'shard(-1, "tp", parts=(4, 6), unit=2) padded(0, 10) copied("dp")'),
        (shard(0, over="tp", widths="even"), 'shard(0, "tp", widths=even)'), (copied(object()), "copied(object)"),
    ],
)  # fmt: skip
def test_a_rule_as_text(rule: Any, text: str) -> None:
    """The same on all ranks, whatever group it is over."""
    assert text_of(rule) == text


def test_what_was_made_longer_is_dropped() -> None:
    """A vocabulary of 10 on 3 ranks, made 12 long."""
    whole = torch.arange(20.0).view(10, 2)
    longer = torch.cat([whole, torch.full((2, 2), -1.0)])
    rule = [shard(0, over="tp"), padded(0, 10)]
    for at in range(3):
        assert wrong(whole, rule, longer.chunk(3)[at], tp=(3, at)) == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (shard(0, over="tp", parts=(9,)), "should have 5 of a dimension of 9, and has 4"),
        (shard(0, over="tp", parts=(4, 5), unit=2), "a part of 5 is no whole number of units of 2"),
        (shard(0, over="tp", widths=(3, 3, 3)), "widths for 3 ranks, and 2 have a part each"),
        (shard(2, over="tp"), "there is no dimension 2"),
        ([shard(0, over="tp"), padded(0, 9)], "padded to 8 in dimension 0, which is 9 long in truth"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: Any, said: str) -> None:
    with pytest.raises(CkptdError, match=said):
        laid("w", rule, (4, 3), axes_at(tp=(2, 0)))


@pytest.mark.parametrize("bad", [{"order": ((0, 2), (2,))}, {"unit": 0}, {"order": ((0,),), "parts": (3,)}, {"widths": "odd"}])
def test_a_cut_that_is_none(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"order|unit|widths"):
        shard(0, over="tp", **bad)


def test_registering_names_what_does_not_fit(daemon: RankDaemonDouble) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with Client.connect("job", socket=daemon.path) as client:
        for rules, said in (
            ({"model.0.wight": copied("tp")}, "fits none of"),
            ({"*.weight": shard(0, over="tp")}, "no mesh with names was registered"),
            ({"*.weight": padded(0, 3), "model.*": padded(0, 2)}, "two rules for it"),
            ({"*.weight": padded(0, 5)}, "which is 5 long in truth"),
            ({"*.weight": "mean"}, "'mean' is no rule"),
            ({"*.weight": own}, "the function own is no rule"),
            ({"*.weight": []}, "is no rule"),
            ({"*.weight": [padded(0, 3), "tp"]}, "is no rule"),
        ):
            with pytest.raises(CkptdError, match=said):
                client.register(model=model, rules=rules)


def test_padding_is_not_saved_and_zero_after_a_restore(daemon: RankDaemonDouble) -> None:
    def training(size: int) -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(size)
        model = torch.nn.Embedding(size, 300)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = training(128)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=optimizer, rules={"model.weight": padded(0, 100)})
        client.restore()
        model(torch.arange(128)).square().sum().backward()
        optimizer.step()
        assert client.snapshot(1, must=True).wait("durable", 30) == "durable"
    assert {f.shape for f in daemon.held[1, 1][0].layout.fragments if f.key.endswith(("weight", "exp_avg"))} == {(100, 300)}
    for size in (100, 112):
        fresh, its = training(size)
        if size == 112:
            fresh(torch.arange(size)).sum().backward()
            its.step()
        with Client.connect("job", socket=daemon.path) as client:
            client.register(model=fresh, optimizer=its, rules={"model.weight": padded(0, 100)})
            assert client.restore() == 1
        assert torch.equal(fresh.weight[:100], model.weight[:100])
        moments = its.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
        assert moments[0].shape == (size, 300)
        assert torch.equal(moments[0][:100], moments[1][:100])
        assert not fresh.weight[100:].any()
        assert not moments[0][100:].any()


def test_numbers_of_layers_go_on_where_the_stage_before_ended() -> None:
    renamed = numbered("layers.{}", 4)
    assert renamed("model.layers.0.weight") == "model.layers.4.weight"
    assert renamed("model.layers.11.mlp.layers.0.bias") == "model.layers.15.mlp.layers.0.bias"
    assert renamed("model.sublayers.0.weight") == "model.sublayers.0.weight"
    assert renamed("model.layers.weight") == "model.layers.weight"
    assert numbered("experts.{}.w", 2)("m.experts.1.w") == "m.experts.3.w"
    with pytest.raises(ValueError, match="says where the number is"):
        numbered("layers", 1)
