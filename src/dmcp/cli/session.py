"""One command at work: network and data by the names that a person types, ranks, run folder, signals."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmcp import __version__, models
from dmcp.budgets import LATENCY, MEMORY, read_budget, show_cost
from dmcp.cli.config import GIVEN, Request, needs_typing, option_word, settle
from dmcp.cutting import with_frozen
from dmcp.data.datasets import NAMES as DATA
from dmcp.data.datasets import ArraySet, DataSet, DataSets, digest_of, load, preprocessing, split
from dmcp.data.folders import FolderSet, no_images, some_sizes
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, StoppedError, WidthsError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.exporting.timing import device_name
from dmcp.report.trackers import Tracker, read_kinds
from dmcp.request import Loaders
from dmcp.retraining import DivergenceWarning
from dmcp.runs.config import RunConfig
from dmcp.runs.files import INPUT, LOG, REPLACED, SETTINGS, STARTS, read_json
from dmcp.runs.writing import START, Run, free_folder, refuse_taken, slug
from dmcp.runtime import progress
from dmcp.runtime.batches import FewBatches, Loader, device_of, generator
from dmcp.runtime.checkpoint import Checkpointer, digest
from dmcp.runtime.distributed import SINGLE_PROCESS, World, current, gather, join, leave
from dmcp.runtime.engine import best_device
from dmcp.runtime.io import LOCK, Lock, check_inflated, zip_sizes
from dmcp.runtime.progress import phase
from dmcp.searching.budget import costs
from dmcp.settings import AUTO, UNPRUNED, Corrupt
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import kept_modes
from dmcp.tracing.trace import trace
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Event, Runtime
from dmcp.training.losses import check_range, scores_of
from dmcp.training.preflight import check_classifier, check_forward, classes_of
from dmcp.units import FS_PER_MS, by, counted

_LARGEST = 256  # side of images whose size is the input of an own network, unless told: larger ones are photographs
_ENLARGED = 1.5  # times by which images may grow without a word
CHILD = "DMCP_CHILD"  # environment variable of processes that a command has started: it has looked at the data
_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
Shape = tuple[int, ...]
Replaced = Mapping[str, list[str]]  # train and test: image files that could not be read, and were replaced by others


def log(*lines: str) -> None:
    """Lines on stderr: stdout has the results."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody listens any more; a signal came amid another line
        for line in lines:
            print(line, file=sys.stderr, flush=True)


# network and data together


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
        """What must stay as it is while a run goes on: the network, its weights, the data, the teacher."""
        labels = torch.cat([self.data.train.labels, self.data.test.labels]).numpy().tobytes()
        counts = {"train": len(self.data.train), "test": len(self.data.test), "shape": list(self.data.shape)}
        data = counts | {"labels": hashlib.sha256(labels).hexdigest()[:16]}
        data |= {"images for training": digest_of(self.data.train), "images for the test": digest_of(self.data.test)}
        given = {"hash of --weights": self.model if self.config.weights else None, "teacher": self.teacher}
        hashes = {name: digest(net.state_dict(), SINGLE_PROCESS) for name, net in given.items() if net is not None}
        return {"fingerprint": self.graph.fingerprint, "macs": self.graph.macs(), "data": data} | hashes


def open_job(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Build the network for the data, load its weights, trace it; DmcpError for what does not fit.

    typed: the options of a new run, whose other settings follow network and data; None: all settings are known.
    """
    place = place_of(config)
    data = load(config.data)
    fresh = build(config, data.classes)
    sample, why, found = sample_shape(config, fresh, data)
    config, reasons = (replace(config, input=by(sample)), {"input": f"{by(sample)}: {why}"}) if why else (config, {})
    data = sized(data, config.data, sample)
    check_fit(fresh, data, " (give the size that it takes, like --input 3x32x32)" if found else "")
    model, new_head, notes = fresh, False, list[str]()
    if config.weights:
        model = build(config, data.classes)
        new_head = load_weights(model, Path(config.weights), notes, data.classes)
        fresh = with_frozen(fresh, model)
    teacher = _teacher(config, model, data, new_head, notes)
    graph = trace_job(config, model, data.shape)
    train, held = split(data.train, config.holdout, config.seed) if config.holdout else (data.train, None)
    if typed is not None:
        trained = bool(config.weights and not new_head)
        config, others = settle(config, typed, len(train), graph.macs(), trained)
        reasons |= others
    loaders, test = _loaders(config, train, held, data, place)
    if found and max(new / old for new, old in zip(data.shape[1:], found, strict=True)) >= _ENLARGED:
        larger = f"The images are about {by(found)} and are enlarged to {by(data.shape[1:])}"
        notes.append(f"{larger}: give --input 3x{by(found)} to train at their size.")
    return Job(
        model=model.to(place),
        fresh=fresh.to(place),
        graph=graph,
        data=data,
        loaders=loaders,
        test=test,
        notes=(*notes, *graph.notes),
        teacher=teacher and teacher.to(place),
        new_head=new_head,
        config=config,
        reasons=reasons,
    )


def sample_shape(config: RunConfig, model: nn.Module, data: DataSets | None = None) -> tuple[Shape, str, Shape]:
    """Shape of a sample; of one that is chosen here, why, and height and width of the image files, if there are any.

    Of image files: what the network states, their one size, or the usual one.
    """
    if config.input:
        return shape(config.input), "", ()
    if isinstance(files := data and data.train, ArraySet):
        return files.shape, "", ()
    sizes = some_sizes(files) if files else []
    common = len({*sizes}) == 1 and max(sizes[0]) <= _LARGEST and not models.of_library(config.model)
    shapes = [models.sample_shape(model, (channels, *sizes[0])) for channels in (3, 1)] if common else []
    chosen = next((it for it in shapes if classes_of(model, torch.zeros(2, *it))), models.sample_shape(model))
    found = sizes[(len(sizes) - 1) // 2] if sizes else ()
    return chosen, "the size of the images" if chosen[1:] == found else "the network's own, or usual", found


def place_of(config: RunConfig) -> torch.device:
    """The device, if there is such a one; of several processes on a machine each has its own GPU."""
    name = config.device or best_device().type
    if name == "cuda" and (world := current()).size > 1:
        name = f"cuda:{world.local}"
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # on the meta device tensors have no values
        return probe.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise DmcpError(f"--device: {name!r} cannot be used here ({reason}): write --device cpu.") from None


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


def _teacher(config: RunConfig, model: nn.Module, data: DataSets, new_head: bool, notes: list[str]) -> nn.Module | None:
    """The network that others learn from, if it is trained already."""
    if config.teacher in ("", AUTO, UNPRUNED):
        return None
    if config.teacher == GIVEN:
        if new_head:
            raise DmcpError("--teacher given: --weights are for other classes, so its last layer knows nothing yet.")
        return model
    if config.teacher_model:
        config = replace(config, model=config.teacher_model, model_args=config.teacher_model_args)
    found = build(config, data.classes)
    check_fit(found, data, f" ({config.model}, the teacher)")
    load_weights(found, Path(config.teacher), notes)  # no fresh last layer: it has nothing to teach
    return found


def load_weights(model: nn.Module, path: Path, notes: list[str], classes: int | None = None) -> bool:
    """Put the weights of a file into the model; never by pickle.

    With `classes`, a last layer for another number of them stays as it is: then True, and a note; all else must fit.
    """
    tensors, own = _read_tensors(path, notes), model.state_dict()
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    odd = [name for name in {**own, **tensors} if (name in own) != (name in tensors)]
    odd = [name for name in odd if not name.endswith("num_batches_tracked")]  # old files have none
    layers = {name.rpartition(".")[0] for name in wrong}
    alike = all(own[name].shape == (classes, *tensors[name].shape[1:]) for name in wrong)
    if odd or not alike or len(layers) > 1:
        name = (wrong or odd)[0]
        there, here = (by(it[name].shape) if name in it else "not there" for it in (tensors, own))
        raise WidthsError(f"{path}: weights of another network: {name} is {there} in the file, {here} in the network.")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in wrong}, strict=False)
    for name in layers:
        notes.append(f"{name} is for {len(tensors[wrong[0]])} classes, the data have {classes}: it starts fresh.")
    return bool(wrong)


def _read_tensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    try:
        check_inflated(path, *zip_sizes(path))
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of a TorchScript file, which is refused
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except (PermissionError, SafetensorError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except Exception as error:  # torch raises many kinds for a file that is cut off, or holds more than weights
        reason = "" if zipfile.is_zipfile(path) else "broken, cut off or "
        way = "as torch.save(model.state_dict(), ...) writes them"
        raise FileError(f"{path}: {reason}not plain weights, {way}.") from error
    inner = found if isinstance(found, Mapping) else {}
    tables = [key for key, it in inner.items() if _is_table(it)]
    for key in ("state_dict", "model_state_dict", "model", *(tables if len(tables) == 1 else ())):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            notes += [f"{path} holds {', '.join(map(str, tables))}: {key} is used."] if len(tables) > 1 else []
    if not _is_table(found):
        keys = ", ".join(map(str, [*inner][:9])) or type(found).__name__
        raise FileError(f"{path}: holds no table of weights, or several without a known name, but {keys}.")
    for wrapper in ("module.", "_orig_mod.", "module."):  # of DDP, of torch.compile, of one in the other
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    return dict(found)


def _is_table(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(isinstance(value, Tensor) for value in found.values())


# the data


def shape(text: str) -> Shape:
    """3x224x224 as numbers."""
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,3}", text):
        raise DmcpError(f"--input: {text!r} is not the shape of one sample; write it like 3x224x224.")
    return tuple(map(int, text.split("x")))


def sized(data: DataSets, name: str, wanted: Shape) -> DataSets:
    """Files are cropped to this shape; arrays are what they are."""
    if not isinstance(data.train, FolderSet) or not isinstance(data.test, FolderSet):
        if wanted != data.shape:
            raise DataError(f"--input: the images of {name} are {by(data.shape)}: leave it out.")
        return data
    if len(wanted) != 3 or wanted[0] not in (1, 3):
        raise DataError(f"--input: image files have 3 channels, like 3x240x320, or 1 in grey, not {by(wanted)}.")
    train, test = (replace(part, size=wanted[1:], channels=wanted[0]) for part in (data.train, data.test))
    return replace(data, train=train, test=test, shape=train.shape)


def check_fit(model: nn.Module, data: DataSets, more: str = "") -> None:
    """Refuse images and labels that the model cannot take."""
    example = torch.zeros(2, *data.shape, device=device_of(model))
    try:
        with torch.no_grad(), kept_modes(model):
            scores = scores_of(model.eval()(example))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"The network cannot take images of {by(data.shape)}{more}: {reason}") from error
    if scores is not None and scores.ndim >= 2:
        for part in (data.train, data.test):
            check_range(part.labels, scores.shape[1])


def _loaders(
    config: RunConfig, train: DataSet, held: DataSet | None, data: DataSets, place: torch.device
) -> tuple[Loaders, Loader]:
    """Those of the search and of the final training, which sees what is held out, too; and the test's."""
    how: dict[str, Any] = {"workers": config.workers, "world": current(), "corrupt": config.corrupt}

    def make(part: DataSet, batch: int, shuffled: bool) -> Loader:
        size = batch if part is train or part is data.train else min(batch, len(part))
        return make_loader(part, size, shuffled, config.seed, place, **how)

    first: Loader = make(train, config.batch, True)
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


# the command


@dataclass(frozen=True, eq=False)
class Session:
    """What a command works with."""

    world: World
    job: Job
    run: Run
    runtime: Runtime  # engine, checkpoints and events

    def replaced(self) -> Replaced:
        """Image files that others took the place of, on all ranks, which must all call it; rank 0 names them."""
        every = gather(self.job.replaced, self.world)
        found = {part: sorted({file for own in every for file in own[part]}) for part in ("train", "test")}
        if self.world.first and any(found.values()):
            self.run.write(REPLACED, found)
            log(*describe_replaced(found))
        return found


@contextlib.contextmanager
def session(config: RunConfig, request: Request, check: Callable[[Job], Job] = lambda job: job) -> Iterator[Session]:
    """Meet the other ranks, open model and data, take the run folder.

    check: called before anything is written; it may raise, and returns the job, perhaps with a latency table.
    """
    resume, folder = bool(request.resume), run_folder(config, request)
    if config.track:
        read_kinds(config.track)  # refuses what is not installed
    world, begun = join(config.device), False
    words = ["dmcp", config.command, "--resume", str(folder)]
    words += [word for name, value in needs_typing(config).items() for word in (option_word(name), value)]
    again = shlex.join(words)
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(progress.showing(False if request.quiet or request.as_json else None, lines=True))
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DivergenceWarning)  # the command says it at its end
            if resume:
                check_data_is_here(folder, config)
            job = open_checked(config, None if resume or config.command == "compare" else request.typed)
            if world.first and not resume:
                refuse_taken(folder)  # before anything is measured
            job = check(job)
            config = job.config
            asked = undo.enter_context(_signals())  # until here there is nothing to save
            folder = Path(gather(str(folder), world)[0])
            run, listeners = Run(folder), list[Callable[[Event], None]]()
            same = replace(config, workers=None, corrupt=Corrupt.STOP, track=())  # they change no result
            checkpointer = run.checkpointer(
                {"config": same.to_json()} | job.identity,
                every_steps=config.save_steps,
                every_seconds=60 * config.save_minutes,
                stop_requested=asked,
            )
            if world.first:
                undo.enter_context(_taken(run, job, checkpointer if resume else None))
                listeners.append(run.on_event)
            if world.first and config.track:
                kinds = read_budget(config.search.budget).kinds if config.search else ()
                tracker = undo.enter_context(Tracker(config.track, folder, config.to_json(), kinds))
                listeners.append(tracker.on_event)
            begun = True

            def on_event(event: Event) -> None:
                for listen in listeners:
                    listen(event)

            runtime = Runtime(engine=config.engine, checkpointer=checkpointer, on_event=on_event)
            yield Session(world, job, run, runtime)
    except (StoppedError, DataError) as error:
        if not begun or not folder.is_dir():  # a new run that failed before its first step is gone
            raise
        kind = StoppedError if isinstance(error, StoppedError) else DataError
        raise kind(f"{error} Go on with: {again}") from error
    finally:
        leave()


def run_folder(config: RunConfig, request: Request) -> Path:
    """The folder of the run that goes on, as asked for, or a new one whose name says what it is."""
    command = "seeds" if request.seeds > 1 else config.command
    name = slug(f"{config.model} {Path(config.data).name} {command}")
    return Path(request.resume or request.out or free_folder(name))


def open_checked(config: RunConfig, typed: Mapping[str, Any] | None = None) -> Job:
    """Open network and data, and say what a person may not know about them.

    Refused are a network that is no classifier of these images or not finite, and broken test images. A child process
    does not look at the files and says nothing: its parent did.
    """
    job = open_job(config, typed)
    noise = torch.randn(2, *job.data.shape, generator=generator(0)).to(device_of(job.model))
    wanted = dict(map(models.argument, config.model_args)).get("num_classes", job.data.classes)
    check_classifier(job.model, noise, wanted)
    check_forward(job.model, noise)
    if job.teacher is not None:
        check_forward(job.teacher, noise, "teacher")
    if CHILD in os.environ:
        return job
    test = job.data.test
    if isinstance(test, FolderSet) and config.corrupt is not Corrupt.SKIP and (broken := no_images(test)):
        some = f"{broken[0].file} ({broken[0].reason}), one of {counted(len(broken), 'test image')}, cannot be read"
        raise DataError(f"{some}: repair them, or (but for compare) skip them with --corrupt skip.")
    if current().first:
        log(*dict.fromkeys(job.notes))
    return job


@contextlib.contextmanager
def _taken(run: Run, job: Job, resume: Checkpointer | None) -> Iterator[None]:
    """Hold the folder of a run that goes on, or a new one, which is removed if the run fails before its first step."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with Lock(run.folder):
        if resume and run.done:
            run.close()  # if it was killed just before
            raise FileError(f"{run.folder}: this run is done; dmcp report {shlex.quote(str(run.folder))} shows it.")
        if resume:
            run.rewind(resume)
            stored = read_json(run.folder / SETTINGS)
            run.write(SETTINGS, stored | {STARTS: stored.get(STARTS, {}) | _start(run, job)})
        else:
            refuse_taken(run.folder)  # now that it is ours
            (run.folder / LATENCY_FILE).unlink(missing_ok=True)  # of a run that was killed as it began
            _begin(run, job)
        with (run.folder / SETTINGS).open() as settings, (run.folder / LOG).open() as log:
            try:
                yield
            except BaseException:
                if not resume and not run.lines() and {it.name for it in run.folder.iterdir()} <= {LOCK, *START}:
                    shutil.rmtree(run.folder)
                raise
            if not all(os.fstat(file.fileno()).st_nlink for file in (settings, log)):
                raise FileError(f"{run.folder}: {SETTINGS} or {LOG} was removed while the run went on: start it anew.")


def _begin(run: Run, job: Job) -> None:
    graph = job.graph
    facts = {
        "classes": job.data.classes,
        "shape": list(job.data.shape),
        "unpruned": {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)},
        STARTS: _start(run, job),
        "argv": sys.argv,
    }
    table = Latency.of(graph)
    first = {} if table is None else {LATENCY_FILE: table.to_json()}
    run.write_all(first | {INPUT: preprocessing(job.data), SETTINGS: job.config.to_json() | facts, LOG: ""})


def _start(run: Run, job: Job) -> dict[str, Any]:
    """When a run begins or goes on, after how many lines of its log, and what it runs on; nothing compares this."""
    facts = {
        "log_lines": run.lines(),
        "dmcp": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # which also names its CUDA
        **{name: it.version for name in ("torchvision", "numpy") for it in [*distributions(name=name)][:1]},
        "device": device_name(str(device_of(job.model))),
        "threads": torch.get_num_threads(),
        "processes": current().size,
    }
    return {datetime.now(UTC).isoformat(timespec="milliseconds"): facts}


@functools.cache
def _commit() -> str:
    """The commit of the clone that this file is in, marked where it was changed; empty if there is none."""
    root = Path(__file__).parents[3]
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    with contextlib.suppress(OSError):  # no git
        if (root / ".git").exists():
            return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return ""


# signals


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals that ask us to stop go to this handler during the block; ignored ones stay ignored."""
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is handler:  # not if a Ctrl-C has been obeyed
                signal.signal(number, old)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C are remembered, and the run saves at the end of its step; a second Ctrl-C is obeyed."""
    asked, owner, before = list[int](), os.getpid(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a worker that reads images, and has this handler by fork
            return
        asked.append(number)
        if len(asked) == 1:
            log("asked to stop: the step is finished and saved first")
        elif number == signal.SIGINT and callable(before):
            before(number, frame)

    with handled_by(note):
        yield lambda: bool(asked)


# what is printed


def print_json(data: Any) -> None:
    """Plain data, and nothing else, on stdout."""
    print(json.dumps(data, indent=1))


def describe_replaced(replaced: Replaced) -> list[str]:
    """2 training and 1 test image could not be read, and others took their place: a.png, b.png, c.png; or nothing."""
    files = [*replaced["train"], *replaced["test"]]
    some = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
    counts = f"{len(replaced['train'])} training and {counted(len(replaced['test']), 'test image')}"
    return [f"{counts} could not be read, and others took their place: {some}"] if files else []


def result_facts(folder: Path, graph: ChannelGraph, widths: Widths, replaced: Replaced | None = None) -> dict[str, Any]:
    """The run, what its network costs, and how many image files were replaced, as plain data."""
    counts = {part: len(files) for part, files in (replaced or {}).items()}
    return {"folder": str(folder)} | cost_facts(graph, widths) | ({"replaced": counts} if counts else {})


def cost_facts(graph: ChannelGraph, widths: Widths) -> dict[str, Any]:
    """What widths cost, as a share of the unpruned network too, and the widths, as plain data."""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    shares = {f"{kind}_share": spent[kind] / full[kind] for kind in spent}
    return plain_costs(spent) | shares | {"widths": dict(widths)}


def plain_costs(spent: Mapping[str, int]) -> dict[str, float]:
    """Costs as plain data; units are in the names."""
    names = {LATENCY: f"{LATENCY}_ms", MEMORY: f"{MEMORY}_bytes"}
    return {names.get(kind, kind): amount / FS_PER_MS if kind == LATENCY else amount for kind, amount in spent.items()}


def describe_costs(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 macs (49.9%), 41,000 params (53.8%), 32.77 kB (75.0%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    return ", ".join(f"{show_cost(kind, amount)} ({amount / full[kind]:.1%})" for kind, amount in spent.items())
