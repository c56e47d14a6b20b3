"""transformers, segmentation_models_pytorch, Lightning and Accelerate: the blocks of the cookbook, and more models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
import transformers
from nets import randomise

import dmcp

pytestmark = pytest.mark.filterwarnings("default")
RunBlock = Callable[[str], dict[str, Any]]
SMALL = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_labels": 4}
BACKBONE = transformers.ResNetConfig(**SMALL, embedding_size=16, out_features=["stage1", "stage2", "stage3", "stage4"])
MODELS = {  # spaces, and the model
    "ResNetForImageClassification": (12, transformers.ResNetConfig(**SMALL, embedding_size=16)),
    "RegNetForImageClassification": (17, transformers.RegNetConfig(**SMALL, embedding_size=16, groups_width=16)),
    "MobileNetV2ForImageClassification": (25, transformers.MobileNetV2Config(depth_multiplier=0.35, num_labels=4)),
    "ConvNextForImageClassification": (4, transformers.ConvNextConfig(**SMALL)),  # its stream is under LayerNorms
    "SegformerForSemanticSegmentation": (16, transformers.SegformerConfig(**SMALL, decoder_hidden_size=32)),
    "UperNetForSemanticSegmentation": (
        23,
        transformers.UperNetConfig(backbone_config=BACKBONE, hidden_size=32, num_labels=4, auxiliary_in_channels=48),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    spaces, config = MODELS[name]
    model = randomise(getattr(transformers, name)(config))
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    graph = dmcp.trace(model, x)
    assert len(graph.spaces) == spaces and dmcp.verify(model, graph, x) < 1e-12
    widths = graph.widths([max(1, 2 * space.size // 3) for space in graph.spaces])
    small: Any = dmcp.cut(model, graph, widths).eval()
    small.save_pretrained(tmp_path / "pruned")
    dmcp.save(small, widths, tmp_path / "pruned")
    fresh = type(model)(type(config).from_pretrained(tmp_path / "pruned"))
    again = dmcp.load(tmp_path / "pruned", fresh).eval()
    assert torch.equal(again(x).logits, small(x).logits)


def test_the_block_of_transformers(run_block: RunBlock) -> None:
    names = run_block("transformers")
    result, again, model = names["result"], names["again"], names["model"]
    assert result.graph.macs(result.widths) <= 0.5 * result.graph.macs() and type(again) is type(model)
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(again.eval()(x).logits, result.model.eval()(x).logits)
    arguments = transformers.TrainingArguments("trained", max_steps=2, use_cpu=True, report_to="none")
    samples: Any = [{"pixel_values": image, "labels": 1} for image in torch.rand(16, 3, 32, 32)]
    transformers.Trainer(again, arguments, train_dataset=samples).train()
    assert not torch.equal(again.eval()(x).logits, result.model(x).logits)


def test_the_block_of_segmentation_models(run_block: RunBlock, tmp_path: Path) -> None:
    result = run_block("smp")["result"]
    assert type(result.model) is smp.Unet and result.graph.macs(result.widths) <= 0.5 * result.graph.macs()
    result.model.save_pretrained(tmp_path)
    dmcp.save(result.model, result.widths, tmp_path)
    assert dmcp.load(tmp_path, smp.Unet("resnet18", encoder_weights=None, classes=3))


def check_loop(names: dict[str, Any]) -> None:
    """All steps were taken, and what was found is inside the budget."""
    searcher = names["searcher"]
    assert searcher.at + 1 == searcher.total == 2 * len(names["data"])
    assert dmcp.trace(names["small"], torch.zeros(2, 3, 32, 32)).macs() <= 0.5 * searcher.net.graph.macs()


def test_the_block_of_accelerate(run_block: RunBlock) -> None:
    check_loop(run_block("accelerate"))


def test_the_block_of_lightning(run_block: RunBlock) -> None:
    """It also goes on from a checkpoint, with the same bits."""
    names = run_block("lightning")
    check_loop(names)
    torch.manual_seed(0)
    torch.rand(64, 3, 32, 32)  # the data of the block, so that the network is the same
    config, data = names["config"], names["data"]

    def fresh() -> Any:
        return names["Search"](names["resnet18"](num_classes=4), torch.zeros(2, 3, 32, 32), config, len(data))

    module = fresh()
    for epochs, path in ((1, None), (2, "half.ckpt")):
        trainer = names["lightning"].Trainer(max_epochs=epochs, accelerator="cpu", logger=False)
        trainer.fit(module, data, ckpt_path=path)
        trainer.save_checkpoint("half.ckpt")
        found, module = module.searcher, fresh()
    assert torch.equal(found.net.alpha, names["searcher"].net.alpha)


def test_the_block_of_detectors(run_block: RunBlock) -> None:
    names = run_block("detectors")
    detector, boxes = names["detector"], names["boxes"]
    losses = detector(list(torch.rand(2, 3, 50, 60)), [boxes, boxes])
    sum(losses.values()).backward()
    assert detector.backbone is names["result"].model and detector.eval()(list(torch.rand(1, 3, 50, 60)))
