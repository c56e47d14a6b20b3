"""Network, weights and data by the names that a person types."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp import models
from dmcp.batches import Loader, device_of, too_large
from dmcp.calibration import kept_modes
from dmcp.cutting import with_frozen
from dmcp.data.datasets import DataSet, DataSets, FolderSet, guess, load, split, swapped, usual_size
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, WidthsError
from dmcp.runtime.distributed import current
from dmcp.runtime.engine import best_device
from dmcp.settings import UNPRUNED, RuntimeKind
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace, wrong_dtype
from dmcp.units import by, counted

_ALIKE = 0.75  # of a file's name, from which on another one may be meant


def load_weights(model: nn.Module, path: Path, classes: int | None = None, names: Sequence[str] = ()) -> str:
    """Put the weights of a file into the model; never by pickle.

    classes: of the data. A last layer for another number of them then keeps the weights that it has, and a sentence
    says so; everything else must fit.
    names: that could stand in the place of the file's, for one that is not there.
    """
    tensors = _read_tensors(path, names)
    own = model.state_dict()
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    odd = [name for name in {**own, **tensors} if (name in own) != (name in tensors)]
    odd = [name for name in odd if not name.endswith("num_batches_tracked")]  # old files have none
    others = _classes_of({name: tensors[name] for name in wrong}, own, classes)
    if wrong and not others:
        name = wrong[0]
        raise WidthsError(
            f"{path}: {name} is {by(tensors[name].shape)}, but the network has {by(own[name].shape)}: these are the "
            "weights of another network, or of one for another number of classes."
        )
    if odd:
        side = "is not in the file" if odd[0] in own else "is not in the network"
        raise WidthsError(f"{path}: these are the weights of another network: {odd[0]} {side}.")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in wrong}, strict=False)
    if not others:
        return ""
    return (
        f"{wrong[0].rpartition('.')[0] or path} is for {others} classes, the data have {classes}: it starts fresh; "
        "in a search --warmup 0.5 trains it first."
    )


def _classes_of(wrong: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int | None) -> int:
    """For how many classes the one layer that does not fit is; 0 if that is not what is wrong.

    Then its tensors differ in dim 0 alone, which is the number of classes here.
    """
    layers = {name.rpartition(".")[0] for name in wrong}
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in wrong.values()}
    here = {own[name].shape[0] if own[name].ndim else 0 for name in wrong}
    alike = all(tensor.shape[1:] == own[name].shape[1:] for name, tensor in wrong.items())
    return counts.pop() if len(layers) == len(counts) == 1 and here == {classes} and alike else 0


def _read_tensors(path: Path, names: Sequence[str] = ()) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        meant = guess(path, names, Path.is_file, _ALIKE) if not path.exists() else ""
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.{meant}") from error
    except Exception as error:  # torch raises many kinds for a file that holds more than weights
        raise FileError(
            f"{path}: not a file of plain weights: give one of torch.save(model.state_dict(), ...) or safetensors."
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileError(f"{path}: holds no table of tensors.")
    for wrapper in ("module.", "_orig_mod.", "module."):  # of DDP, of torch.compile, of one in the other
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    return dict(found)


GIVEN = "given"  # the teacher that is the network of the weights
_MOST_NUMBERS = 2**31  # in one sample
_ENLARGED = 1.5  # times by which images may grow without a word


class Corrupt(StrEnum):
    """What happens at an image file that cannot be decoded."""

    STOP = "stop"
    SKIP = "skip"  # another image takes its place


@dataclass(frozen=True, kw_only=True)
class Job:
    """Names as they were typed; this goes into the settings of a run."""

    model: str  # resnet18, timm:NAME, cifar:NAME, digits:resnet, package.module:factory
    model_args: tuple[str, ...] = ()  # name=value for its builder
    data: str = ""  # digits, cifar10, cifar100, or a folder
    input: str = ""  # shape of one sample, like 3x224x224; empty: the data's, the model's
    weights: str = ""  # file to start from; empty: fresh ones
    teacher: str = ""  # file of the weights of a network to learn from; given: that with the weights above; unpruned
    teacher_model: str = ""  # network that these weights are of; empty: the model
    teacher_model_args: tuple[str, ...] = ()  # name=value for the builder of that network
    ignore: tuple[str, ...] = ()  # modules or spaces that stay whole
    inexact: bool = False  # prune through LayerNorm and GroupNorm too
    batch: int = 128  # images in a step, over all processes
    train_batch: int = 0  # the same in the retraining; 0: as many
    holdout: float = 0.0  # share of the training images that only the alphas see
    device: str = ""  # cpu or cuda; empty: a GPU if there is one
    workers: int | None = None  # processes that read image files; None: as many as there are cores, at most 8
    corrupt: Corrupt = Corrupt.STOP  # at image files that cannot be decoded
    seed: int = 0
    latency: str = ""  # file of a table of latency; empty: measured, where the budget needs one
    latency_batch: int = 1  # samples of a pass that is timed
    latency_device: str = ""  # where it is; empty: the device above, or in onnxruntime the CPU
    latency_runtime: RuntimeKind = RuntimeKind.TORCH  # and in what

    @property
    def place(self) -> torch.device:
        """The device, if there is such a one; of several processes on a machine each has its own GPU."""
        name = self.device or best_device().type
        if name == "cuda" and (world := current()).size > 1:
            name = f"cuda:{world.local}"
        try:
            one = torch.zeros(1, device=name)
            one.item()  # some devices only pretend to compute
            return one.device
        except (RuntimeError, AssertionError, ImportError) as error:
            reason, way = str(error).splitlines()[0].split(". ")[0], "leave it out, or " if self.device else ""
            raise DmcpError(f"--device: {name!r} cannot be used here ({reason}): {way}write --device cpu.") from None


class Replaced(NamedTuple):
    """Image files that cannot be read, and were replaced by others: their paths."""

    train: frozenset[str] = frozenset()
    test: frozenset[str] = frozenset()

    def __or__(self, other: Replaced) -> Replaced:
        return Replaced(self.train | other.train, self.test | other.test)

    @property
    def counts(self) -> dict[str, int]:
        """How many, as plain data."""
        return {"train": len(self.train), "test": len(self.test)}

    def describe(self, train: int, test: int) -> str:
        """A sentence about what that means among so many images; empty if there are none."""
        counts = ((self.train, train, "training"), (self.test, test, "test"))
        parts = [f"{len(some)} of {every:,} {word} images" for some, every, word in counts if some]
        if not parts:
            return ""
        files = f"{counted(len(self.train) + len(self.test), 'image file')} could not be read"
        return f"{files}: {', '.join(parts)}. In each pass other images took their place, and count twice."


@dataclass(frozen=True, eq=False)
class Loaders:
    """Batches for the search, for its alphas (None: the same), for the test at the end, and for the retraining."""

    train: Loader
    arch: Loader | None
    test: Loader
    retrain: Loader

    @property
    def replaced(self) -> Replaced:
        """Image files that could not be read so far, and in whose place others were taken."""
        every = (self.train, self.arch, self.retrain)
        train = {path for loader in every for path in getattr(loader, "skipped", ())}
        return Replaced(frozenset(train), frozenset(getattr(self.test, "skipped", ())))


@dataclass(frozen=True, eq=False)
class Opened:
    """A job with its network built, its data found, and both known to fit."""

    model: nn.Module
    fresh: nn.Module  # the same network, never trained but for what is frozen in it
    graph: ChannelGraph
    data: DataSets
    loaders: Loaders
    notices: tuple[str, ...] = ()  # what a person may not know: a sentence each
    teacher: nn.Module | None = None  # whom networks learn from: the model itself, or another one for the same classes
    new_head: bool = False  # whether the last layer of a trained model is fresh: as given it can do nothing yet


def open_job(job: Job) -> Opened:
    """Build the network for the data, load its weights, trace it; DmcpError for what does not fit."""
    place = job.place
    data = load(job.data)
    fresh = build(job, data.classes)
    data = sized(data, job.data, job.input, models.sample_shape(fresh))
    outputs = check_fit(fresh, data, _remedy(job, data))
    model, new_head = fresh, ""
    if job.weights:
        model = build(job, data.classes)
        new_head = load_weights(model, Path(job.weights), data.classes)
        fresh = with_frozen(fresh, model)
    teacher = _teacher(job, model, data, bool(new_head)) if job.teacher not in ("", UNPRUNED) else None
    graph = trace_job(job, model, data.shape)
    train, held = split(data.train, job.holdout, job.seed) if job.holdout else (data.train, None)
    loaders = _loaders(job, train, held, data.test, place)
    turned = swapped(len(data.train), len(data.test), isinstance(data.train, FolderSet))
    told = filter(None, [new_head, turned, _unused(outputs, data.classes)])
    notices = (*told, *_enlarged(job, data), *_left_out(job, len(train)), *graph.notes)
    model, teacher = model.to(place), None if teacher is None else teacher.to(place)
    return Opened(model, fresh.to(place), graph, data, loaders, notices, teacher, bool(new_head))


def _teacher(job: Job, model: nn.Module, data: DataSets, new_head: bool) -> nn.Module:
    """The network that others learn from."""
    if job.teacher != GIVEN:
        other = replace(job, model=job.teacher_model, model_args=job.teacher_model_args) if job.teacher_model else job
        found = build(other, data.classes)
        if job.teacher_model:
            try:
                check_fit(found, data)
            except DataError as error:
                raise DataError(f"--teacher-model {job.teacher_model}: {error}") from error
        load_weights(found, Path(job.teacher), names=(GIVEN,))  # all of them: a fresh last layer has nothing to teach
        return found
    if new_head:
        raise DmcpError(
            "--teacher given: its last layer starts fresh, since --weights are for other classes: train it first, or "
            "name a file of the teacher's weights."
        )
    return model


def check_fit(model: nn.Module, data: DataSets, remedy: str = "") -> int:
    """Refuse data that the model cannot take: images of another size or channel count, labels outside its head.

    Returns how many classes its head is for; 0 where its output says nothing of that.
    remedy: what the sentence about the size says besides the size.
    """
    example = torch.zeros(2, *data.shape, device=device_of(model))

    @torch.no_grad()
    def run(images: Tensor) -> Any:
        with kept_modes(model):
            return model.eval()(images)

    try:
        output = run(example)
    except Exception as error:
        if wanted := wrong_dtype(model, example, run):
            raise DataError(f"The images hold {wanted}.") from error
        raise DataError(
            f"The network cannot take images of {by(data.shape)}{remedy}: {type(error).__name__}: {error}"
        ) from error
    highest = max(int(part.labels.max()) for part in (data.train, data.test))
    outputs = output.shape[1] if isinstance(output, Tensor) and output.ndim >= 2 else 0
    if outputs and highest >= outputs:
        raise DataError(
            f"The labels go up to {highest}, but the network has {outputs} outputs: build it with "
            f"num_classes={data.classes}."
        )
    return outputs


def build(job: Job, classes: int | None) -> nn.Module:
    """The network with fresh weights that depend on the seed only; the number of classes is the data's."""
    arguments = dict(map(argument, job.model_args))
    if classes is not None and _takes_classes(job.model):
        arguments = {"num_classes": classes} | arguments
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return models.build(job.model, **arguments)


def trace_job(job: Job, model: nn.Module, sample: tuple[int, ...]) -> ChannelGraph:
    """The graph of the network for samples of this shape."""
    return trace(model, torch.zeros(2, *sample), ignore=job.ignore, exact=not job.inexact)


def argument(text: str, option: str = "--model-args") -> tuple[str, Any]:
    """One k=v of an option; the value is an int, float, bool, None, tuple or list where it reads as one, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise DmcpError(f"{option}: {text!r} is not of the form name=value, like width_mult=1.5.")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def shape(text: str) -> tuple[int, ...]:
    """3x224x224 as numbers."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise DmcpError(f"--input: {text!r} is not the shape of one sample; write it like 3x224x224.")
    sizes = tuple(int(size) for size in text.split("x"))
    if math.prod(sizes) > _MOST_NUMBERS:
        raise DmcpError(f"--input: a sample of {text} is too large; write its shape like 3x224x224.")
    return sizes


def _takes_classes(name: str) -> bool:
    """Every library's builder does; a user's own where its signature says so."""
    library, colon, _ = name.partition(":")
    if not colon or library == "timm" or library in models.NETS:
        return True
    try:
        return "num_classes" in inspect.signature(models.find(name)).parameters
    except (TypeError, ValueError):  # a builder written in C has no signature
        return False


def sized(data: DataSets, name: str, text: str, usual: tuple[int, ...] = ()) -> DataSets:
    """Files are cropped to what is asked for (text, as typed) or the usual size; arrays are what they are."""
    wanted = shape(text) if text else None
    if not isinstance(data.train, FolderSet) or not isinstance(data.test, FolderSet):
        if wanted and wanted != data.shape:
            raise DataError(f"--input: the images of {name} are {'x'.join(map(str, data.shape))}: leave it out.")
        return data
    wanted = wanted or usual
    if len(wanted) != 3 or wanted[0] != 3:
        asked = "--input: image files are read" if text else "This network is not for image files, which are read"
        raise DataError(f"{asked} in colour, like 3x224x224 or 3x240x320, not {by(wanted)}.")
    train, test = (replace(part, size=wanted[1:]) for part in (data.train, data.test))
    return replace(data, train=train, test=test, shape=train.shape)


def _remedy(job: Job, data: DataSets) -> str:
    """What to do where the network cannot take image files of the size that nobody asked for."""
    if job.input or not isinstance(data.train, FolderSet):
        return ""
    found = usual_size(data.train)
    size = found if found and max(found) < min(data.shape[1:]) else (32, 32)
    return f", their size without --input; give the size that it takes, like --input 3x{by(size)}"


def _enlarged(job: Job, data: DataSets) -> Iterator[str]:
    """Notice images that would grow much, and the budget's network with them, without that anybody asked for it."""
    found = usual_size(data.train) if isinstance(data.train, FolderSet) and not job.input else None
    if found and max(new / old for new, old in zip(data.shape[1:], found, strict=True)) >= _ENLARGED:
        yield (
            f"The images are about {by(found)} and are enlarged to {by(data.shape[1:])}: "
            f"give --input 3x{by(found)} to train at their size."
        )


def _unused(outputs: int, classes: int) -> str:
    """Notice outputs that are right for no image; empty if there are none."""
    told = f"The network has {outputs} outputs, the data have {classes} classes: build it with num_classes={classes}"
    return f"{told}, unless that is meant." if outputs > classes else ""


def _left_out(job: Job, count: int) -> Iterator[str]:
    """Notice batches that leave many of so many images out of each epoch, since every batch is a full one."""
    retrain = job.train_batch if job.train_batch != job.batch else 0
    for option, batch in (("--batch", job.batch), ("--train-batch", retrain)):
        if batch and (left := count % batch) > count / 10:
            better = count // (count // batch + 1)  # one more step, and as good as nothing left
            yield (
                f"With batches of {batch}, {left} of {count} training images are left out of each epoch: "
                f"lower {option} to {better}."
            )


def _loaders(job: Job, train: DataSet, held: DataSet | None, test: DataSet, place: torch.device) -> Loaders:
    how: dict[str, Any] = {"workers": job.workers, "world": current(), "corrupt": job.corrupt}

    def make(part: DataSet, batch: int, shuffled: bool) -> Loader:
        size = min(batch, len(part)) if part is not train else batch
        return make_loader(part, size, shuffled, job.seed, place, **how)

    first = make(train, job.batch, True)
    if job.train_batch > len(train):
        raise DataError(too_large(job.train_batch, len(train), "--train-batch"))
    retrain = make(train, job.train_batch, True) if job.train_batch not in (0, job.batch) else first
    arch = None if held is None else make(held, job.batch, True)
    return Loaders(first, arch, make(test, job.batch, False), retrain)


def data_identity(data: DataSets) -> dict[str, Any]:
    """What tells one data set from another: counts, the shape of an image, and the labels in their order."""
    labels = torch.cat([data.train.labels, data.test.labels]).numpy().tobytes()
    return {
        "train": len(data.train),
        "test": len(data.test),
        "shape": list(data.shape),
        "labels": hashlib.sha256(labels).hexdigest()[:16],
    }
