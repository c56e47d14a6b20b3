"""Open the network and the data of a run, by the names that a person types."""

from __future__ import annotations

import hashlib
import os
import re
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp import models
from dmcp.budgets import limits_latency
from dmcp.cli.config import GIVEN, settle
from dmcp.cli.output import log
from dmcp.cli.weights import load_weights
from dmcp.cutting import with_frozen
from dmcp.data.datasets import ArraySet, DataSet, DataSets, digest_of, load, split, unseen_classes
from dmcp.data.folders import FolderSet, no_images, some_sizes
from dmcp.data.images import LARGEST, typical_size
from dmcp.data.loaders import fixed_order, make_loader
from dmcp.defaults import default_batch, resolve_search, resolve_training
from dmcp.errors import DataError, DmcpError, TraceError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.exporting.latency_limit import attach_latency
from dmcp.feasibility import parse_budgets, reachable, time_networks
from dmcp.request import Loaders
from dmcp.runs.config import RunConfig
from dmcp.runtime.batches import HELD_OUT, FewBatches, Loader, device_of, generator
from dmcp.runtime.checkpoint import digest
from dmcp.runtime.distributed import SINGLE_PROCESS, current
from dmcp.runtime.engine import best_device
from dmcp.runtime.progress import phase
from dmcp.settings import AUTO, UNPRUNED, Corrupt, LatencyConfig, ResolvedSearchConfig, ResolvedTrainConfig, RuntimeKind
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import kept_modes
from dmcp.tracing.trace import trace
from dmcp.training.losses import check_range, scores_of
from dmcp.training.optimizer import has_batch_norms
from dmcp.training.preflight import check_classifier, check_forward, classes_of
from dmcp.training.trained import is_trained
from dmcp.units import counted, show_shape
from dmcp.within import with_reachable_start

CHILD = "DMCP_CHILD"  # environment variable of processes that a command has started: it has looked at the data
_OF_SHAPES = (RuntimeError, ValueError, AssertionError, IndexError)  # what a forward raises for inputs of other shapes
_OWN_SHAPE = "the network's own, or usual"
_NAMED = 5  # classes that a note names
_TESTED = 512  # images that show whether given weights are trained
_ENLARGED = 1.5  # times by which images may grow without a note
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """The network of a run and its data, which are known to fit each other."""

    model: nn.Module
    fresh: nn.Module  # the same network, never trained but for what is frozen in it
    graph: ChannelGraph
    data: DataSets
    loaders: Loaders
    test: Loader
    notes: tuple[str, ...]  # a sentence each, about what the user may not expect
    teacher: nn.Module | None  # the model itself, or another network for the same classes
    new_head: bool  # the last layer of a trained model is fresh: the original is not tested
    trained: bool  # whether the given weights are, by a test; a run that is resumed needs none
    config: RunConfig  # all settings; those that nobody typed are chosen for network and data
    reasons: Mapping[str, str]  # value and reason of each chosen setting, by option

    @property
    def budgets(self) -> tuple[Any, ...]:
        """The budgets as they were typed, one at least."""
        assert self.config.search is not None
        return self.config.budgets or (self.config.search.budget,)

    @property
    def search(self) -> ResolvedSearchConfig:
        """The settings of the search."""
        assert self.config.search is not None
        return resolve_search(self.config.search)

    @property
    def train(self) -> ResolvedTrainConfig:
        """The settings of the final training."""
        return resolve_training(self.config.train)

    @property
    def chosen_teacher(self) -> nn.Module | str | None:
        """The teacher as `prune` takes it: a network, "auto", "unpruned" or None."""
        if self.config.teacher in (AUTO, UNPRUNED):
            return self.config.teacher
        return self.teacher

    @property
    def replaced(self) -> dict[str, list[str]]:
        """Image files of train and test that could not be read so far, and were replaced by others."""
        training = _skipped(self.loaders.search) | _skipped(self.loaders.arch) | _skipped(self.loaders.train)
        return {"train": sorted(training), "test": sorted(_skipped(self.test))}

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is when a run is resumed: the network, its weights, the data, the teacher."""
        train, test = self.data.train, self.data.test
        labels = torch.cat([train.labels, test.labels]).numpy().tobytes()
        identity: dict[str, Any] = {
            "fingerprint": self.graph.fingerprint,
            "macs": self.graph.macs(),
            "data": {
                "train": len(train),
                "test": len(test),
                "shape": list(self.data.shape),
                "labels": hashlib.sha256(labels).hexdigest()[:16],
                "images for training": digest_of(train),
                "images for the test": digest_of(test),
            },
        }
        if self.config.weights:
            identity["hash of --weights"] = digest(self.model.state_dict(), SINGLE_PROCESS)
        if self.teacher is not None:
            identity["teacher"] = digest(self.teacher.state_dict(), SINGLE_PROCESS)
        return identity


def _skipped(loader: Any) -> set[str]:
    """Image files that a loader could not read."""
    return set(getattr(loader, "skipped", ()))


def open_job(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Build the network for the data, load its weights, trace it; DmcpError for what does not fit.

    typed: the options of a new run, whose other settings follow network and data; None: all settings are known.
    """
    device = choose_device(config)
    notes: list[str] = []
    reasons: dict[str, str] = {}

    # The network, with fresh weights, and the data that it takes.
    data = load(config.data)
    if data.note:
        notes.append(data.note)
    fresh = build(config, data.classes)
    sample = choose_shape(config, fresh, data)
    if sample.reason:
        text = show_shape(sample.shape)
        config = replace(config, input=text)
        reasons["input"] = f"{text}: {sample.reason}"
        is_mixed = isinstance(data.train, FolderSet) and len(set(some_sizes(data.train))) > 1
        if is_mixed and sample.shape[1:] == sample.image_size:
            notes.append(f"The images have several sizes; the network gets {text}, {sample.reason}.")
    data = with_shape(data, config.data, sample.shape)
    notes += _describe_unseen(data)
    check_fit(fresh, data, " (give the size that it takes, like --input 3x32x32)" if sample.image_size else "")

    # The given weights, and the teacher's.
    model = fresh
    new_head = False
    if config.weights:
        model = build(config, data.classes)
        new_head = load_weights(model, Path(config.weights), notes, data.classes)
        fresh = with_frozen(fresh, model)
    teacher = _load_teacher(config, model, data, new_head, notes)
    graph = trace_job(config, model, data.shape)

    # The images for the weights, for the alphas, for the decision on a budget, and for the tests.
    train_set = data.train
    held_out = None
    if config.holdout:
        train_set, held_out = split(train_set, config.holdout, config.seed)
    judged = None
    if config.within is not None:
        tested, judged = split(data.test, HELD_OUT, config.seed)
        data = replace(data, test=tested)

    # The settings that nobody typed follow the network and the data.
    trained = False
    if typed is not None:
        if config.weights and not new_head:
            trained = _is_trained(config, model.to(device), data, graph, notes)
        config, more_reasons = settle(config, typed, len(train_set), graph.macs(), trained, has_batch_norms(model))
        reasons |= more_reasons
    loaders, test = _make_loaders(config, train_set, held_out, judged, data, device)
    notes += _describe_enlargement(data.shape[1:], sample.image_size)
    return Job(
        model=model.to(device),
        fresh=fresh.to(device),
        graph=graph,
        data=data,
        loaders=loaders,
        test=test,
        notes=(*notes, *graph.notes),
        teacher=None if teacher is None else teacher.to(device),
        new_head=new_head,
        trained=trained,
        config=config,
        reasons=reasons,
    )


def _describe_unseen(data: DataSets) -> list[str]:
    """A note with the classes of test images that no training image has; empty if there are none."""
    unseen = unseen_classes(data.train, data.test)
    if not unseen:
        return []
    names = ", ".join(unseen[:_NAMED])
    if len(unseen) > _NAMED:
        names += ", ..."
    return [f"No training image has these classes of test images, so they cannot be learned: {names}."]


def _describe_enlargement(size: Shape, image_size: Shape) -> list[str]:
    """A note about images that are much smaller than what the network gets; empty if they are not."""
    growth = max((new / old for new, old in zip(size, image_size, strict=False)), default=1.0)
    if growth < _ENLARGED:
        return []
    return [
        f"The images are about {show_shape(image_size)} and are enlarged to {show_shape(size)}: "
        f"give --input 3x{show_shape(image_size)} to train at their size."
    ]


def open_checked(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Open network and data, and tell the user what may be surprising about them.

    A network is refused if it does not classify these images or if its outputs are not finite; so are broken test
    images. A child process does not look at the files and says nothing: its parent did.
    """
    job = open_job(config, typed)
    noise = torch.randn(2, *job.data.shape, generator=generator(0)).to(device_of(job.model))
    model_args = dict(map(models.argument, config.model_args))
    check_classifier(job.model, noise, model_args.get("num_classes", job.data.classes))
    check_forward(job.model, noise)
    if job.teacher is not None:
        check_forward(job.teacher, noise, "teacher")
    if CHILD in os.environ:
        return job
    if config.corrupt is not Corrupt.SKIP:
        _refuse_broken_images(job.data.test)
    if current().first:
        log(*dict.fromkeys(job.notes))
    return job


def _refuse_broken_images(test: DataSet) -> None:
    broken = no_images(test) if isinstance(test, FolderSet) else []
    if broken:
        raise DataError(
            f"{broken[0].file} ({broken[0].reason}), one of {counted(len(broken), 'test image')}, cannot be read: "
            "use --corrupt skip (not in compare), or repair the files and start a new run (a run cannot be resumed "
            "with changed data)."
        )


def with_checked_budgets(job: Job, folder: str = "") -> Job:
    """The job with a latency table if a budget needs one; BudgetError for a budget that is out of reach.

    folder: of a run that is resumed, which may hold the table.
    """
    config = job.config
    assert config.search is not None
    table_file = Path(config.latency) if config.latency else None
    if folder and (Path(folder) / LATENCY_FILE).exists():
        table_file = Path(folder) / LATENCY_FILE
    table = Latency.load(table_file) if table_file else None
    timed = [budget for budget in job.budgets if limits_latency(budget)]
    search = replace(config.search, budget=timed[0]) if timed else config.search

    def measure() -> Latency:
        runtime = config.latency_runtime
        log(f"Measuring the latency of {LatencyConfig.networks} networks first, in {runtime}.")
        device = config.latency_device
        if not device and runtime is not RuntimeKind.ONNX:
            device = str(choose_device(config))
        settings = LatencyConfig(
            batch=config.latency_batch,
            device=device,
            dtype=config.latency_dtype,
            runtime=runtime,
            mode=config.latency_mode,
            channels_last=config.latency_channels_last,
        )
        example = torch.randn(1, *job.data.shape, generator=generator(0))
        measured = time_networks(job.model, example, job.graph, search, settings)
        log(f"{measured.summary} Measured {len(measured.networks)} networks in {measured.seconds:.0f} s.")
        return measured

    graph = attach_latency(job.graph, search.budget, measure, table)
    ends = reachable(graph, search)
    if config.within is not None:
        start = with_reachable_start(job.search, graph, ends)
        job = replace(job, config=replace(config, search=start))
    parse_budgets(job.budgets, graph, *ends, search.align)
    reasons = dict(job.reasons)
    attached = Latency.of(graph)
    if attached is not None and attached.multiples and search.align is None:
        reasons["align"] = attached.multiples
    return replace(job, graph=graph, reasons=reasons)


@dataclass(frozen=True)
class SampleShape:
    """The shape of one sample, and what is said about it."""

    shape: Shape
    reason: str = ""  # why it was chosen; empty if the user or the data set it
    image_size: Shape = ()  # height and width of the image files; empty if there are none


def choose_shape(config: RunConfig, model: nn.Module, data: DataSets | None = None) -> SampleShape:
    """The shape of a sample: as typed, or that of the arrays.

    For image files it is what the network states, the size that most of them have, or the usual one.
    """
    if config.input:
        return SampleShape(read_shape(config.input))
    if data is None:
        return SampleShape(models.sample_shape(model), _OWN_SHAPE)
    if isinstance(data.train, ArraySet):
        return SampleShape(data.train.shape)
    sizes = some_sizes(data.train)
    if not sizes:
        return SampleShape(models.sample_shape(model), _OWN_SHAPE)

    size, why_size = typical_size(sizes)
    shape = models.sample_shape(model)
    if max(size) <= LARGEST and not models.of_library(config.model):
        # Colour first; a network that takes no such images may take grey ones.
        for channels in (3, 1):
            candidate = models.sample_shape(model, (channels, *size))
            if classes_of(model, torch.zeros(2, *candidate)):
                shape = candidate
                break
    if shape[1:] == size:
        return SampleShape(shape, why_size, size)
    return SampleShape(shape, _OWN_SHAPE, size)


def choose_device(config: RunConfig) -> torch.device:
    """The device of --device, or the best one; of several processes on a machine, each has a GPU of its own."""
    name = config.device or best_device().type
    world = current()
    if name == "cuda" and world.size > 1:
        name = f"cuda:{world.local}"
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # on the meta device tensors have no values
        return probe.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise DmcpError(f"--device: {name!r} cannot be used here ({reason}): use --device cpu.") from None


# the network


def build(config: RunConfig, classes: int | None) -> nn.Module:
    """The network with fresh weights that depend on the seed only; the number of classes is the data's."""
    model = models.rebuild(config.model, config.model_args, classes, config.seed)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise DmcpError(f"{config.model}: built on the meta device, where tensors have no values: build it on the CPU.")
    return model


def trace_job(config: RunConfig, model: nn.Module, sample: Shape) -> ChannelGraph:
    """The graph of the network for samples of this shape."""
    with phase("trace", 1) as done:
        graph = trace(model, torch.zeros(2, *sample), ignore=config.ignore, exact=not config.inexact)
        done(1)
    return graph


def _load_teacher(
    config: RunConfig, model: nn.Module, data: DataSets, new_head: bool, notes: list[str]
) -> nn.Module | None:
    """The teacher, if it is trained already; None if there is none, or if it is chosen or trained later."""
    if config.teacher in ("", AUTO, UNPRUNED):
        return None
    if config.teacher == GIVEN:
        if new_head:
            raise DmcpError("--teacher given: --weights has other classes, so the last layer is not trained yet.")
        return model
    if config.teacher_model:
        config = replace(config, model=config.teacher_model, model_args=config.teacher_model_args)
    teacher = build(config, data.classes)
    check_fit(teacher, data, f" ({config.model}, the teacher)")
    load_weights(teacher, Path(config.teacher), notes)  # no fresh last layer: it has nothing to teach
    return teacher


def _is_trained(config: RunConfig, model: nn.Module, data: DataSets, graph: ChannelGraph, notes: list[str]) -> bool:
    """Whether the network with the given weights is trained, by some test images; a note says so if it is not."""
    images = data.test.subset(fixed_order(len(data.test))[:_TESTED])
    batch, _ = default_batch(len(data.train), graph.macs())
    loader = make_loader(
        images,
        min(batch, len(images)),
        train=False,
        device=device_of(model),
        workers=config.workers,
        world=current(),
        corrupt=config.corrupt,
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # `prune` tests it again, and warns
        trained = is_trained(model, data.classes, loader, None)
    if not trained:
        notes.append(
            f"{config.weights}: the network is hardly better than guessing on {counted(len(images), 'test image')}, so "
            "it is treated as untrained."
        )
    return trained


# the data


def read_shape(text: str) -> Shape:
    """Read a shape like 3x224x224."""
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,3}", text):
        raise DmcpError(f"--input: {text!r} is not the shape of one sample; write it like 3x224x224.")
    return tuple(map(int, text.split("x")))


def with_shape(data: DataSets, name: str, sample: Shape) -> DataSets:
    """The data set with image files cropped to this shape; arrays cannot have another shape than their own."""
    if not isinstance(data.train, FolderSet) or not isinstance(data.test, FolderSet):
        if sample != data.shape:
            raise DataError(f"--input: leave it out, because the images of {name} are {show_shape(data.shape)}.")
        return data
    if len(sample) != 3 or sample[0] not in (1, 3):
        raise DataError(
            f"--input: image files have 3 channels, like 3x240x320, or 1 for grayscale, not {show_shape(sample)}."
        )
    train = replace(data.train, size=sample[1:], channels=sample[0])
    test = replace(data.test, size=sample[1:], channels=sample[0])
    return replace(data, train=train, test=test, shape=train.shape)


def check_fit(model: nn.Module, data: DataSets, hint: str = "") -> None:
    """Refuse images and labels that the model cannot take."""
    example = torch.zeros(2, *data.shape, device=device_of(model))
    try:
        with torch.no_grad(), kept_modes(model):
            scores = scores_of(model.eval()(example))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, NotImplementedError) or not isinstance(error, _OF_SHAPES):
            raise TraceError(f"The forward of the network fails: {reason} ({_line_of(error)}).") from error
        raise DataError(f"The network cannot take images of {show_shape(data.shape)}{hint}: {reason}") from error
    if scores is not None and scores.ndim >= 2:
        for part in (data.train, data.test):
            check_range(part.labels, scores.shape[1])


def _line_of(error: Exception) -> str:
    """The last line of the user's own code that an error went through."""
    library = os.path.dirname(torch.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(library)]
    return f"{own_frames[-1].filename}, line {own_frames[-1].lineno}"


def _make_loaders(
    config: RunConfig,
    train: DataSet,
    held_out: DataSet | None,
    judged: DataSet | None,
    data: DataSets,
    device: torch.device,
) -> tuple[Loaders, Loader]:
    """The loaders of search and final training, and that of the test. The final training sees all training images.

    held_out: images for the alphas.
    judged: images that decide on the budget.
    """

    def make(part: DataSet, batch: int, shuffled: bool) -> Loader:
        is_training_set = part is train or part is data.train
        return make_loader(
            part,
            batch if is_training_set else min(batch, len(part)),
            shuffled,
            config.seed,
            device,
            workers=config.workers,
            world=current(),
            corrupt=config.corrupt,
        )

    search: Loader = make(train, config.batch, True)
    few_batches = -(-config.search_images // config.batch)  # a batch of 0 is refused by now
    sees_few = 0 < few_batches < len(search)
    if sees_few:
        search = FewBatches(search, few_batches)
    arch = None if held_out is None else make(held_out, config.batch, True)
    judge = None if judged is None else make(judged, config.batch, False)
    final = None
    if train is not data.train or sees_few or config.train_batch not in (0, config.batch):
        final = make(data.train, config.train_batch or config.batch, True)
    return Loaders(search=search, arch=arch, train=final, held_out=judge), make(data.test, config.batch, False)
