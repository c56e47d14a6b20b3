"""Small, varied models of the zoo through its contract; `make zoo` runs all of them."""

from __future__ import annotations

import warnings

import pytest

from zoo.contract import Shortfall, check
from zoo.models import find

QUICK = ["tv:squeezenet1_1"]
SLOW = """
    tv:densenet121 tv:efficientnet_b0 tv:googlenet tv:mnasnet0_5 tv:mobilenet_v2 tv:mobilenet_v3_small tv:resnet18
    tv:regnet_y_400mf tv:resnext50_32x4d tv:shufflenet_v2_x0_5 seg:lraspp_mobilenet_v3_large timm:resnest14d
    timm:skresnet18 timm:res2net50_26w_4s timm:mixnet_s timm:repvgg_a0 timm:ghostnet_100 timm:convnext_atto
    timm:hgnetv2_b0 timm:fasternet_t0 timm:nf_regnet_b0 timm:vit_tiny_patch16_224 timm:levit_128s timm:mobilevit_xxs
    detbody:fasterrcnn_mobilenet_v3_large_fpn
"""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(it, marks=pytest.mark.slow) for it in SLOW.split())])
def test_contract(name: str) -> None:
    entry = find(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's models
        result = check(entry)
    assert result.status == "correct", result.detail
    assert result.shortfall(entry) is not Shortfall.OTHER, result.unprunable
