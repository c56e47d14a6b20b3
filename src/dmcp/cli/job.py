"""Network, weights and data by the names that a person types."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp import models
from dmcp.batches import FewBatches, Loader, device_of, too_large
from dmcp.checkpoint import digest
from dmcp.cli.config import GIVEN, RunConfig, argument, settle
from dmcp.cutting import with_frozen
from dmcp.data.datasets import NAMES as DATA
from dmcp.data.datasets import DataSet, DataSets, FolderSet, load, split, swapped, usual_size
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, WidthsError
from dmcp.losses import check_range
from dmcp.modules import kept_modes
from dmcp.progress import phase
from dmcp.pruning import Loaders
from dmcp.runtime.distributed import SINGLE_PROCESS, current
from dmcp.runtime.engine import best_device
from dmcp.settings import AUTO, UNPRUNED
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.units import by

_ENLARGED = 1.5  # times by which images may grow without a word


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """The network of a run, its data, and both known to fit."""

    model: nn.Module
    fresh: nn.Module  # the same network, never trained but for what is frozen in it
    graph: ChannelGraph
    data: DataSets
    loaders: Loaders
    test: Loader
    notes: tuple[str, ...]  # what a person may not know: a sentence each
    teacher: nn.Module | None  # the model itself, or another network for the same classes
    new_head: bool  # the last layer of a trained model is fresh: the original is not tested
    config: RunConfig  # all settings, those that nobody typed chosen for network and data
    reasons: Mapping[str, str]  # of these: value and why, by option

    @property
    def replaced(self) -> dict[str, list[str]]:
        """Image files of train and test that could not be read so far, and in whose place others were taken."""
        parts = {"train": (self.loaders.search, self.loaders.arch, self.loaders.train), "test": (self.test,)}
        found = {part: {path for it in some for path in getattr(it, "skipped", ())} for part, some in parts.items()}
        return {part: sorted(files) for part, files in found.items()}

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is while a run goes on: the network, the data, the teacher."""
        labels = torch.cat([self.data.train.labels, self.data.test.labels]).numpy().tobytes()
        counts = {"train": len(self.data.train), "test": len(self.data.test), "shape": list(self.data.shape)}
        data = counts | {"labels": hashlib.sha256(labels).hexdigest()[:16]}
        teacher = {} if self.teacher is None else {"teacher": digest(self.teacher.state_dict(), SINGLE_PROCESS)}
        return {"fingerprint": self.graph.fingerprint, "macs": self.graph.macs(), "data": data} | teacher


def open_job(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Build the network for the data, load its weights, trace it; DmcpError for what does not fit.

    typed: the options of a new run, whose other settings follow network and data; None: all settings are known.
    """
    place = place_of(config)
    data = load(config.data)
    fresh = build(config, data.classes)
    data = sized(data, config.data, config.input, models.sample_shape(fresh))
    found = usual_size(data.train) if isinstance(data.train, FolderSet) and not config.input else None
    check_fit(fresh, data, " (give the size that it takes, like --input 3x32x32)" if found else "")
    model, new_head = fresh, ""
    if config.weights:
        model = build(config, data.classes)
        new_head = load_weights(model, Path(config.weights), data.classes)
        fresh = with_frozen(fresh, model)
    teacher = _teacher(config, model, data, bool(new_head))
    graph = trace_job(config, model, data.shape)
    reasons: Mapping[str, str] = {}
    if typed is not None:
        trained = bool(config.weights and not new_head)
        config, reasons = settle(config, typed, len(data.train), graph.macs(), trained)
    train, held = split(data.train, config.holdout, config.seed) if config.holdout else (data.train, None)
    loaders, test = _loaders(config, train, held, data, place)
    notes = [new_head, swapped(len(data.train), len(data.test), isinstance(data.train, FolderSet))]
    if found and max(new / old for new, old in zip(data.shape[1:], found, strict=True)) >= _ENLARGED:
        larger = f"The images are about {by(found)} and are enlarged to {by(data.shape[1:])}"
        notes.append(f"{larger}: give --input 3x{by(found)} to train at their size.")
    notes += graph.notes
    model, fresh, teacher = model.to(place), fresh.to(place), None if teacher is None else teacher.to(place)
    return Job(
        model=model,
        fresh=fresh,
        graph=graph,
        data=data,
        loaders=loaders,
        test=test,
        notes=tuple(filter(None, notes)),
        teacher=teacher,
        new_head=bool(new_head),
        config=config,
        reasons=reasons,
    )


def place_of(config: RunConfig) -> torch.device:
    """The device, if there is such a one; of several processes on a machine each has its own GPU."""
    name = config.device or best_device().type
    if name == "cuda" and (world := current()).size > 1:
        name = f"cuda:{world.local}"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise DmcpError(f"--device: {name!r} cannot be used here ({reason}): write --device cpu.") from None


# the network


def build(config: RunConfig, classes: int | None) -> nn.Module:
    """The network with fresh weights that depend on the seed only; the number of classes is the data's."""
    arguments = dict(map(argument, config.model_args))
    if classes is not None and _takes_classes(config.model):
        arguments = {"num_classes": classes} | arguments
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return models.build(config.model, **arguments)


def _takes_classes(name: str) -> bool:
    """Every library's builder does; a user's own where its signature says so."""
    library, colon, _ = name.partition(":")
    if not colon or library == "timm" or library in models.NETS:
        return True
    return "num_classes" in inspect.signature(models.find(name)).parameters


def trace_job(config: RunConfig, model: nn.Module, sample: tuple[int, ...]) -> ChannelGraph:
    """The graph of the network for samples of this shape."""
    with phase("trace", 1) as done:
        graph = trace(model, torch.zeros(2, *sample), ignore=config.ignore, exact=not config.inexact)
        done(1)
    return graph


def _teacher(config: RunConfig, model: nn.Module, data: DataSets, new_head: bool) -> nn.Module | None:
    """The network that others learn from, if it is trained already."""
    if config.teacher in ("", AUTO, UNPRUNED):
        return None
    if config.teacher == GIVEN:
        if new_head:
            raise DmcpError(
                "--teacher given: its last layer is fresh, as --weights are for other classes: train it first."
            )
        return model
    if config.teacher_model:
        config = replace(config, model=config.teacher_model, model_args=config.teacher_model_args)
    found = build(config, data.classes)
    check_fit(found, data, f" ({config.model}, the teacher)")
    load_weights(found, Path(config.teacher))  # no fresh last layer: it has nothing to teach
    return found


def load_weights(model: nn.Module, path: Path, classes: int | None = None) -> str:
    """Put the weights of a file into the model; never by pickle.

    With `classes`, a last layer for another number of them stays as it is, and a sentence says so; all else must fit.
    """
    tensors, own = _read_tensors(path), model.state_dict()
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    odd = [name for name in {**own, **tensors} if (name in own) != (name in tensors)]
    odd = [name for name in odd if not name.endswith("num_batches_tracked")]  # old files have none
    layers = {name.rpartition(".")[0] for name in wrong}
    counts = {(*tensors[name].shape[:1], *own[name].shape[:1]) for name in wrong}  # classes there, classes here
    alike = all(tensors[name].shape[1:] == own[name].shape[1:] for name in wrong)
    new_head = alike and len(layers) == len(counts) == 1 and next(iter(counts))[1:] == (classes,)
    if odd or (wrong and not new_head):
        name = (wrong or odd)[0]
        there, here = (by(it[name].shape) if name in it else "not there" for it in (tensors, own))
        raise WidthsError(f"{path}: weights of another network: {name} is {there} in the file, {here} in the network.")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in wrong}, strict=False)
    if not wrong:
        return ""
    head, there = layers.pop() or path, counts.pop()[0]
    return f"{head} is for {there} classes, the data have {classes}: it starts fresh; --warmup 0.5 trains it first."


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
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


# the data


def shape(text: str) -> tuple[int, ...]:
    """3x224x224 as numbers."""
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,3}", text):
        raise DmcpError(f"--input: {text!r} is not the shape of one sample; write it like 3x224x224.")
    return tuple(map(int, text.split("x")))


def sized(data: DataSets, name: str, text: str, usual: tuple[int, ...] = ()) -> DataSets:
    """Files are cropped to what is asked for (text, as typed) or the usual size; arrays are what they are."""
    wanted = shape(text) if text else usual
    if not isinstance(data.train, FolderSet) or not isinstance(data.test, FolderSet):
        if text and wanted != data.shape:
            raise DataError(f"--input: the images of {name} are {by(data.shape)}: leave it out.")
        return data
    if len(wanted) != 3 or wanted[0] != 3:
        raise DataError(f"--input: image files are read in colour, like 3x224x224 or 3x240x320, not {by(wanted)}.")
    train, test = (replace(part, size=wanted[1:]) for part in (data.train, data.test))
    return replace(data, train=train, test=test, shape=train.shape)


def check_fit(model: nn.Module, data: DataSets, more: str = "") -> None:
    """Refuse images and labels that the model cannot take."""
    example = torch.zeros(2, *data.shape, device=device_of(model))
    try:
        with torch.no_grad(), kept_modes(model):
            output = model.eval()(example)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"The network cannot take images of {by(data.shape)}{more}: {reason}") from error
    if isinstance(output, Tensor) and output.ndim >= 2:
        for part in (data.train, data.test):
            check_range(part.labels, output.shape[1])


def _loaders(
    config: RunConfig, train: DataSet, held: DataSet | None, data: DataSets, place: torch.device
) -> tuple[Loaders, Loader]:
    """Those of the search and of the final training, which sees what is held out, too; and the test's."""
    how: dict[str, Any] = {"workers": config.workers, "world": current(), "corrupt": config.corrupt}

    def make(part: DataSet, batch: int, shuffled: bool) -> Loader:
        size = batch if part is train or part is data.train else min(batch, len(part))
        return make_loader(part, size, shuffled, config.seed, place, **how)

    first: Loader = make(train, config.batch, True)
    if config.train_batch > len(data.train):
        raise DataError(too_large(config.train_batch, len(data.train), "--train-batch"))
    count = -(-config.search_images // config.batch)  # a batch of 0 is refused by now
    few = 0 < count < len(first)
    again = held is not None or few or config.train_batch not in (0, config.batch)
    first = FewBatches(first, count) if few else first
    retrain = make(data.train, config.train_batch or config.batch, True) if again else None
    arch = None if held is None else make(held, config.batch, True)
    return Loaders(search=first, arch=arch, train=retrain), make(data.test, config.batch, False)


def check_data_is_here(run: Path, config: RunConfig) -> None:
    """Refuse a run whose data are not where its settings say, as seen from this folder."""
    if config.data not in DATA and not Path(config.data).exists():
        raise FileError(f"{run}: there is no {config.data!r} here: type the command in the folder where the run began.")
