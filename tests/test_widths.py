"""Widths as a value, as JSON, and the fingerprint that ties them to an architecture."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from dmcp.tracing.widths import Widths, fingerprint


def widths(**changes: Any) -> Widths:
    channels = (("stem", 5), ("layer1.0.conv1", 3))
    return Widths(**{"channels": channels, "input_shape": (3, 8, 8), "fingerprint": "0123456789abcdef"} | changes)


def test_widths_are_a_frozen_mapping_in_the_order_of_the_graph() -> None:
    some = widths()
    assert list(some.items()) == [("stem", 5), ("layer1.0.conv1", 3)]
    assert (len(some), some["stem"], some.get("conv"), "conv" in some) == (2, 5, None, False)
    with pytest.raises(KeyError, match="conv"):
        some["conv"]
    assert some.tensor().tolist() == [5, 3] and some.tensor().dtype == torch.int64
    with pytest.raises(AttributeError):
        some.fingerprint = "other"  # type: ignore[misc]
    other = widths(channels=(("stem", 4), ("layer1.0.conv1", 3)))
    assert widths() == some and len({widths(), some, other}) == 2
    assert some != other and some != widths(fingerprint="another")
    assert some == {"layer1.0.conv1": 3, "stem": 5} and some != {"stem": 5} and some != "widths"


def test_json_and_back() -> None:
    for shape in ((3, 8, 8), (), ((3, 8, 8), (1, 8, 8)), {"image": (3, 8, 8), "more": ((2,), None)}, None):
        some = widths(input_shape=shape)
        text = json.dumps(some.to_json())
        again = Widths.from_json(json.loads(text))
        assert again == some and again.input_shape == shape  # tuples, not lists
        assert json.dumps(again.to_json()) == text


def net(hidden: int = 6, bias: bool = True, **norm: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, hidden, 3, bias=bias), nn.BatchNorm2d(hidden, **norm), nn.Conv2d(hidden, 5, 1))


def test_the_fingerprint_is_of_names_and_shapes() -> None:
    one, tied, buffered, temporary = net(), net(), net(), net()
    mark = fingerprint(one)
    for same in (net(), copy.deepcopy(one).double().eval(), one.requires_grad_(False), copy.deepcopy(one).to("meta")):
        assert fingerprint(same) == mark and len(mark) == 16
    tied.again = tied[0]
    buffered.register_buffer("table", torch.zeros(3))
    temporary.register_buffer("table", torch.zeros(3), persistent=False)
    others = [net(7), nn.Sequential(*net(), nn.PReLU()), net()[:2], net(bias=False), net(track_running_stats=False)]
    assert mark not in {fingerprint(it) for it in (*others, nn.ModuleDict({"a": net()}), buffered, tied)}
    assert fingerprint(buffered) == fingerprint(temporary)  # not of the state dict, but of the module
