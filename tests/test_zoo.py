"""Small, varied models of the zoo through its contract; `make zoo` runs all of them."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch

from dmcp import ChannelGraph
from zoo import page
from zoo.contract import Result, Shortfall, check, draw, worst_error
from zoo.models import ENTRIES, find, select
from zoo.workers import WorkerError, isolated

SMALL = [
    "tv:densenet121",
    "tv:efficientnet_b0",
    "tv:googlenet",
    "tv:mnasnet0_5",
    "tv:mobilenet_v2",
    "tv:mobilenet_v3_small",
    "tv:regnet_y_400mf",
    "tv:resnet18",
    "tv:resnext50_32x4d",
    "tv:shufflenet_v2_x0_5",
    "tv:squeezenet1_1",
    "seg:lraspp_mobilenet_v3_large",
    "detbody:fasterrcnn_mobilenet_v3_large_fpn",
    "timm:resnest14d",
    "timm:skresnet18",
    "timm:res2net50_26w_4s",
    "timm:mixnet_s",
    "timm:repvgg_a0",
    "timm:ghostnet_100",
    "timm:convnext_atto",
    "timm:hgnetv2_b0",
    "timm:fasternet_t0",
    "timm:nf_regnet_b0",
    "timm:vit_tiny_patch16_224",
    "timm:levit_128s",
    "timm:mobilevit_xxs",
]


LONG = {  # seconds each; `make zoo` has them, too, and test_invariants some of torchvision's
    "tv:densenet121",
    "tv:efficientnet_b0",
    "tv:googlenet",
    "tv:mnasnet0_5",
    "tv:mobilenet_v2",
    "tv:mobilenet_v3_small",
    "tv:regnet_y_400mf",
    "tv:resnet18",
    "tv:resnext50_32x4d",
    "tv:shufflenet_v2_x0_5",
    "seg:lraspp_mobilenet_v3_large",
    "timm:ghostnet_100",
    "timm:res2net50_26w_4s",
    "timm:mixnet_s",
    "timm:mobilevit_xxs",
    "timm:vit_tiny_patch16_224",
    "timm:convnext_atto",
    "timm:hgnetv2_b0",
    "timm:fasternet_t0",
    "timm:nf_regnet_b0",
    "timm:levit_128s",
    "timm:repvgg_a0",
    "timm:skresnet18",
    "timm:resnest14d",
}


@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.slow if it in LONG else ()) for it in SMALL])
def test_contract(name: str) -> None:
    entry = find(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's models
        result = check(entry)
    assert result.status == "correct", result.detail
    assert result.shortfall(entry) is not Shortfall.OTHER, result.unprunable


def test_memory_that_is_not_what_the_cut_network_holds_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    count = ChannelGraph.memory
    monkeypatch.setattr(ChannelGraph, "memory", lambda graph, widths=None: count(graph))  # whole, whatever is cut
    result = check(find("tv:squeezenet1_1"))
    assert result.status == "wrong" and re.fullmatch(r"memory [\d]+ are really [\d]+", result.detail)


def test_the_list_is_the_tables() -> None:
    families = {family: sum(entry.family == family for entry in ENTRIES) for family in page.FAMILIES}
    assert families == {"tv": 80, "seg": 6, "detbody": 7, "timm": 147}
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert [entry.name for entry in select("tv:vgg1?")] == ["tv:vgg11", "tv:vgg13", "tv:vgg16", "tv:vgg19"]


def test_draw_leaves_something_out_wherever_it_can() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert draw([1, 2, 3], generator) == [1, 1, 2]
        assert all(32 <= width < 64 for width in draw([64] * 20, generator))


def test_error_is_that_of_the_worst_output() -> None:
    reference = [torch.tensor([[0.0], [100.0]]), torch.tensor([[0.0], [1.0]])]
    result = [reference[0], torch.tensor([[0.0], [1.5]])]
    assert worst_error(result, reference) == 0.5
    assert worst_error(reference[:1], reference) == float("inf")
    assert worst_error([torch.full((2, 1), torch.nan)], reference[1:]) == float("inf")


def test_page_names_what_falls_short() -> None:
    results = {
        "tv:resnet18": Result(name="tv:resnet18", status="wrong", detail="differs", seconds=1.0, share=1.0),
        "tv:vgg11": Result(
            name="tv:vgg11", status="correct", seconds=3.0, share=0.5, unprunable={"too short (x at a.b)": 3}
        ),
    }
    text = page.write(results, None, "python -m zoo")
    assert "tv:resnet18: wrong: differs" in text
    assert "tv:vgg11: 50.0 % instead of 100 %, 0 spaces instead of 10;" in text and "too short ×3" in text
    assert "| **all** | 2 | 1 | 1 | 0 | 0 | 1 | 1 | 2 | 2.0 | 3.0 |" in text


def test_shortfall_names_the_reason() -> None:
    entry = find("timm:vit_tiny_patch16_224")  # 100 %, 25 spaces
    found = Result(name=entry.name, status="correct", seconds=1.0, share=0.98, spaces=24)
    assert replace(found, share=0.991).shortfall(entry) is None
    assert replace(found, loose_share=1.0).shortfall(entry) is Shortfall.NORMS
    assert (
        replace(found, unprunable={"as weight standardization does": 1}).shortfall(entry) is Shortfall.STANDARDIZATION
    )
    assert replace(found, loose_spaces=25).shortfall(entry) is Shortfall.TOTAL
    assert found.shortfall(entry) is Shortfall.OTHER


def test_worker_that_dies_is_reported() -> None:
    with pytest.raises(WorkerError, match="process died"):
        isolated(_die, find("tv:resnet18"), 60)


def _die(entry: object) -> None:
    import os

    os._exit(3)
