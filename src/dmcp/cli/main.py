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
from dmcp.cli.completion import complete_model, complete_run
from dmcp.cli.config import Request, make_config
from dmcp.cli.options import Grouped, takes_settings
from dmcp.errors import DmcpError, DmcpWarning, RankError, StoppedError
from dmcp.runs.config import RunConfig
from dmcp.settings import MAX_SEED, Corrupt, FloatType, LatencyConfig, LatencyMode, RuntimeKind

_CODES = """\b
Exit codes:
  0    success
  1    a bug in dmcp; please report it
  2    a mistake in the command, the files or the settings; one sentence on stderr explains it
  3    stopped as requested; stderr shows the command that resumes the run
  75   another rank was lost; continue with the same command and --resume
  130  interrupted by Ctrl-C
  141  the program reading the output, such as head, closed the pipe
Results are printed to stdout, everything else to stderr."""
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click; newer versions of typer bring a copy of it
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
    _handle_signals()
    if sys.stdout and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    debug = "--debug" in sys.argv  # at any place
    sys.argv = [word for word in sys.argv if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code = app(prog_name="dmcp", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
    except _EndedError as error:  # unfinished files are removed by now
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
    except BaseException as error:
        cause = _cause_of(error)
        code = _exit_code(cause)
        if code is None or cause is None:
            raise
        _tell(cause, code, debug)
    raise SystemExit(code if isinstance(code, int) else 0)


# signals


class _EndedError(BaseException):
    """A signal that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _handle_signals() -> None:
    """Let signals end the command in good order, unless somebody else handles them already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _: object) -> NoReturn:
    """Leave all blocks, which remove their unfinished files, before the process is ended by the signal."""
    signal.signal(number, signal.SIG_IGN)
    raise _EndedError(number)


def _interrupt(*_: object) -> NoReturn:
    """Obey the first Ctrl-C, and ignore others while the command cleans up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


# errors


def _cause_of(error: BaseException) -> BaseException | None:
    """The error that ended the command."""
    if isinstance(error, SystemExit):  # typer's, where the reader of the output has gone
        return error.__context__
    if _is_out_of_memory(error):
        return MemoryError().with_traceback(error.__traceback__)
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory, on a GPU or on the CPU."""
    torch = sys.modules.get("torch")  # imported only if the command needed it
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # For the CPU torch has no class of error: its allocator raises a RuntimeError, whose text alone names it.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _exit_code(error: BaseException | None) -> int | None:
    """The code of the first class that the error is of; None if it is none of them."""
    for kind, code in _EXIT.items():
        if isinstance(error, kind):
            return code
    return None


def _tell(error: BaseException, code: int, debug: bool) -> None:
    """Say in one line what went wrong."""
    if code == _EXIT[BrokenPipeError]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains about unwritten output when it ends
    if code in (_EXIT[BrokenPipeError], _EXIT[KeyboardInterrupt]):
        return
    if debug or code == _EXIT[Exception]:
        traceback.print_exception(error)
    sentence = " ".join(_sentence(error, code).splitlines())
    letters = [letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in sentence]
    print(f"dmcp: {''.join(letters)}", file=sys.stderr)


def _sentence(error: BaseException, code: int) -> str:
    """What went wrong, for the person who typed the command."""
    if isinstance(error, _UsageError):
        context = error.ctx  # type: ignore[attr-defined]
        command = "dmcp"
        if context:
            command = context.command_path
        return f"{error.format_message()} (See {command} --help.)"  # type: ignore[attr-defined]
    if isinstance(error, OSError) and not isinstance(error, DmcpError):  # a full disk, a folder nobody may read
        reason = error.strerror or str(error)
        if error.filename:
            return f"{error.filename}: {reason}."
        return f"{reason}."
    if isinstance(error, MemoryError):
        return "out of memory: try a smaller --batch."
    if code == _EXIT[Exception]:
        return f"this is a bug, please report it with the lines above ({type(error).__name__})."
    return str(error)


def _show_warning(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> None:
    """Print our own warnings as a sentence only: where they are in the code is of no use at the command line."""
    if issubclass(category, DmcpWarning):
        text = f"{message}\n"
    else:
        text = warnings.formatwarning(message, category, file, line)
    print(text, end="", file=sys.stderr)


# words that several commands share


def is_launched() -> bool:
    """Whether torchrun or accelerate launch has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def is_first() -> bool:
    """True on rank 0: one process looks, counts and prints."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def _late(module: str) -> Any:
    """Import a module of commands now: all but `runs` import torch."""
    return importlib.import_module(f"dmcp.cli.{module}")


def _help(name: str, kind: Any = RunConfig) -> str:
    """The help of a setting."""
    return str(kind.__dataclass_fields__[name].metadata["help"])


ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=_help("model"), autocompletion=complete_model)]
ModelArgs = Annotated[list[str] | None, typer.Option(metavar="<str>", help=_help("model_args"))]
Ignore = Annotated[list[str] | None, typer.Option(metavar="<str>", help=_help("ignore"))]
Input = Annotated[str, typer.Option(help=_help("input"))]
Device = Annotated[str, typer.Option(help=_help("device"))]
Workers = Annotated[int | None, typer.Option(metavar="<int>", min=1, max=1024, help=_help("workers"))]
Seed = Annotated[int, typer.Option(metavar="<int>", min=0, max=MAX_SEED, help="Random seed for --direct.")]
_TYPED_AGAIN = "Network of the run. Required if building it runs your own code or downloads weights."
RunModel = Annotated[str, typer.Option(help=_TYPED_AGAIN, autocompletion=complete_model)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", autocompletion=complete_run)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.callback(invoke_without_command=True)
def _common(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Channel pruning for any PyTorch CNN.

    \b
    Examples:
      dmcp demo
      dmcp inspect resnet18
      dmcp prune --model digits:resnet --data digits --budget 50%
      dmcp COMMAND --help
    """
    if version or ctx.invoked_subcommand is None:
        print(f"torch-dmcp {__version__}" if version else ctx.get_help())
        raise typer.Exit
    if ctx.invoked_subcommand not in _EVERY_RANK and not is_first():
        raise typer.Exit


@app.command(cls=Grouped, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: a new one in runs/.")] = None,
) -> None:
    """Prune a small network on handwritten digits.

    It runs three commands, which it prints: prune, export and report. They take about two minutes on a CPU.
    Other options are passed on to dmcp prune.

    \b
    Examples:
      dmcp demo
      dmcp demo --budget 30%
    """
    _late("demo").demo(out, ctx.args, lambda: app(prog_name="dmcp", standalone_mode=False))


@app.command(cls=Grouped)
@takes_settings
def prune(request: Request) -> None:
    """Prune a network: search its widths within a budget, cut it, train it and test it.

    \b
    Examples:
      dmcp prune --model resnet18 --data ~/photos --budget 50% --dry-run
      dmcp prune --model digits:resnet --data digits --budget params:50% --baselines
      dmcp prune --model resnet18 --data ~/photos --budget 8ms --latency-device cpu
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --budget 70% --budget 50% --budget 30%
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --method sensitivity --no-train
      dmcp prune --resume runs/resnet18-photos-prune
      torchrun --nproc-per-node 8 -m dmcp prune --recipe imagenet_resnet50_1100m --data ~/imagenet
    """
    if request.seeds > 1 and request.resume:
        raise DmcpError("--seeds cannot be used with --resume: to continue, repeat the command that started the seeds.")
    if request.seeds > 1 and is_launched():
        raise DmcpError("--seeds starts a process for each seed: run it without torchrun.")
    config = make_config(request)
    if request.dry_run:
        if is_first():
            _late("forecast").dry_run(config, request)
    elif request.seeds > 1:
        _late("seeds").prune_seeds(config, request)
    else:
        _late("prune").prune(config, request)


@app.command(cls=Grouped)
@takes_settings
def search(request: Request) -> None:
    """Search and cut, without the final training. The run contains the alphas, the expected widths and the cut network.

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
    """Train and test a network, unpruned or with given widths.

    \b
    Examples:
      dmcp train --model resnet18 --data ~/photos --widths runs/my-search/widths.json
      dmcp train --model cifar:resnet20 --data cifar10 --epochs 160 --json
    """
    config = make_config(request)
    _late("prune").train(config, request)


@app.command(cls=Grouped)
def inspect(
    model: ModelName,
    input: Input = "",
    model_args: ModelArgs = None,
    ignore: Ignore = None,
    inexact: Annotated[bool, typer.Option("--inexact", help=_help("inexact"))] = False,
    as_json: AsJson = False,
) -> None:
    """Show what can be pruned in a network, which layers are tied together, and what is unprunable and why.

    \b
    Examples:
      dmcp inspect resnet50
      dmcp inspect timm:convnext_tiny --input 3x128x128 --inexact
      dmcp inspect mypackage.nets:build --ignore head --json
    """
    config = RunConfig(
        model=model, input=input, model_args=tuple(model_args or ()), ignore=tuple(ignore or ()), inexact=inexact
    )
    _late("show").inspect(config, as_json)


@app.command(cls=Grouped)
def sample(
    run: RunFolder,
    direct: Annotated[
        int,
        typer.Option(
            metavar="<int>",
            min=0,
            max=10_000,
            help="Number of widths to sample; without it, the expected widths are written.",
        ),
    ] = 0,
    budget: Annotated[str, typer.Option(help="Budget to scale the widths to. Default: that of the search.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the run folder.")] = None,
    seed: Seed = 0,
    model: RunModel = "",
    as_json: AsJson = False,
) -> None:
    """Write the expected or sampled widths of a search, within its budget, as files for dmcp train.

    \b
    Examples:
      dmcp sample runs/cifar-resnet20-cifar10-search
      dmcp sample runs/cifar-resnet20-cifar10-search --budget 30%
      dmcp sample runs/cifar-resnet20-cifar10-search --direct 5 --seed 1 --json
    """
    _late("show").sample(run, direct, budget, out or run, seed, model, as_json)


@app.command(cls=Grouped)
def evaluate(
    run: RunFolder,
    data: Annotated[str, typer.Option(help="Data set to test on. Default: that of the run.")] = "",
    batch: Annotated[
        int | None, typer.Option(metavar="<int>", min=1, help="Batch size. Default: that of the run.")
    ] = None,
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
    changes: dict[str, Any] = {"device": device, "workers": workers, "corrupt": corrupt}
    if data:
        changes["data"] = data
    if batch:
        changes["batch"] = batch
    _late("show").evaluate(run, changes, model, as_json)


@app.command(cls=Grouped)
def data(
    name: Annotated[str, typer.Argument(metavar="FOLDER", help=_help("data"))],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check a data set: its classes, image sizes, broken files, and images that are in both sets.

    Every image file is decoded. The exit code is 2 if the other commands would reject the data.

    \b
    Examples:
      dmcp data ~/photos
      dmcp data cifar10 --json
    """
    _late("show").data(name, quiet, as_json)


@app.command(cls=Grouped)
def latency(
    model: Annotated[str, typer.Option(help=_help("model"), autocompletion=complete_model)],
    out: Annotated[
        str,
        typer.Option(help="File to write the table to. Default: the table is only printed."),
    ] = "",
    data: Annotated[str, typer.Option(help="Data set of the later run; it determines --input and --classes.")] = "",
    input: Input = "",
    classes: Annotated[
        int | None, typer.Option(metavar="<int>", min=1, help="Number of classes. Default: that of the builder.")
    ] = None,
    model_args: ModelArgs = None,
    ignore: Ignore = None,
    batch: Annotated[int, typer.Option(help=_help("batch", LatencyConfig))] = LatencyConfig.batch,
    device: Device = "",
    dtype: Annotated[FloatType, typer.Option(help=_help("dtype", LatencyConfig))] = LatencyConfig.dtype,
    networks: Annotated[int, typer.Option(help=_help("networks", LatencyConfig))] = LatencyConfig.networks,
    runtime: Annotated[RuntimeKind, typer.Option(help=_help("runtime", LatencyConfig))] = LatencyConfig.runtime,
    mode: Annotated[LatencyMode | None, typer.Option(help=_help("mode", LatencyConfig))] = None,
    channels_last: Annotated[
        bool | None, typer.Option("--channels-last/--no-channels-last", help=_help("channels_last", LatencyConfig))
    ] = None,
    write: Annotated[
        str, typer.Option(help="Folder to write the networks to, as ONNX files to be timed on another device.")
    ] = "",
    read: Annotated[
        str, typer.Option(help="CSV file of --write, with the times filled in; the table is made from it.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Time networks cut from a model, and fit a table that predicts the latency of other widths.

    \b
    Examples:
      dmcp latency --model digits:resnet --out latency.json
      dmcp latency --model resnet18 --data ~/photos --runtime onnx
      dmcp latency --model resnet18 --device cuda --batch 256 --dtype bfloat16 --mode compiled
      dmcp latency --model resnet18 --write phone
      dmcp latency --model resnet18 --read phone/times.csv --out phone.json
    """
    config = RunConfig(
        model=model,
        model_args=tuple(model_args or ()),
        ignore=tuple(ignore or ()),
        data=data,
        input=input,
        device=device,
    )
    timed_on = ""  # else on the device of the network
    if runtime is RuntimeKind.ONNX:
        timed_on = device
    settings = LatencyConfig(
        batch=batch,
        device=timed_on,
        dtype=dtype,
        runtime=runtime,
        mode=mode,
        channels_last=channels_last,
        networks=networks,
    )
    _late("show").latency(config, classes, settings, out, write, read, as_json)


@app.command(cls=Grouped)
def export(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help=".onnx or .pt2 file. Default: model.onnx in the run.")] = None,
    budget: Annotated[
        str, typer.Option(help="Export only the network of this budget. Default: those of all budgets of the run.")
    ] = "",
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to 8 bits (model.int8.onnx).")] = False,
    model: RunModel = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Export the network of a run, or of each of its budgets, and check that the file gives the same outputs.

    \b
    Examples:
      dmcp export runs/resnet18-photos-prune
      dmcp export runs/resnet18-photos-prune --out photos.pt2
      dmcp export runs/resnet18-photos-prune --int8
      dmcp export runs/resnet18-photos-prune --budget 50%
    """
    _late("show").export(run, out, budget, int8, model, quiet, as_json)


@app.command(cls=Grouped)
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that contains runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, oldest first, with state, budget, accuracy and share of MACs left.

    \b
    Examples:
      dmcp runs
      dmcp runs ~/experiments --json
    """
    _late("runs").runs(folder, as_json)


@app.command(cls=Grouped)
def report(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", autocompletion=complete_run),
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about runs.

    \b
    Examples:
      dmcp report runs/resnet18-photos-prune
      dmcp report runs --out all.html
    """
    _late("show").report(run, out)


@app.command(cls=Grouped)
@takes_settings
def compare(request: Request) -> None:
    """Compare pruning methods under one protocol: the same data, split, recipe and budgets, over several seeds.

    Each combination of method, budget and seed has its own run folder. Repeat the command to continue where it stopped.

    \b
    Examples:
      dmcp compare --model cifar:resnet20 --data cifar10 --budget 50% --budget 30% --methods all --seeds 3
      dmcp compare --model digits:resnet --data digits --methods uniform,mymodule:mine
      dmcp compare --gather runs/table
    """
    if is_launched():
        raise DmcpError("dmcp compare starts a process for each run: run it without torchrun.")
    if request.more["gather"]:
        _late("compare").gather(Path(request.more["gather"]), request.as_json)
    else:
        _late("compare").compare(make_config(request), request)


@app.command(hidden=True)
def compare_run(settings: Path, folder: Path) -> None:
    """Do one run of a comparison. Started by dmcp compare."""
    _late("compare").compare_run(settings, folder)
