"""Widths as a value, as JSON, and the fingerprint that ties them to an architecture."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from dmcp.errors import WidthsError
from dmcp.widths import ChannelSpace, Widths, fingerprint


def widths(**changes: Any) -> Widths:
    fields: dict[str, Any] = {
        "channels": (("stem", 5), ("layer1.0.conv1", 3)),
        "input_shape": (3, 8, 8),
        "fingerprint": "0123456789abcdef",
    }
    return Widths(**fields | changes)


def test_widths_are_a_mapping_in_the_order_of_the_graph() -> None:
    some = widths()
    assert dict(some) == {"stem": 5, "layer1.0.conv1": 3}
    assert list(some) == ["stem", "layer1.0.conv1"]
    assert (len(some), some["stem"], some.get("conv"), "conv" in some) == (2, 5, None, False)
    with pytest.raises(KeyError, match="conv"):
        some["conv"]
    assert some.tensor().tolist() == [5, 3]
    assert some.tensor().dtype == torch.int64


def test_widths_are_frozen() -> None:
    with pytest.raises(AttributeError):
        widths().fingerprint = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        widths()["stem"] = 4  # type: ignore[index]
    with pytest.raises(AttributeError):
        ChannelSpace("conv", 3).size = 4  # type: ignore[misc]


def test_equality_and_hashing() -> None:
    assert widths() == widths()
    assert hash(widths()) == hash(widths())
    assert len({widths(), widths(), widths(channels=(("stem", 4), ("layer1.0.conv1", 3)))}) == 2
    assert widths() != widths(channels=(("stem", 5), ("layer1.0.conv1", 2)))
    assert widths() != widths(fingerprint="another")
    assert widths() == {"layer1.0.conv1": 3, "stem": 5}
    assert widths() != {"stem": 5}
    assert widths() != [("stem", 5), ("layer1.0.conv1", 3)]
    assert widths() != "widths"


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (), ((3, 8, 8), (1, 8, 8)), {"image": (3, 8, 8), "more": ((2,), None)}, None], ids=str
)
def test_json_and_back(shape: Any) -> None:
    some = widths(input_shape=shape)
    text = json.dumps(some.to_json())
    again = Widths.from_json(json.loads(text))
    assert again == some
    assert again.input_shape == shape  # tuples, not lists
    assert list(again) == list(some)
    assert json.dumps(again.to_json()) == text


def broken(**changes: Any) -> dict[str, Any]:
    return widths().to_json() | changes


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "widths",
        7,
        {},
        {"widths": {"stem": 5}},
        {key: value for key, value in broken().items() if key != "fingerprint"},
        {key: value for key, value in broken().items() if key != "input_shape"},
        broken(widths=None),
        broken(widths=[["stem", 5]]),
        broken(widths={"stem": 0}),
        broken(widths={"stem": -1}),
        broken(widths={"stem": 2.0}),
        broken(widths={"stem": "2"}),
        broken(widths={"stem": True}),
        broken(widths={"stem": 2**40}),
        broken(widths={"stem": None}),
        broken(widths={"stem": [2]}),
        broken(widths={1: 2}),
        broken(fingerprint=None),
        broken(fingerprint=7),
    ],
    ids=str,
)
def test_what_is_no_widths_file_is_refused(data: Any) -> None:
    with pytest.raises(WidthsError, match="not a widths file"):
        Widths.from_json(data)


# -- fingerprint


def net(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, hidden, 3), nn.BatchNorm2d(hidden), nn.Conv2d(hidden, 5, 1))


def test_the_fingerprint_is_of_names_and_shapes() -> None:
    one = net()
    mark = fingerprint(one)
    assert fingerprint(net()) == mark  # other weights
    assert fingerprint(copy.deepcopy(one).double().eval()) == mark
    assert fingerprint(one.requires_grad_(False)) == mark
    assert fingerprint(copy.deepcopy(one).to("meta")) == mark
    assert isinstance(mark, str) and len(mark) == 16


@pytest.mark.parametrize(
    "other",
    [
        net(7),
        nn.Sequential(*net(), nn.PReLU()),
        nn.Sequential(*list(net())[:2]),
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.Conv2d(6, 5, 1)),
        nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1)),
        nn.ModuleDict({"a": net()}),
    ],
    ids=["shape", "more", "less", "no statistics", "no bias", "names"],
)
def test_the_fingerprint_changes_with_the_architecture(other: nn.Module) -> None:
    assert fingerprint(other) != fingerprint(net())


def test_the_fingerprint_sees_buffers_and_all_names_of_tied_tensors() -> None:
    plain, buffered, tied = net(), net(), net()
    buffered.register_buffer("table", torch.zeros(3))
    assert fingerprint(buffered) != fingerprint(plain)
    outside = net()
    outside.register_buffer("table", torch.zeros(3), persistent=False)
    assert fingerprint(outside) == fingerprint(buffered)  # not of the state dict, but of the module
    tied.again = tied[0]
    assert fingerprint(tied) != fingerprint(plain)


def test_a_shape_that_is_nested_too_deeply_is_refused() -> None:
    shape: Any = 3
    for _ in range(40):
        shape = [shape]
    with pytest.raises(WidthsError, match="nested too deeply"):
        Widths.from_json(broken(input_shape=shape))
