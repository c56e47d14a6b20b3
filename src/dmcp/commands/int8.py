"""`dmcp export --int8`: a file with 8 bits for each number, tested beside the one with 32."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import Loader
from dmcp.commands.earlier_runs import check_names, read_plan
from dmcp.data import make_loader, split
from dmcp.errors import FileError
from dmcp.exporting import PASSES, Format, export, milliseconds, open_onnx
from dmcp.quantising import SAMPLES, quantise
from dmcp.running.jobs import open_job
from dmcp.running.sessions import say
from dmcp.tables import table
from dmcp.training import evaluate

_BATCH = 64


@dataclass(frozen=True, eq=False)
class Networks:
    """What is written, and what it is compared with."""

    small: nn.Module
    whole: nn.Module  # the unpruned one; it is not trained, which does not matter for bytes and time
    example: Tensor
    how: Any  # what is done to an image before, for the file


@dataclass(frozen=True, eq=False)
class Images:
    """Some training images, as they are when they are tested, and all test images."""

    ranges: Loader
    test: Loader


@dataclass(frozen=True)
class Told:
    """What came out, for people and for programs."""

    text: str
    facts: dict[str, Any]


def open_images(run: Path, out: Path) -> Images:
    """The data of a run, which must be there; drawn with a fixed seed, so that the same file is made again."""
    if out.suffix != Format.ONNX:
        raise FileError(f"{out}: only {Format.ONNX} files can have 8 bits.")
    _, plan = read_plan(run)
    check_names(run, plan.job, "data")
    job = replace(plan.job, device="cpu", weights="", teacher="", teacher_model="", teacher_model_args=())
    opened = open_job(job)
    count = len(opened.data.train)
    some = opened.data.train if count <= 2 * SAMPLES else split(opened.data.train, SAMPLES / count)[1]
    how: dict[str, Any] = {"workers": job.workers, "corrupt": job.corrupt}
    return Images(
        make_loader(some, min(_BATCH, len(some)), train=False, **how),
        make_loader(opened.data.test, min(_BATCH, len(opened.data.test)), train=False, **how),
    )


def write_int8(nets: Networks, images: Images, out: Path, tolerance: float, quiet: bool) -> Told:
    """Write the file by way of one with 32 bits, and test and time both."""
    with tempfile.TemporaryDirectory() as folder:
        middle, whole = (Path(folder) / f"{name}{Format.ONNX}" for name in ("float32", "unpruned"))
        if not quiet:
            say(f"{out} is made: exported with 32 bits, then given 8")
        export(nets.small, nets.example, middle, preprocessing=nets.how, tolerance=tolerance)
        made = quantise(middle, images.ranges, out)
        export(nets.whole, nets.example, whole)
        if not quiet:
            say("it is tested and timed beside the one with 32 bits")
        files = (out, middle, whole)
        ms, sizes = milliseconds(files, nets.example), [path.stat().st_size for path in files]
        accuracy = [_accuracy(nets.small, path, images.test) for path in files[:2]]
    rows = [
        ["", "int8", "float32", "unpruned"],
        ["bytes", *(f"{size:,}" for size in sizes)],
        ["ms", *(f"{it:.3f}" for it in ms)],
        ["test accuracy", *(f"{it:.2%}" for it in accuracy), ""],
    ]
    text = (
        f"{out}\n8 bits for each weight and activation; ranges are those of {made.samples} training images; "
        f"outputs differ by {made.difference:.1%} (root mean square)\n\n{table(rows)}\n"
        "float32, unpruned: the same network with 32 bits, and the whole one (not trained here), exported alike\n"
        f"ms: the fastest of {PASSES} passes of one sample in {made.runtime}, on this machine's CPU, taken in turn"
    )
    names = ("", "float32_", "unpruned_")
    facts = {name: fact for name, fact in asdict(made).items() if name != "path"}
    facts |= {f"{name}size_bytes": size for name, size in zip(names, sizes, strict=True)}
    facts |= {f"{name}ms": it for name, it in zip(names, ms, strict=True)}
    return Told(text, facts | {"accuracy": accuracy[0], "float32_accuracy": accuracy[1]})


def _accuracy(small: nn.Module, path: Path, test: Loader) -> float:
    """Of a file on the test images; the network says where batches go, and is not run."""
    runtime = open_onnx(path)
    with torch.no_grad():
        return evaluate(small, test, forward=lambda x: runtime.run(x)[0])
