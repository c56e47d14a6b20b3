"""Networks that other people trained and published, each with data, a loss and a score.

Their repositories lie in folders below `sources`, named as on GitHub; nothing of theirs is copied here. CIFAR-10 lies
in data/cifar10. Images that choose channels or train are never those of the score.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Any]
Draw = Callable[[int, int, int], list[Batch]]  # (how many, of which size, seed) -> batches


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreign:
    """A trained network and its task."""

    model: nn.Module
    example: Tensor
    batches: Draw  # of its training data
    loss: Callable[[Any, Batch], Tensor]
    score: Callable[[nn.Module], float]  # on test data; more is better
    unit: str
    lr: float
    split: tuple[Draw, Draw] | None = None  # the same in two parts, to train on and to choose settings by
    batch: int = 16  # samples of a training step
    recalibrates: bool = True  # whether BatchNorms of its cut networks want new statistics


# reading


@contextmanager
def imports_from(folder: Path, *names: str) -> Iterator[None]:
    """While entered, modules are imported from the folder; those with these names are forgotten afterwards."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in list(sys.modules):
            if name.split(".")[0] in names:
                del sys.modules[name]


def weights(path: Path) -> dict[str, Tensor]:
    """A state dict, without the prefix of DataParallel."""
    state = torch.load(path, weights_only=True, map_location="cpu")
    state = state.get("state_dict", state)
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def read_image(path: Path, mode: str = "RGB", size: tuple[int, int] | None = None) -> Tensor:
    """Pixels from 0 to 255. -> (C, H, W)"""
    image = Image.open(path).convert(mode)
    if size is not None:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels = np.array(image, dtype=np.float32)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1).copy())


def crop_at_random(image: Tensor, size: int, random: torch.Generator, step: int = 1) -> Tensor:
    """A square part of an image, at a multiple of `step`."""
    top, left = (
        int(torch.randint((length - size) // step + 1, (), generator=random)) * step for length in image.shape[1:]
    )
    return image[:, top : top + size, left : left + size]


def drawn(make: Callable[[torch.Generator], tuple[Tensor, Any]]) -> Draw:
    """Batches of samples that `make` draws with a generator."""

    def batches(count: int, size: int, seed: int) -> list[Batch]:
        random = torch.Generator().manual_seed(seed)
        result = []
        for _ in range(count):
            inputs, targets = zip(*(make(random) for _ in range(size)), strict=True)
            result.append((torch.stack(inputs), torch.stack(targets)))
        return result

    return batches


def of_data(inputs: Tensor, targets: Tensor) -> Draw:
    """Batches of samples of a data set in memory."""

    def make(random: torch.Generator) -> tuple[Tensor, Tensor]:
        index = int(torch.randint(len(inputs), (), generator=random))
        return inputs[index], targets[index]

    return drawn(make)


def run(model: nn.Module, inputs: Tensor, size: int = 100) -> Tensor:
    """Outputs in eval mode."""
    model.eval()
    with torch.inference_mode():
        return torch.cat([model(part) for part in inputs.split(size)])


# classifiers


def resnet(sources: Path, name: str, file: str) -> Foreign:
    """akamaster/pytorch_resnet_cifar10: ResNet-20 or -56 for CIFAR-10; the first 1,000 test images."""
    folder = sources / "pytorch_resnet_cifar10"
    with imports_from(folder, "resnet"):
        model = getattr(importlib.import_module("resnet"), name)()
    model.load_state_dict(weights(folder / "pretrained_models" / file))
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1).unbind()

    def read(shard: str, count: int) -> tuple[Tensor, Tensor]:
        arrays = np.load(Path("data/cifar10") / shard)
        images, labels = (torch.from_numpy(arrays[key][:count]) for key in sorted(arrays.files))
        return (images.permute(0, 3, 1, 2).float() / 255 - mean) / std, labels.long()

    train = read("train-0.npz", 10000)
    images, labels = read("test-0.npz", 1000)

    def accuracy(network: nn.Module) -> float:
        return (run(network, images).argmax(1) == labels).float().mean().item() * 100

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch[1])

    return Foreign(
        model=model,
        example=images[:2],
        batches=of_data(*train),
        split=(of_data(*train), of_data(*read("train-1.npz", 10000))),
        loss=loss,
        score=accuracy,
        unit="%",
        lr=1e-3,
        batch=32,
    )


# restorers


def psnr(output: Tensor, target: Tensor, border: int = 0) -> float:
    """Peak signal-to-noise ratio of values from 0 to 1."""
    error = output.clamp(0, 1) - target
    if border:
        error = error[..., border:-border, border:-border]
    return float(-10 * error.square().mean().log10())


def squared_error(output: Tensor, batch: Batch) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(output, batch[1])


def dncnn(sources: Path) -> Foreign:
    """SaoYan/DnCNN-PyTorch: DnCNN-S-25 predicts the noise; the centres (64 px) of Set12."""
    folder = sources / "DnCNN-PyTorch"
    with imports_from(folder, "models"):
        model = importlib.import_module("models").DnCNN(channels=1, num_of_layers=17)
    model.load_state_dict(weights(folder / "logs/DnCNN-S-25/net.pth"))
    train = [read_image(path, "L") / 255 for path in sorted((folder / "data/train").glob("*.png"))]
    test = [read_image(path, "L") / 255 for path in sorted((folder / "data/Set12").glob("*.png"))]
    clean = torch.stack([image[:, 96:160, 96:160] for image in test])
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1)) * 25 / 255

    def make(random: torch.Generator, images: list[Tensor] = train) -> tuple[Tensor, Tensor]:
        image = images[int(torch.randint(len(images), (), generator=random))]
        patch = crop_at_random(image, 40, random)
        added = torch.randn(patch.shape, generator=random) * 25 / 255
        return patch + added, added

    def score(network: nn.Module) -> float:
        restored = clean + noise - run(network, clean + noise, 4)
        return sum(psnr(x, y) for x, y in zip(restored, clean, strict=True)) / len(clean)

    return Foreign(
        model=model,
        example=clean[:2],
        batches=drawn(make),
        split=(drawn(partial(make, images=train[:-50])), drawn(partial(make, images=train[-50:]))),
        loss=squared_error,
        score=score,
        unit="dB",
        lr=3e-4,
    )


class Scaled(nn.Module):
    """CARN-M with a fixed scale: its forward wants one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, 4)


class InBytes(nn.Module):
    """RFDN for values from 0 to 1: it was trained with values from 0 to 255."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 255) / 255


def super_resolution(sources: Path, name: str) -> Foreign:
    """RFDN, IMDN and IMDN-RTC, and CARN-M; luminance of Set5. They learn from photographs of RealSR, made smaller."""
    images = sources / "IMDN/Test_Datasets"
    scale = 4
    if name == "rfdn":
        folder = sources / "RFDN"
        with imports_from(folder, "RFDN", "block"):
            net = importlib.import_module("RFDN").RFDN()
        net.load_state_dict(weights(folder / "trained_model/RFDN_AIM.pth"))
        model = InBytes(net)
    elif name == "carn-m":
        folder = sources / "CARN-pytorch"
        with imports_from(folder / "carn", "model"):
            net = importlib.import_module("model.carn_m").Net(multi_scale=True, group=4)
        net.load_state_dict(weights(folder / "checkpoint/carn_m.pth"))
        model = Scaled(net)
    else:
        folder = sources / "IMDN"
        with imports_from(folder, "model"):
            architecture = importlib.import_module("model.architecture")
        if name == "imdn":
            model = architecture.IMDN(upscale=4)
            model.load_state_dict(weights(folder / "checkpoints/IMDN_x4.pth"))
        else:
            scale = 2
            model = architecture.IMDN_RTC()
            model.load_state_dict(weights(folder / "checkpoints/model_RTC.pth"))

    train = []
    for path in sorted((images / "RealSR/ValidationGT").glob("*.png")):
        photo = Image.open(path).convert("RGB").crop((200, 200, 968, 968))
        small = photo.resize((768 // scale, 768 // scale), Image.Resampling.BICUBIC)
        high, low = (torch.from_numpy(np.array(x)).permute(2, 0, 1).float() / 255 for x in (photo, small))
        train.append((high, low))

    def make(random: torch.Generator, images: list[tuple[Tensor, Tensor]] = train) -> tuple[Tensor, Tensor]:
        high, low = images[int(torch.randint(len(images), (), generator=random))]
        size = 32
        top, left = torch.randint(768 // scale - size + 1, (2,), generator=random).tolist()
        part = low[:, top : top + size, left : left + size]
        size, top, left = size * scale, top * scale, left * scale
        return part, high[:, top : top + size, left : left + size]

    test = []
    for path in sorted((images / "Set5").glob("*.bmp")):
        low = read_image(images / f"Set5_LR/x{scale}" / f"{path.stem}x{scale}.bmp") / 255
        high = read_image(path)[:, : low.shape[1] * scale, : low.shape[2] * scale] / 255
        test.append((low, high))

    def luminance(image: Tensor) -> Tensor:
        return (image * torch.tensor([65.481, 128.553, 24.966]).view(3, 1, 1)).sum(0) / 255 + 16 / 255

    def score(network: nn.Module) -> float:
        total = 0.0
        for low, high in test:
            output = run(network, low[None])[0].clamp(0, 1)
            total += psnr(luminance(output), luminance(high), scale)
        return total / len(test)

    return Foreign(
        model=model,
        example=make(torch.Generator().manual_seed(0))[0][None].repeat(2, 1, 1, 1),
        batches=drawn(make),
        split=(drawn(partial(make, images=train[:-3])), drawn(partial(make, images=train[-3:]))),
        loss=squared_error,
        score=score,
        unit="dB",
        lr=3e-4,
        batch=2,
        recalibrates=False,
    )


# readers, detectors, segmenters


def lprnet(sources: Path) -> Foreign:
    """sirius-ai/LPRNet_Pytorch: every fourth plate is for the score. Its BatchNorms were trained in eval mode."""
    folder = sources / "LPRNet_Pytorch"
    source = (folder / "data/load_data.py").read_text()
    listed = source[source.index("CHARS = [") : source.index("]", source.index("CHARS = ["))]
    characters = listed.split("'")[1::2]
    blank = len(characters) - 1
    with imports_from(folder, "model"):
        model = importlib.import_module("model.LPRNet").build_lprnet(class_num=len(characters), dropout_rate=0)
    model.load_state_dict(weights(folder / "weights/Final_LPRNet_model.pth"))

    inputs, labels = [], []
    for path in sorted((folder / "data/test").glob("*.jpg")):
        pixels = read_image(path, size=(94, 24)).flip(0)  # blue first
        plate = [characters.index(letter) for letter in path.stem.split("-")[0].split("_")[0]]
        inputs.append((pixels - 127.5) / 128)
        labels.append(torch.tensor(plate + [blank] * (8 - len(plate))))
    x, y = torch.stack(inputs), torch.stack(labels)

    def loss(output: Tensor, batch: Batch) -> Tensor:
        lengths = (batch[1] != blank).sum(1)
        steps = torch.full_like(lengths, output.shape[2])
        chances = output.permute(2, 0, 1).log_softmax(2)
        return F.ctc_loss(chances, batch[1], steps, lengths, blank=blank, zero_infinity=True)

    def score(network: nn.Module) -> float:
        right = 0
        # Its layers divide by a mean over the batch: batches of the same size.
        for letters, plate in zip(run(network, x[1::4], 125).argmax(1), y[1::4], strict=True):
            read = letters.unique_consecutive()
            read = read[read != blank]
            right += read.tolist() == plate[plate != blank].tolist()
        return right / len(x[1::4]) * 100

    return Foreign(
        model=model,
        example=x[:2],
        batches=of_data(x[::2], y[::2]),
        split=(of_data(x[::2], y[::2]), of_data(x[3::4], y[3::4])),
        loss=loss,
        score=score,
        unit="%",
        lr=3e-4,
        batch=32,
        recalibrates=False,
    )


def face(sources: Path) -> Foreign:
    """Linzaer's face detector RFB-320: no boxes are published, so it is taught by the uncut network, and the score is
    how near outputs are to the uncut ones: the ratio of their variance to the squared error, in dB."""
    folder = sources / "Ultra-Light-Fast-Generic-Face-Detector-1MB"
    sys.modules.setdefault("cv2", type(sys)("cv2"))  # imported there, not used here
    with imports_from(folder, "vision"):
        module = importlib.import_module("vision.ssd.mb_tiny_RFB_fd")
        model = module.create_Mb_Tiny_RFB_fd(2, device="cpu")
        original = module.create_Mb_Tiny_RFB_fd(2, device="cpu").eval()
    for network in (model, original):
        network.load_state_dict(weights(folder / "models/pretrained/version-RFB-320.pth"))
    images = [read_image(path, size=(640, 480)) for path in sorted((folder / "imgs").glob("*.jpg"))]
    small = torch.stack([F.avg_pool2d((image - 127) / 128, 2) for image in images])

    def joined(output: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(output, dim=2)  # scores and boxes of each anchor

    def make(random: torch.Generator) -> tuple[Tensor, Tensor]:
        image = images[::2][int(torch.randint(len(images[::2]), (), generator=random))]
        top, left = torch.randint(241, (2,), generator=random).tolist()
        part = (image[:, top : top + 240, left : left + 320] - 127) / 128
        with torch.no_grad():
            target = joined(original(part[None]))[0]
        return part + 0.1 * torch.randn(part.shape, generator=random), target

    def loss(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        return F.mse_loss(joined(output), batch[1])

    with torch.no_grad():
        reference = joined(original(small[1::2]))

    def score(network: nn.Module) -> float:
        network.eval()
        with torch.inference_mode():
            error = joined(network(small[1::2])) - reference
        return float(10 * (reference.var() / error.square().mean().clamp(min=1e-9)).log10())

    return Foreign(
        model=model,
        example=small[:2],
        batches=drawn(make),
        loss=loss,
        score=score,
        unit="dB to uncut",
        lr=3e-4,
        batch=2,
    )


def espnet(sources: Path) -> Foreign:
    """sacmehta/ESPNet for CamVid: mean IoU on every eighteenth test image."""
    folder = sources / "ESPNet"
    with imports_from(folder, "Model"):
        model = importlib.import_module("Model").ESPNet(12, 2, 8)
    model.load_state_dict(weights(folder / "camvid.pth"))

    def read(part: str) -> tuple[Tensor, Tensor]:
        data = sources / "SegNet/CamVid"
        paths = sorted((data / part).glob("*.png"))
        images = torch.stack([read_image(path).flip(0) for path in paths])
        labels = torch.stack([read_image(data / f"{part}annot" / path.name, "L")[0].long() for path in paths])
        return images, labels

    images, labels = read("train")
    mean = images.mean((0, 2, 3)).view(3, 1, 1)
    std = images.std((2, 3)).mean(0).view(3, 1, 1)

    def normalized(pixels: Tensor) -> Tensor:
        return (pixels - mean) / std / 255

    test, truth = (part[::3] for part in read("test"))
    test = normalized(test)

    def score(network: nn.Module) -> float:
        guess = torch.cat([run(network, part).argmax(1) for part in test.split(4)])
        known = truth < 11
        ratios = []
        for kind in range(11):
            inside = (guess == kind) & known
            target = truth == kind
            ratios.append((inside & target).sum() / (inside | target).sum().clamp(min=1))
        return torch.stack(ratios).mean().item() * 100

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch[1], ignore_index=11)

    return Foreign(
        model=model,
        example=test[:2],
        batches=of_data(normalized(images), labels),
        loss=loss,
        score=score,
        unit="% mIoU",
        lr=5e-4,
        batch=2,
    )


NETWORKS: dict[str, Callable[[Path], Foreign]] = {
    "resnet20": lambda sources: resnet(sources, "resnet20", "resnet20-12fca82f.th"),
    "resnet56": lambda sources: resnet(sources, "resnet56", "resnet56-4bfd9763.th"),
    "dncnn": dncnn,
    "lprnet": lprnet,
    "rfdn": lambda sources: super_resolution(sources, "rfdn"),
    "imdn": lambda sources: super_resolution(sources, "imdn"),
    "imdn-rtc": lambda sources: super_resolution(sources, "imdn-rtc"),
    "face": face,
    "carn-m": lambda sources: super_resolution(sources, "carn-m"),
    "espnet": espnet,
}
