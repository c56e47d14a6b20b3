"""Network, weights and data by the names that a person types."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp import models
from dmcp.batches import Loader, device_of, too_large
from dmcp.calibration import kept_modes
from dmcp.checkpoint import digest
from dmcp.cli.config import GIVEN, RunConfig, argument
from dmcp.cutting import with_frozen
from dmcp.data.datasets import NAMES as DATA
from dmcp.data.datasets import DataSet, DataSets, FolderSet, guess, load, split, swapped, usual_size
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, WidthsError
from dmcp.runtime.distributed import SINGLE_PROCESS, current
from dmcp.runtime.engine import best_device
from dmcp.settings import UNPRUNED
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


_MOST_NUMBERS = 2**31  # in one sample
_ENLARGED = 1.5  # times by which images may grow without a word


def place_of(config: RunConfig) -> torch.device:
    """The device, if there is such a one; of several processes on a machine each has its own GPU."""
    name = config.device or best_device().type
    if name == "cuda" and (world := current()).size > 1:
        name = f"cuda:{world.local}"
    try:
        one = torch.zeros(1, device=name)
        one.item()  # some devices only pretend to compute
        return one.device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise DmcpError(f"--device: {name!r} cannot be used here ({reason}): write --device cpu.") from None


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
class Job:
    """The network of a run, its data, and both known to fit."""

    model: nn.Module
    fresh: nn.Module  # the same network, never trained but for what is frozen in it
    graph: ChannelGraph
    data: DataSets
    loaders: Loaders
    notes: tuple[str, ...] = ()  # what a person may not know: a sentence each
    teacher: nn.Module | None = None  # the model itself, or another network for the same classes
    new_head: bool = False  # the last layer of a trained model is fresh: the original is not tested

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is while a run goes on: the network, the data, the teacher."""
        labels = torch.cat([self.data.train.labels, self.data.test.labels]).numpy().tobytes()
        counts = {"train": len(self.data.train), "test": len(self.data.test), "shape": list(self.data.shape)}
        data = counts | {"labels": hashlib.sha256(labels).hexdigest()[:16]}
        teacher = {} if self.teacher is None else {"teacher": digest(self.teacher.state_dict(), SINGLE_PROCESS)}
        return {"fingerprint": self.graph.fingerprint, "macs": self.graph.macs(), "data": data} | teacher


def open_job(config: RunConfig) -> Job:
    """Build the network for the data, load its weights, trace it; DmcpError for what does not fit."""
    place = place_of(config)
    data = load(config.data)
    fresh = build(config, data.classes)
    data = sized(data, config.data, config.input, models.sample_shape(fresh))
    outputs = check_fit(fresh, data, _remedy(config, data))
    model, new_head = fresh, ""
    if config.weights:
        model = build(config, data.classes)
        new_head = load_weights(model, Path(config.weights), data.classes)
        fresh = with_frozen(fresh, model)
    teacher = _teacher(config, model, data, bool(new_head))
    graph = trace_job(config, model, data.shape)
    train, held = split(data.train, config.holdout, config.seed) if config.holdout else (data.train, None)
    loaders = _loaders(config, train, held, data.test, place)
    turned = swapped(len(data.train), len(data.test), isinstance(data.train, FolderSet))
    notes = [new_head, turned, _unused(outputs, data.classes), _enlarged(config, data)]
    notes += [*_left_out(config, len(train)), *graph.notes]
    model, fresh, teacher = model.to(place), fresh.to(place), None if teacher is None else teacher.to(place)
    return Job(model, fresh, graph, data, loaders, tuple(filter(None, notes)), teacher, bool(new_head))


def _teacher(config: RunConfig, model: nn.Module, data: DataSets, new_head: bool) -> nn.Module | None:
    """The network that others learn from, if it is trained already."""
    if config.teacher in ("", UNPRUNED):
        return None
    if config.teacher == GIVEN:
        if new_head:
            raise DmcpError(
                "--teacher given: its last layer starts fresh, since --weights are for other classes: train it first, "
                "or name a file of the teacher's weights."
            )
        return model
    other = config
    if config.teacher_model:
        other = replace(config, model=config.teacher_model, model_args=config.teacher_model_args)
    found = build(other, data.classes)
    if config.teacher_model:
        try:
            check_fit(found, data)
        except DataError as error:
            raise DataError(f"--teacher-model {config.teacher_model}: {error}") from error
    load_weights(found, Path(config.teacher), names=(GIVEN, UNPRUNED))  # no fresh last layer: it has nothing to teach
    return found


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


def build(config: RunConfig, classes: int | None) -> nn.Module:
    """The network with fresh weights that depend on the seed only; the number of classes is the data's."""
    arguments = dict(map(argument, config.model_args))
    if classes is not None and _takes_classes(config.model):
        arguments = {"num_classes": classes} | arguments
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return models.build(config.model, **arguments)


def trace_job(config: RunConfig, model: nn.Module, sample: tuple[int, ...]) -> ChannelGraph:
    """The graph of the network for samples of this shape."""
    return trace(model, torch.zeros(2, *sample), ignore=config.ignore, exact=not config.inexact)


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


def _remedy(config: RunConfig, data: DataSets) -> str:
    """What to do where the network cannot take image files of the size that nobody asked for."""
    if config.input or not isinstance(data.train, FolderSet):
        return ""
    found = usual_size(data.train)
    size = found if found and max(found) < min(data.shape[1:]) else (32, 32)
    return f", their size without --input; give the size that it takes, like --input 3x{by(size)}"


def _enlarged(config: RunConfig, data: DataSets) -> str:
    """Name images that would grow much, which nobody has asked for; empty if none do."""
    found = usual_size(data.train) if isinstance(data.train, FolderSet) and not config.input else None
    if not found or max(new / old for new, old in zip(data.shape[1:], found, strict=True)) < _ENLARGED:
        return ""
    return (
        f"The images are about {by(found)} and are enlarged to {by(data.shape[1:])}: "
        f"give --input 3x{by(found)} to train at their size."
    )


def _unused(outputs: int, classes: int) -> str:
    """Name outputs that are right for no image; empty if there are none."""
    told = f"The network has {outputs} outputs, the data have {classes} classes: build it with num_classes={classes}"
    return f"{told}, unless that is meant." if outputs > classes else ""


def _left_out(config: RunConfig, count: int) -> Iterator[str]:
    """Name batches that leave many of so many images out of each epoch, since every batch is a full one."""
    retrain = config.train_batch if config.train_batch != config.batch else 0
    for option, batch in (("--batch", config.batch), ("--train-batch", retrain)):
        if batch and (left := count % batch) > count / 10:
            better = count // (count // batch + 1)  # one more step, and as good as nothing left
            yield (
                f"With batches of {batch}, {left} of {count} training images are left out of each epoch: "
                f"lower {option} to {better}."
            )


def _loaders(config: RunConfig, train: DataSet, held: DataSet | None, test: DataSet, place: torch.device) -> Loaders:
    how: dict[str, Any] = {"workers": config.workers, "world": current(), "corrupt": config.corrupt}

    def make(part: DataSet, batch: int, shuffled: bool) -> Loader:
        size = min(batch, len(part)) if part is not train else batch
        return make_loader(part, size, shuffled, config.seed, place, **how)

    first = make(train, config.batch, True)
    if config.train_batch > len(train):
        raise DataError(too_large(config.train_batch, len(train), "--train-batch"))
    retrain = make(train, config.train_batch, True) if config.train_batch not in (0, config.batch) else first
    arch = None if held is None else make(held, config.batch, True)
    return Loaders(first, arch, make(test, config.batch, False), retrain)


def check_names(run: Path, config: RunConfig, *needed: str) -> None:
    """Refuse a run whose network, data or weights have names that mean nothing in this folder; say where they do."""
    files: tuple[str, ...]
    for kind in needed:
        name = getattr(config, kind)
        if kind.endswith("model"):
            library, colon, _ = name.partition(":")
            top = library.partition(".")[0] if colon and library != "timm" and library not in models.NETS else ""
            files, here = (f"{top}.py", top) if top else (), not top or _is_module(top)
        else:
            own = name not in ("", GIVEN, UNPRUNED, *DATA) and not Path(name).is_absolute()
            files = (name,) if own else ("data",) if name in DATA and name != "digits" else ()
            here = all(Path(file).exists() for file in files)
        if not here:
            there = [folder for folder in run.resolve().parents if any((folder / file).exists() for file in files)]
            raise FileError(
                f"{run}: there is no {name!r} here: the names of a run are as seen from the folder that it was "
                f"started in: type the command in {there[0] if there else 'that one'}."
            )


def _is_module(name: str) -> bool:
    with contextlib.suppress(ValueError):  # of a module that is half imported
        return importlib.util.find_spec(name) is not None
    return True
