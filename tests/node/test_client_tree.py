"""Non-tensor state without pickle (P13): what goes in comes out, what cannot is named with its path."""

from __future__ import annotations

import collections
import datetime
import enum
import gc
import pathlib
import random
import subprocess
import sys
import types
import weakref
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from ckptd_client import tree
from ckptd_client.registry import Registry


class Colour(enum.Enum):
    RED = "r"
    NESTED = (1, 2)


class Access(enum.Flag):
    READ, WRITE = 1, 2


def hidden() -> enum.Enum:
    """A member of a class that nobody can find by its name."""

    class Hidden(enum.Enum):
        A = 1

    return Hidden.A


VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [True, -3, 2.5, 1 << 200, -(1 << 70), 1j, float("inf")],
    "text": ["ü", b"\x00\xff"],
    "tuples": (1, (2, [3, ()])),
    "int keys": {1: "a", -2: {3: 4}},
    "odd keys": {None: 1, (1, "x"): 2, 2.5: 3},
    "sets": [set(), {1, 2}, frozenset({(1, 2)})],
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "enum": [Colour.RED, Colour.NESTED, Access.READ | Access.WRITE],
    "numpy generator": np.random.default_rng(5).bit_generator.state,
    "path": pathlib.Path("/a/b"),
    "time": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
    "size": torch.Size([2, 0]),
    "dtype": [torch.bfloat16, torch.float8_e4m3fn],
    "scalars": [np.float32(1.5), np.float64(2.5), np.int64(3), np.bool_(True)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type(name: str) -> None:
    value = VALUES[name]
    back = tree.decode(tree.encode(value, "extra"))
    assert back == value
    assert repr(back) == repr(value)  # 1 == True == 1.0, so look at the types too


def test_arrays_and_tensors_come_back_bit_by_bit() -> None:
    arrays = [
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.array([np.nan, -0.0]),
        np.zeros((0, 2)),
        np.array(7),
    ]
    for array in arrays:
        back = tree.decode(tree.encode(array, "extra"))
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    tensors = [
        torch.randn(3, 2).t(),
        torch.tensor(2.0).to(torch.float8_e5m2),
        torch.empty(0, 3),
        torch.tensor([True]),
    ]
    for tensor in tensors:
        back = tree.decode(tree.encode([tensor], "extra"))[0]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert tree.tensor_bytes(back) == tree.tensor_bytes(tensor)


def test_views_that_conjugate_or_negate_come_back_as_what_they_show() -> None:
    shown = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for tensor in (shown, shown.imag):
        assert torch.equal(tree.decode(tree.encode([tensor], "extra"))[0], tensor)


def test_a_generator_goes_on_where_it_stood() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    back = tree.decode(tree.encode({"g": generator}, "extra"))["g"]
    assert torch.equal(torch.rand(5, generator=back), torch.rand(5, generator=generator))


def test_large_tensors_are_taken_out_and_found_again() -> None:
    big = torch.randn(tree.INLINE_BYTES_MAX)
    taken: dict[str, torch.Tensor] = {}

    def take(key: str, tensor: torch.Tensor) -> str:
        taken[key] = tensor
        return key

    data = tree.encode({"a": [big, torch.ones(2)], "b": big.clone()}, "extra.loader", take)
    assert set(taken) == {"extra.loader#0", "extra.loader#1"}
    assert len(data) < 200
    back = tree.decode(data, taken.__getitem__)
    assert back["a"][0] is big
    assert torch.equal(back["a"][1], torch.ones(2))


class Opaque:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)
FOREIGN: list[tuple[Any, str]] = [
    ({"loader": {"cache": Opaque()}}, "extra.loader.cache"),
    ({"hooks": [1, (2, lambda: None)]}, "extra.hooks[1][1]"),
    ({"d": collections.defaultdict(int)}, "extra.d"),
    ({"objects": np.array([Opaque()], dtype=object)}, "extra.objects"),
    ({"z": torch.zeros(2, dtype=torch.complex128)}, "extra.z: a tensor of torch.complex128 cannot"),
    ({"t": torch.eye(2).to_sparse()}, "extra.t: a Tensor (torch.sparse_coo) cannot"),
    ({"e": hidden()}, "extra.e: tests.node.test_client_tree.hidden.<locals>.Hidden is not found under this name"),
    ({"g": np.random.default_rng()}, "extra.g: a numpy Generator: save its bit_generator.state"),
    ({"r": random.Random(5)}, "extra.r: a Random of Python's: save its getstate()"),
    ({"g": np.random.RandomState()}, "extra.g: a numpy RandomState: save its get_state()"),
    ({Opaque(): 1}, "extra (key"),
    (LOOP, "nested deeper than"),
]


@pytest.mark.parametrize(("value", "path"), FOREIGN, ids=[path for _, path in FOREIGN])
def test_a_foreign_type_is_a_type_error_that_names_its_path_and_the_remedy(value: Any, path: str) -> None:
    with pytest.raises(TypeError) as caught:
        tree.encode(value, "extra")
    assert path in str(caught.value)
    assert "exclude=" in str(caught.value)


def test_register_finds_foreign_types_at_once_and_registers_nothing() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"position": 1, "cache": Opaque()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    registry = Registry()
    with pytest.raises(TypeError, match=r"extra\.loader\.cache"):
        registry.register({"fine": {"a": 1}, "extra": {"loader": Loader()}})
    assert registry.owners == {}


def test_a_list_that_contains_itself_is_refused_by_name() -> None:
    registry, found = Registry(), [torch.zeros(2)]
    registry.register({"found": found})
    found.append(found)
    calls = (lambda: registry.register({"found": LOOP}), lambda: registry.register({"found": found}), registry.look_again)
    for call in calls:
        try:
            said = str(call())
        except (TypeError, RecursionError) as error:
            said = str(error)
        assert said.startswith("found"), said
        assert "contains itself" in said


@pytest.mark.parametrize("size", [3, 5000, 0])
def test_a_tensor_that_occurs_twice_is_one_tensor_again(size: int) -> None:
    """Small and large ones, in whatever they lie; a view of another form, or another tensor of the same values, is another."""
    first, other = torch.arange(float(size)), torch.arange(float(size))
    taken: dict[str, torch.Tensor] = {}

    def take(key: str, tensor: torch.Tensor) -> str:
        taken[key] = tensor
        return key

    again = first.detach() if size else first
    value = {"a": first, "in": [(other, again), {"deep": first}], "cut": first[: size // 2], "last": other}
    blob = tree.encode(value, "x", take)
    found = tree.decode(blob, lambda key: taken[key].clone())
    assert found["a"] is found["in"][0][1] is found["in"][1]["deep"] and found["in"][0][0] is found["last"]
    assert len({id(found["a"]), id(found["last"]), id(found["cut"])}) == 3
    assert torch.equal(found["a"], first) and torch.equal(found["last"], other) and torch.equal(found["cut"], first[: size // 2])


def test_values_nested_too_deep_are_refused_and_end_no_process() -> None:
    """msgpack recursed for each extension, and the process was gone at some 200."""
    value: Any = ()
    for _ in range(tree.DEPTH_MAX - 1):
        value = (value,)
    blob = tree.encode(value, "x")
    assert tree.decode(blob) == value
    with pytest.raises(tree.ForeignType, match=r"x.*nested deeper than 100"):
        tree.encode(((value,),), "x")
    for _ in range(10 * tree.DEPTH_MAX):
        blob = msgpack.packb(msgpack.ExtType(tree.TUPLE, blob))
    with pytest.raises(ValueError, match="deeper than 100"):
        tree.decode(blob)


def test_what_was_decoded_is_kept_by_nobody() -> None:
    blob = tree.encode([torch.ones(3)], "x")
    gc.disable()
    try:
        found = weakref.ref(tree.decode(blob)[0])
        assert found() is None
    finally:
        gc.enable()


def test_a_number_of_no_tensor_is_a_value_error() -> None:
    for number in (0, -1, True, "a", None):
        with pytest.raises(ValueError, match="does not parse"):
            tree.decode(msgpack.packb(msgpack.ExtType(tree.SAME, msgpack.packb(number))))


def test_garbage_is_a_value_error() -> None:
    ext = msgpack.ExtType
    wrong = [
        b"",
        b"\xc1",
        msgpack.packb(ext(99, b"\xc0")),
        msgpack.packb(ext(tree.ENUM, msgpack.packb(["os", "x", 1]))),
    ]
    wrong.append(msgpack.packb(ext(tree.NDARRAY, msgpack.packb([1, 2]))))
    wrong.append(msgpack.packb(ext(tree.DTYPE, msgpack.packb("load"))))
    for data in wrong:
        with pytest.raises(ValueError, match=r"."):
            tree.decode(data)


def test_an_enum_is_never_imported_because_a_file_says_so() -> None:
    name = "antigravity"  # importing it would open a browser
    data = msgpack.packb(msgpack.ExtType(tree.ENUM, msgpack.packb([name, "Enum", 1])))
    with pytest.raises(ValueError, match="not imported"):
        tree.decode(data)
    assert name not in sys.modules


def test_equal_sets_are_equal_bytes_in_processes_with_other_hash_seeds() -> None:
    code = "from ckptd_client import tree; print(tree.encode({'s': set('abcdefgh')}, 'x').hex())"
    environment = {"PYTHONHASHSEED": "12345"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == tree.encode({"s": set("abcdefgh")}, "x").hex()


def test_an_enum_is_looked_up_without_running_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: a module's own __getattr__ may import whatever it likes; state from a file does not reach it."""
    asked: list[str] = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    body = msgpack.packb(["lazy_module", "submodule.Colour", "r"])
    with pytest.raises(ValueError, match="not imported"):
        tree.decode(msgpack.packb(msgpack.ExtType(tree.ENUM, body)))
    assert asked == []


def test_a_module_that_another_thread_is_importing_fails_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports numpy.ma at leisure, and a snapshot failed of that."""
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))
    assert tree.decode(tree.encode(np.arange(3), "here")).tolist() == [0, 1, 2]
