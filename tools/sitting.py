"""Fill tables on a machine that is lent for minutes only: its experiments, and what is worth keeping of their cells.

    PYTHONPATH=src python3 tools/sitting.py ready                    # here: which files go with which call
    PYTHONPATH=src python3 tools/sitting.py call rest --out $OUT     # there, in every call: bring, begin, wait, keep
    for one in kept-*.tgz; do tar xzf $one -C runs/sitting; done     # here: `dmcp paper ... --gather` makes tables

A kept cell that is done has what tables need, without a line for each step and without weights, but that it has these
where a cell which is not done starts or learns from it. One that is not done has its newest checkpoints, and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dmcp.comparison.cell_files import is_done
from dmcp.comparison.cells import COPY

RECIPE = "--batch 512 --lr 1.6 --weight-decay 5e-4"
LEAST_GAIN = 0.85  # of the time of a search step: below it own kernels are used
MOST_BYTES = 2**20  # of weights in the first archive
PART, MOST_PARTS = 15 * 2**20, 8  # bytes of weights in an archive, and archives: what comes back from a lent machine
PATIENCE = 90  # seconds that measuring steps may take
SHARDS = ("train-0.npz", "train-1.npz", "train-2.npz", "test-0.npz")
MOST_SENT, MOST_PATHS = 63 * 2**20, 8  # bytes that travel with a call, the working tree among them, and carried paths
HELD = 1650  # seconds from the first call until the experiments are stopped: the start before it counts, too
_ENDED = "ended"  # a file that is there when no experiment runs any more


@dataclass(frozen=True, kw_only=True)
class Stage:
    """An experiment, and when the next one may begin beside it."""

    folder: str
    options: str  # of dmcp paper, without data, recipe and folders
    at_once: int
    next_at: int  # cells that are done when the next stage begins; so many that the last ones do not leave the GPU idle
    kernels: str = ""  # model whose steps are measured with own kernels and without; the faster way is taken
    short: str = ""  # options in place of the others where own kernels do not help


_MOBILE = "main --model cifar:mobilenet_v2 --budget 50% --budget 30% --seeds 2 --epochs 20"
_FULL = "full --epochs 50 --search-epochs 15 --label-smoothing 0"  # a search of 30 and a training of 200
_LENGTH, _LONGEST, _HALF, _BORDER = (
    _FULL.replace("full", name) for name in ("length", "taught", "halfway", "borderlong")
)
_RATES = "rates --recorded --epochs 60 --seeds 3"
_RECIPE = "recipe --epochs 25 --search-epochs 15 --label-smoothing 0 --model cifar:resnet56 --seeds 2"  # half of it
_TINY = "--model digits:resnet --epochs 1 --search-epochs 2 --seeds 1"
PLANS = {
    "mobile": (
        Stage(
            folder="mb",
            options=f"{_MOBILE} --search-epochs 30",
            short=f"{_MOBILE} --search-epochs 20",
            at_once=3,
            next_at=12,
            kernels="cifar:mobilenet_v2",
        ),
        Stage(folder="ex", options="explain --recorded --epochs 60 --seeds 3", at_once=6, next_at=99),
    ),
    "full": (
        Stage(folder="full56", options=f"{_FULL} --model cifar:resnet56 --seeds 2", at_once=4, next_at=6),
        Stage(folder="full20", options=f"{_FULL} --seeds 3", at_once=6, next_at=99),
    ),
    "last": (  # all that is left of both
        Stage(folder="full56", options=f"{_FULL} --model cifar:resnet56 --seeds 2", at_once=4, next_at=4),
        Stage(folder="full20", options=f"{_FULL} --seeds 3", at_once=4, next_at=9),
        Stage(folder="ex", options="explain --recorded --epochs 60 --seeds 3", at_once=6, next_at=99),
    ),
    "rest": (  # of the last one; the first stage has a target of its own, the second trains its two teachers again
        Stage(folder="full20", options=f"{_FULL} --recorded --seeds 3", at_once=5, next_at=10),
        Stage(folder="full56", options=f"{_FULL} --recorded --model cifar:resnet56 --seeds 2", at_once=2, next_at=5),
        Stage(folder="ex", options="explain --recorded --epochs 60 --seeds 3", at_once=6, next_at=9),
        Stage(folder="len56", options=f"{_LENGTH} --recorded --model cifar:resnet56 --seeds 2", at_once=4, next_at=99),
    ),
    "choose": (  # what is chosen without the test images, before "aim"
        Stage(folder="rec56", options=_RECIPE, at_once=4, next_at=2),
        Stage(folder="rates", options=_RATES, at_once=6, next_at=99),
    ),
    "aim": (  # the longest recipe, then rows that make the tables fair; teachers of begun archives are cells, too
        Stage(folder="full56", options=f"{_LONGEST} --recorded --model cifar:resnet56 --seeds 2", at_once=4, next_at=5),
        Stage(folder="full20", options=f"{_FULL} --recorded --seeds 3", at_once=3, next_at=5),
        Stage(folder="len56", options=f"{_LENGTH} --recorded --model cifar:resnet56 --seeds 2", at_once=4, next_at=99),
    ),
    "seeds": (  # how sure the main result is, and the searches of length that were begun (begun-2.tgz)
        Stage(folder="even", options="even --recorded --epochs 60 --seeds 3", at_once=10, next_at=20),
        Stage(folder="seeds", options="seeds --recorded --epochs 60 --seeds 8", at_once=10, next_at=28),
        Stage(folder="half56", options=f"{_HALF} --recorded --model cifar:resnet56 --seeds 2", at_once=2, next_at=1),
        Stage(folder="len56", options=f"{_LENGTH} --recorded --model cifar:resnet56 --seeds 2", at_once=2, next_at=99),
    ),
    "border": (  # whether a border is better, on held-out images, and what it gives; beside it the long recipe
        Stage(folder="border", options="border bordered --recorded --epochs 60 --seeds 8", at_once=11, next_at=1),
        Stage(folder="long56", options=f"{_BORDER} --recorded --model cifar:resnet56 --seeds 2", at_once=2, next_at=99),
    ),
    "rehearsal": (  # with digits, on a CPU
        Stage(
            folder="mb",
            options=f"main {_TINY} --budget 50%",
            short=f"main {_TINY} --budget 30%",
            at_once=2,
            next_at=3,
            kernels="digits:resnet",
        ),
        Stage(folder="ex", options=f"warmup {_TINY}", at_once=2, next_at=99),
    ),
}


def go(plan: str, seconds: float, data: str, base: Path) -> None:
    """Run the stages of a plan, each beside the last cells of the one before; stop all when the time is over."""
    end = time.monotonic() + seconds
    base.mkdir(parents=True, exist_ok=True)
    results = base / "results"
    if not results.exists():  # what is recorded counts
        shutil.copytree(Path(__file__).resolve().parents[1] / "results", results)
    running: list[subprocess.Popen[bytes]] = []
    with _told_end(base), _mps(base):
        for stage in PLANS[plan]:
            if time.monotonic() >= end:
                break
            recipe, batch = ("", "16") if data == "digits" else (RECIPE, "512")
            options = f"{_way(stage, base, batch)} {recipe} --at-once {stage.at_once}"
            places = ["--data", data, "--out", str(base / stage.folder), "--results", str(results)]
            _note(base, f"{stage.folder}: {options}")
            with (base / f"{stage.folder}.txt").open("ab") as said:
                command = [*_DMCP, "paper", *shlex.split(options), *places]
                running.append(subprocess.Popen(command, stdout=said, stderr=said))
            while running[-1].poll() is None and _done(base / stage.folder) < stage.next_at and time.monotonic() < end:
                time.sleep(1)
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            time.sleep(1)
        late = [process for process in running if process.poll() is None]
        for process in late:
            process.terminate()  # once: it saves, and a second signal would kill
        for process in running:
            _note(base, f"{'time is over, ended' if process in late else 'ended'}: {process.wait()}")


_DMCP = (sys.executable, "-m", "dmcp")


@contextlib.contextmanager
def _told_end(base: Path) -> Iterator[None]:
    """Whoever waits for the experiments sees when they have ended, also by an error."""
    try:
        yield
    finally:
        (base / _ENDED).touch()


@contextlib.contextmanager
def _mps(base: Path) -> Iterator[None]:
    """MPS for all stages: processes of two commands compute on the GPU at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    for kind in ("pipe", "log"):
        (base / "mps" / kind).mkdir(parents=True, exist_ok=True)
        os.environ[f"CUDA_MPS_{kind.upper()}_DIRECTORY"] = str(base / "mps" / kind)
    if control:
        subprocess.run([control, "-d"], check=False)
    try:
        yield
    finally:
        if control:
            subprocess.run([control], input=b"quit\n", check=False)


def _way(stage: Stage, base: Path, batch: str) -> str:
    """The options of a stage; where kernels are asked about, those of the way whose search step was faster."""
    if not stage.kernels:
        return stage.options
    took: dict[str, float] = {}
    for way in ("--kernels", "--no-kernels"):
        file = base / f"bench{way}.json"
        asked = ["--model", stage.kernels, "--no-compile", "--batch", batch, "--rounds", "3", way, "--json", str(file)]
        with (base / f"bench{way}.txt").open("wb") as said:
            took[way] = float("inf")  # of a way that fails or hangs
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run([*_DMCP, "bench", *asked], stdout=said, stderr=said, check=True, timeout=PATIENCE)
                took[way] = _search_time(file)
    _note(base, f"{stage.kernels}, search step: {took}")
    helped = took["--kernels"] < LEAST_GAIN * took["--no-kernels"]
    return f"{stage.options} --kernels" if helped else f"{stage.short} --no-kernels"


def _search_time(file: Path) -> float:
    """Of the only row of steps that `dmcp bench` has written."""
    (row,) = json.loads(file.read_text())["steps"]
    return float(row["search_ms"])


def _done(folder: Path) -> int:
    return sum(map(is_done, folder.glob("*")))


def _note(base: Path, text: str) -> None:
    with (base / "times.txt").open("a") as file:
        file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


# calls of a machine that is lent


def ready(root: Path) -> list[list[Path]]:
    """The files that each call must carry: shards of CIFAR-10 and begun cells, as many as may travel at once."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True).stdout.decode().split("\0")
    tree = sum(_size(root / name) for name in names if name)
    files = [root / "data" / "cifar10" / name for name in SHARDS]
    if lacking := [str(path) for path in files if not path.exists()]:
        raise SystemExit(f"not here: {', '.join(lacking)}")
    files += sorted((root / "runs").glob("begun-*.tgz"))
    calls: list[list[Path]] = []
    for file in sorted(files, key=_size, reverse=True):
        if tree + _size(file) > MOST_SENT:
            raise SystemExit(f"{file} is too large for a call: {_size(file):,} bytes beside a tree of {tree:,}")
        roomy = [one for one in calls if tree + sum(map(_size, [*one, file])) <= MOST_SENT and len(one) < MOST_PATHS]
        if not roomy:
            roomy = [[]]
            calls += roomy
        min(roomy, key=lambda one: sum(map(_size, one))).append(file)
    return calls


def call(plan: str, wait: float, out: Path, root: Path, home: Path, held: float = HELD) -> bool:
    """One call: bring the files that came with it, begin once all are there, wait while there is something to wait for.

    What is there is kept at the end. Whether the experiments have begun: without them nothing is waited for, so that
    calls which were sent all at once cost seconds where one of them failed.
    """
    data, base, code = home / "data" / "cifar10", home / "s", home / "code"
    data.mkdir(parents=True, exist_ok=True)
    if not (first := home / "first.txt").exists():
        first.write_text(str(time.time()))
    for shard in (root / "data" / "cifar10").glob("*.npz"):
        shutil.copy(shard, data)
    for archive in sorted((root / "runs").glob("begun-*.tgz")):
        if (base / archive.name).exists():  # its cells have gone on since: they must not be put back
            continue
        base.mkdir(exist_ok=True)
        with tarfile.open(archive) as kept:
            kept.extractall(base, filter="data")
        (base / archive.name).touch()
    needed = [data / name for name in SHARDS]
    if plan != "rehearsal" and (lacking := [path.name for path in needed if not path.exists()]):
        print(f"not yet here: {', '.join(lacking)}")
        return False
    going: subprocess.Popen[bytes] | None = None
    if not code.exists():
        for name in ("src", "tools", "results"):  # a copy: the tree may change with the next call
            shutil.copytree(root / name, code / name)
        seconds = max(0.0, float(first.read_text()) + held - time.time())
        source = "digits" if plan == "rehearsal" else str(data)
        command = [sys.executable, "tools/sitting.py", "go", plan, f"{seconds:.0f}", source, str(base)]
        environment = {**os.environ, "PYTHONPATH": "src", "PYTHONUNBUFFERED": "1"}
        with (home / "go.log").open("wb") as said:
            going = subprocess.Popen(
                command, cwd=code, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
    end = time.monotonic() + wait
    while time.monotonic() < end and not (base / _ENDED).exists() and (going is None or going.poll() is None):
        time.sleep(0.2)
    if going and (base / _ENDED).exists():
        going.wait()
    keep(base, out / "kept")
    for path in (home / "go.log", *sorted(base.glob("*.txt"))):
        print(
            f"{path.name}:",
            *path.read_text(errors="replace").splitlines()[-20 if path.stem == "times" else -2 :],
            sep="\n  ",
        )
    return True


# what is worth keeping


def keep(base: Path, out: Path) -> list[Path]:
    """Write what is worth keeping of all cells of a sitting, and what was said; the files, of which the first matters.

    It has all but what is large: weights that a cell which is not done needs, and where such cells are. Files that
    another process removes meanwhile are left out.
    """
    told = sorted([*base.glob("*.txt"), *base.glob("*/commands.jsonl"), *base.glob("*/plans/*.json")])
    small, large = [(path, False) for path in told], list[Path]()
    starts, teachers = _needed(base)
    for cell in sorted(path.parent for path in base.glob("*/*/settings.json")):
        here = sorted(path for path in cell.iterdir() if path.is_file() and path.name != "lock.json")
        weights = [path for path in here if path.suffix == ".safetensors"]
        if is_done(cell):
            small += [(path, cell not in starts) for path in here if path not in weights]
            large += weights if cell in starts | teachers else []
            continue
        found = [newest for stage in sorted(cell.glob("checkpoints/*")) if (newest := _newest(stage))]
        if found:
            chosen = [path for path in [*weights, *found] if _size(path) < MOST_BYTES]
            small += [(path, False) for path in [*chosen, *(set(here) - set(weights))]]
            large += [path for path in [*weights, *found] if path not in chosen]
    return _pack(base, out, small, large)


def _needed(base: Path) -> tuple[set[Path], set[Path]]:
    """Cells that others start from which are not done, and those that others learn from."""
    starts, teachers = set[Path](), set[Path]()
    for path in base.glob("*/plans/*.json"):
        folder, cell = path.parents[1], json.loads(path.read_text())["cell"] or {}
        if is_done(folder / path.stem):
            continue
        if cell.get("uses") and cell.get("method") != COPY:  # which needs widths alone
            starts.add(folder / cell["uses"])
        if cell.get("teacher"):
            teachers.add(folder / cell["teacher"])
    return starts, teachers


def _newest(stage: Path) -> Path | None:
    """The last checkpoint of a stage."""
    return max(stage.glob("step-*.safetensors"), default=None)


def _size(path: Path) -> int:
    """Bytes of a file; none of one that was removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _pack(base: Path, out: Path, small: list[tuple[Path, bool]], large: list[Path]) -> list[Path]:
    """Write files into archives that are not too large; of those that say so, lines of steps are left out."""
    parts = [[*small]]
    room = PART
    for path in large:
        size = _size(path)
        if size > room or len(parts) == 1:
            parts.append([])
            room = PART
        room -= size
        parts[-1].append((path, False))
    names = [out.with_name(f"{out.name}-{number}.tgz") for number in range(min(len(parts), MOST_PARTS))]
    for name, part in zip(names, parts, strict=False):
        with tarfile.open(name, "w:gz") as kept:
            for path, ended in part:
                with contextlib.suppress(FileNotFoundError):
                    _put(kept, base, path, _without_steps(path) if ended else path.read_bytes())
    if len(parts) > len(names):
        print(f"left out: {sum(map(len, parts[len(names) :]))} large files")
    return names


def _without_steps(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name != "log.jsonl":
        return data
    return b"".join(line for line in data.splitlines(keepends=True) if "step" not in json.loads(line))


def _put(kept: tarfile.TarFile, base: Path, path: Path, data: bytes) -> None:
    entry = tarfile.TarInfo(str(path.relative_to(base)))
    entry.size = len(data)
    kept.addfile(entry, io.BytesIO(data))


def main() -> None:
    """Read what was typed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_subparsers(dest="which", required=True)
    one = which.add_parser("go", help=(go.__doc__ or "").splitlines()[0])
    one.add_argument("plan", choices=PLANS)
    one.add_argument("seconds", type=float)
    one.add_argument("data", help="CIFAR-10; for the rehearsal digits")
    one.add_argument("base", type=Path, help="folder of everything")
    other = which.add_parser("keep", help=(keep.__doc__ or "").splitlines()[0])
    other.add_argument("base", type=Path)
    other.add_argument("out", type=Path, help="begin of the archives' names")
    which.add_parser("ready", help=(ready.__doc__ or "").splitlines()[0])
    third = which.add_parser("call", help=(call.__doc__ or "").splitlines()[0])
    third.add_argument("plan", choices=PLANS)
    third.add_argument("--wait", type=float, default=280.0, help="seconds")
    third.add_argument("--out", type=Path, required=True, help="folder whose files come back")
    third.add_argument("--held", type=float, default=HELD, help="seconds after the first call: then all is stopped")
    asked = parser.parse_args()
    if asked.which == "go":
        go(asked.plan, asked.seconds, asked.data, asked.base)
    elif asked.which == "ready":
        for number, files in enumerate(ready(Path.cwd()), 1):
            print(f"call {number}: carry {json.dumps([str(file.relative_to(Path.cwd())) for file in files])}")
    elif asked.which == "call":
        raise SystemExit(not call(asked.plan, asked.wait, asked.out, Path.cwd(), Path.home(), asked.held))
    else:
        keep(asked.base, asked.out)


if __name__ == "__main__":
    main()
