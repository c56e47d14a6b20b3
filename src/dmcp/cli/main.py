"""The command `dmcp`: its words, help and exit codes. Imports no torch; each command imports what it needs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dmcp import __version__
from dmcp.cli.config import Request, make_config
from dmcp.cli.options import Grouped, complete_model, takes_settings
from dmcp.errors import DmcpError, RankError, StoppedError
from dmcp.runs.config import RunConfig
from dmcp.settings import MAX_SEED, Corrupt, FloatType, LatencyConfig, RuntimeKind

_CODES = """\b
Exit codes:
  0    done
  1    a bug in dmcp: please report it
  2    a mistake in what was asked for, told in one sentence on stderr
  3    stopped as asked; the command that goes on is on stderr
  75   lost another rank: the same command, with --resume, goes on
  130  interrupted by Ctrl-C
  141  the reader of the output has gone, as head does
Results are on stdout, all else is on stderr."""
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, which newer typers have a copy of
_EXIT: dict[type[BaseException], int] = {  # the first that fits; all else is a bug
    StoppedError: 3,
    RankError: 75,
    DmcpError: 2,
    _UsageError: 2,
    BrokenPipeError: 141,
    OSError: 2,
    MemoryError: 2,
    KeyboardInterrupt: 130,
    typer.Abort: 130,
    Exception: 1,
}
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_EVERY_RANK = ("prune", "search", "train", "compare-run")  # commands that several ranks work on

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_CODES)


def main() -> None:
    """Run the command; what is wrong with the input is one sentence on stderr and exit code 2."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    if sys.stdout and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    debug = "--debug" in sys.argv  # at any place
    sys.argv = [word for word in sys.argv if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(prog_name="dmcp", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
    except _EndedError as error:  # unfinished files are removed by now
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
    except BaseException as error:
        # typer ends with SystemExit where a reader has gone
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if type(cause).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(cause):  # torch's, of GPU and CPU
            cause = MemoryError().with_traceback(error.__traceback__)
        code = next((code for kind, code in _EXIT.items() if isinstance(cause, kind)), None)
        if code is None or cause is None:
            raise
        _tell(cause, code, debug)
    raise SystemExit(code if isinstance(code, int) else 0)


class _EndedError(BaseException):
    """A signal that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _: object) -> NoReturn:
    """Leave all blocks, which remove their unfinished files, before the process is ended by the signal."""
    signal.signal(number, signal.SIG_IGN)
    raise _EndedError(number)


def _interrupt(*_: object) -> NoReturn:
    """Obey Ctrl-C, once: no other one interrupts what is then put in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell(error: BaseException, code: int, debug: bool) -> None:
    """Say in one line what went wrong."""
    if code == _EXIT[BrokenPipeError]:  # else Python complains, when it ends, of what nobody could be given
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if code in (_EXIT[BrokenPipeError], _EXIT[KeyboardInterrupt]):
        return
    if debug or code == _EXIT[Exception]:
        traceback.print_exception(error)
    sentence = str(error)
    if isinstance(error, _UsageError):
        text, ctx = error.format_message().rstrip("."), error.ctx  # type: ignore[attr-defined]
        sentence = text if text.endswith("?") else f"{text}; see {ctx.command_path if ctx else 'dmcp'} --help."
    elif isinstance(error, OSError) and not isinstance(error, DmcpError):  # a full disk, a folder nobody may read
        sentence = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}."
    elif isinstance(error, MemoryError):
        sentence = "out of memory: try a smaller --batch."
    elif code == _EXIT[Exception]:
        sentence = f"this is a bug, please report it with the lines above ({type(error).__name__})."
    line = "".join(it if it.isprintable() else "\N{REPLACEMENT CHARACTER}" for it in " ".join(sentence.splitlines()))
    print(f"dmcp: {line}", file=sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Of ours the sentence alone: a person at the command line has no use for the line of the code."""
    ours = category.__module__.partition(".")[0] == "dmcp"
    text = f"{message}\n" if ours else warnings.formatwarning(message, category, *place[:2])
    print(text, end="", file=sys.stderr)


def is_launched() -> bool:
    """Whether torchrun or accelerate launch has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def is_first() -> bool:
    """True on rank 0: one process looks, counts and prints."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def _late(module: str) -> Any:
    """A module of commands, which imports torch."""
    return importlib.import_module(f"dmcp.cli.{module}")


def _help(name: str, kind: Any = RunConfig) -> str:
    """The help of a setting."""
    return str(kind.__dataclass_fields__[name].metadata["help"])


ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=_help("model"), autocompletion=complete_model)]
ModelArgs = Annotated[list[str] | None, typer.Option(help=_help("model_args"))]
Ignore = Annotated[list[str] | None, typer.Option(help=_help("ignore"))]
Input = Annotated[str, typer.Option(help=_help("input"))]
Device = Annotated[str, typer.Option(help=_help("device"))]
Workers = Annotated[int | None, typer.Option(min=1, max=1024, help=_help("workers"))]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help=_help("seed"))]
_TYPED_AGAIN = "Network of the run, typed again: needed if building it runs your own code or fetches weights."
RunModel = Annotated[str, typer.Option(help=_TYPED_AGAIN, autocompletion=complete_model)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain data instead of text.")]


@app.callback(invoke_without_command=True)
def _common(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code a mistake was found.")] = False,
) -> None:
    """Channel pruning for any PyTorch CNN.

    \b
    Examples:
      dmcp inspect resnet18
      dmcp prune --model digits:resnet --data digits --budget 50%
      dmcp COMMAND --help
    """
    if version or ctx.invoked_subcommand is None:
        print(f"torch-dmcp {__version__}" if version else ctx.get_help())
        raise typer.Exit
    if ctx.invoked_subcommand not in _EVERY_RANK and not is_first():
        raise typer.Exit


@app.command(cls=Grouped)
@takes_settings
def prune(request: Request) -> None:
    """Search the widths of a network inside a budget, cut it, train it, test it.

    \b
    Examples:
      dmcp prune --model resnet18 --data ~/photos --budget 50% --dry-run
      dmcp prune --model digits:resnet --data digits --budget params:50% --baselines
      dmcp prune --model resnet18 --data ~/photos --budget 8ms --latency-device cpu
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --budget 70% --budget 50% --budget 30%
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --method l2 --no-train
      dmcp prune --resume runs/resnet18-photos-prune
      torchrun --nproc-per-node 8 -m dmcp prune --recipe imagenet_resnet50_1100m --data ~/imagenet
    """
    if request.seeds > 1 and request.resume:
        raise DmcpError("--seeds with --resume: to go on with several seeds, give the command that began them again.")
    if request.seeds > 1 and is_launched():
        raise DmcpError("--seeds starts a process for each seed by itself: leave torchrun out.")
    config = make_config(request)
    if not request.dry_run:
        (_late("prune").prune_seeds if request.seeds > 1 else _late("prune").prune)(config, request)
    elif is_first():
        _late("prune").dry_run(config, request)


@app.command(cls=Grouped)
@takes_settings
def search(request: Request) -> None:
    """Search only: the run keeps the alphas, the expected widths, and the network cut with the searched weights.

    \b
    Examples:
      dmcp search --model resnet50 --data ~/photos --weights resnet50.pth --budget 2G --holdout 0.1
      dmcp search --resume runs/cifar-resnet20-cifar10-search
    """
    config = make_config(request)
    _late("prune").prune(config, request)


@app.command(cls=Grouped)
@takes_settings
def train(request: Request) -> None:
    """Train a network with given widths, or unpruned, and test it.

    \b
    Examples:
      dmcp train --model resnet18 --data ~/photos --widths runs/my-search/widths.json
      dmcp train --model cifar:resnet20 --data cifar10 --epochs 160 --json
    """
    config = make_config(request)
    _late("prune").train(config, request)


@app.command()
def inspect(
    model: ModelName,
    input: Input = "",
    model_args: ModelArgs = None,
    ignore: Ignore = None,
    inexact: Annotated[bool, typer.Option("--inexact", help=_help("inexact"))] = False,
    as_json: AsJson = False,
) -> None:
    """Show what can be pruned in a network, what is tied together, and what is unprunable and why.

    \b
    Examples:
      dmcp inspect resnet50
      dmcp inspect timm:convnext_tiny --input 3x128x128 --inexact
      dmcp inspect mypackage.nets:build --ignore head --json
    """
    args, kept = tuple(model_args or ()), tuple(ignore or ())
    config = RunConfig(model=model, input=input, model_args=args, ignore=kept, inexact=inexact)
    _late("show").inspect(config, as_json)


@app.command(cls=Grouped)
def sample(
    run: RunFolder,
    direct: Annotated[int, typer.Option(min=0, max=10_000, help="So many different samples; 0: expected widths.")] = 0,
    budget: Annotated[str, typer.Option(help="Another budget than the search's, to which widths are scaled.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: the run.")] = None,
    seed: Seed = 0,
    model: RunModel = "",
    as_json: AsJson = False,
) -> None:
    """Widths of a search, inside its budget: the expected ones, or samples (each a file for dmcp train).

    \b
    Examples:
      dmcp sample runs/cifar-resnet20-cifar10-search
      dmcp sample runs/cifar-resnet20-cifar10-search --budget 30%
      dmcp sample runs/cifar-resnet20-cifar10-search --direct 5 --seed 1 --json
    """
    _late("show").sample(run, direct, budget, out or run, seed, model, as_json)


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[str, typer.Option(help="Other data than the run's.")] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch; default: as in the run.")] = None,
    device: Device = "",
    workers: Workers = None,
    corrupt: Annotated[Corrupt, typer.Option(help=_help("corrupt"))] = Corrupt.STOP,
    model: RunModel = "",
    as_json: AsJson = False,
) -> None:
    """Test the network of a run on the test set.

    \b
    Examples:
      dmcp evaluate runs/resnet18-photos-prune
      dmcp evaluate runs/resnet18-photos-prune --data ~/other-photos --device cpu --json
    """
    changes = {"device": device, "workers": workers, "corrupt": corrupt}
    changes |= {name: value for name, value in (("data", data), ("batch", batch)) if value}
    _late("show").evaluate(run, changes, model, as_json)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="FOLDER", help=_help("data"))],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Look at data as the other commands read them: classes, sizes, broken files, test images that are trained on.

    Every image file is decoded. Exit code 2 if there is something that other commands refuse.

    \b
    Examples:
      dmcp data ~/photos
      dmcp data cifar10 --json
    """
    _late("show").data(name, quiet, as_json)


@app.command()
def latency(
    model: Annotated[str, typer.Option(help=_help("model"), autocompletion=complete_model)],
    out: Annotated[str, typer.Option(help="File of the table, for dmcp prune --latency; default: only printed.")] = "",
    data: Annotated[str, typer.Option(help="Data of the run that it is for, which say --input and --classes.")] = "",
    input: Input = "",
    classes: Annotated[int | None, typer.Option(min=1, help="Of the data; default: the builder's.")] = None,
    model_args: ModelArgs = None,
    ignore: Ignore = None,
    batch: Annotated[int, typer.Option(help=_help("batch", LatencyConfig))] = LatencyConfig.batch,
    device: Device = "",
    dtype: Annotated[FloatType, typer.Option(help=_help("dtype", LatencyConfig))] = LatencyConfig.dtype,
    networks: Annotated[int, typer.Option(help=_help("networks", LatencyConfig))] = LatencyConfig.networks,
    runtime: Annotated[RuntimeKind, typer.Option(help=_help("runtime", LatencyConfig))] = LatencyConfig.runtime,
    as_json: AsJson = False,
) -> None:
    """Measure how long networks cut out of a model take here, and how well others can be forecast.

    \b
    Examples:
      dmcp latency --model digits:resnet --out latency.json
      dmcp latency --model resnet18 --data ~/photos --runtime onnx
    """
    args, kept = tuple(model_args or ()), tuple(ignore or ())
    what = RunConfig(model=model, model_args=args, ignore=kept, data=data, input=input, device=device)
    where = device if runtime is RuntimeKind.ONNX else ""  # else where the network is
    how = LatencyConfig(batch=batch, device=where, dtype=dtype, runtime=runtime, networks=networks)
    _late("show").latency(what, classes, how, out, as_json)


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help=".onnx or .pt2 file; default: model.onnx in the run.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="8 bits; default: model.int8.onnx in the run.")] = False,
    model: RunModel = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write the network of a run as a file that runs elsewhere, once it is known to do the same.

    \b
    Examples:
      dmcp export runs/resnet18-photos-prune
      dmcp export runs/resnet18-photos-prune --out photos.pt2
      dmcp export runs/resnet18-photos-prune --int8
    """
    target = out or run / ("model.int8.onnx" if int8 else "model.onnx")
    _late("show").export(run, target, int8, model, quiet, as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run folders.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, oldest first: state, budget, accuracy, MACs as a share of the unpruned network.

    \b
    Examples:
      dmcp runs
      dmcp runs ~/experiments --json
    """
    _late("show").runs(folder, as_json)


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
) -> None:
    """Make one HTML page about some runs, which needs no network and no other file.

    \b
    Examples:
      dmcp report runs/resnet18-photos-prune
      dmcp report runs --out all.html
    """
    _late("show").report(run, out)


@app.command(cls=Grouped)
@takes_settings
def compare(request: Request) -> None:
    """Compare pruning methods under one protocol: the same data, split, recipe and budgets, several seeds.

    Each method at each budget with each seed is a run folder; the same command started again goes on where it was.

    \b
    Examples:
      dmcp compare --model cifar:resnet20 --data cifar10 --budget 50% --budget 30% --methods all --seeds 3
      dmcp compare --model digits:resnet --data digits --methods uniform,mymodule:mine
      dmcp compare --gather runs/table
    """
    if is_launched():
        raise DmcpError("dmcp compare starts a process for each run by itself: leave torchrun out.")
    config = None if request.more["gather"] else make_config(request)
    if config is None:
        _late("compare").gather(Path(request.more["gather"]), request.as_json)
    else:
        _late("compare").compare(config, request)


@app.command(hidden=True)
def compare_run(settings: Path, folder: Path) -> None:
    """Do one run of a comparison; dmcp compare starts these."""
    _late("compare").compare_run(settings, folder)
