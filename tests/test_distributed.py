"""Several processes search, train and test as one does; a run that loses one of them goes on as if it had not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import distributed_programs as programs
import pytest
import torch
from distributed_programs import STEPS
from torch import Tensor

import dmcp
from dmcp.errors import RankError
from dmcp.models import build
from dmcp.runtime.checkpoint import load_checkpoint
from dmcp.runtime.distributed import SINGLE_PROCESS, World, current, join
from dmcp.runtime.io import LOCK

NEAR = 1e-5
MINUTE = 60.0
ASKED = (
    "prune --model distributed_programs:dropped --data digits --search-epochs 2 --epochs 5 --batch 32 --device cpu "
    "--save-steps 50 --teacher none"
)
NAME = "distributed_programs-dropped-digits-prune"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(folder: Path, world_size: int, program: str, *more: Any) -> Iterator[list[ForkServerProcess]]:
    """The ranks of a program, which print to files; none is left behind."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")  # imports torch once, not once per process
    context.set_forkserver_preload(["dmcp.cli.main", "distributed_programs"])
    port = free_port()
    processes = [
        context.Process(target=programs.start, args=(rank, world_size, port, folder / f"text{rank}", program, *more))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def told(folder: Path, rank: int) -> str:
    """What a rank has printed."""
    return (folder / f"text{rank}").read_text()


def ends(processes: list[ForkServerProcess], seconds: float) -> list[int | None]:
    """Exit codes after at most so many seconds; None still runs."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def gap(one: Any, other: Any) -> float:
    """Largest difference between two tensors, or two tables of them."""
    if isinstance(other, Tensor):
        assert one.shape == other.shape and bool(other.isfinite().all())
        return float((one.detach().double() - other.detach().double()).abs().max())
    assert one.keys() == other.keys() and other
    return max(gap(one[name], other[name]) for name in other)


# what ranks do together


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What three ranks have found, of which one was killed at the end, while all waited for each other."""
    folder = tmp_path_factory.mktemp("together")
    with started(folder, 3, "everything", 10, folder, free_port()) as processes:
        deadline = time.monotonic() + 2 * MINUTE
        while len(list(folder.glob("rank*.pt"))) < 3:
            texts = [told(folder, rank) for rank in range(3) if (folder / f"text{rank}").exists()]
            assert time.monotonic() < deadline and ends(processes, 0) == [None] * 3, texts
            time.sleep(0.05)
        processes[1].kill()
        assert ends(processes, MINUTE) == [1, -signal.SIGKILL, 1]
    assert all(f"RankError: Rank {rank} " in told(folder, rank) for rank in (0, 2))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"WORLD_SIZE": "6", "RANK": "5", "LOCAL_RANK": "1", "device": "cuda"},  # more processes than GPUs
    ],
)
def test_half_a_launcher_is_refused(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert join() == current() == SINGLE_PROCESS and not torch.distributed.is_initialized()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match=r"torchrun|per GPU"):
        join(settings.get("device", "cpu"))


# the library


def test_without_batchnorm_three_ranks_compute_what_one_process_does(together: list[dict[str, Any]]) -> None:
    alone = programs.train_plain(SINGLE_PROCESS, 10)
    for name, wanted in alone.items():
        parts = [part for part in ("losses", "weights", "alphas") if part in wanted]
        gaps = {part: gap(together[0][name][part], wanted[part]) for part in parts}
        assert max(gaps.values()) < NEAR, (name, gaps)
        assert all(gap(mine[name][part], together[0][name][part]) == 0 for mine in together[1:] for part in parts)
        assert len(wanted["losses"]) == 2 * STEPS
        assert gap(wanted["weights"], dict(programs.plain(SINGLE_PROCESS).named_parameters())) > 1e-2  # they have moved
    for name in ("usual search", "held-out search", "own loss"):
        assert float(alone[name]["alphas"].std()) > 10 * NEAR  # all start from one number


def test_with_batchnorm_ranks_stay_together(together: list[dict[str, Any]]) -> None:
    first, second, _ = (rank["normed"] for rank in together)
    for name in ("search", "training"):
        assert gap(first[name]["weights"], second[name]["weights"]) == 0
        losses = first[name]["losses"].reshape(2 * STEPS, -1)[:, 0]  # of the largest network
        assert losses[-3:].mean() < losses[:3].mean() - 0.1
    assert gap(first["search"]["alphas"], second["search"]["alphas"]) == 0
    assert gap(first["search"]["buffers"], second["search"]["buffers"]) > 1e-3  # statistics are those of a rank
    assert gap(first["training"]["buffers"], second["training"]["buffers"]) == 0

    model = build("digits:resnet")
    model.load_state_dict(first["training"]["weights"] | first["training"]["buffers"])
    assert first["accuracy"] == second["accuracy"] == dmcp.evaluate(model, programs.test_loader(SINGLE_PROCESS)) > 0.15
    # a network normalises each batch by itself, so one process must be given the batches that the ranks had
    dmcp.recalibrate(model, [batch for rank in range(3) for batch in programs.loader(World(rank, 3), 64)])
    assert gap(statistics(first["calibrated"]), statistics(programs.buffers(model))) < 1e-6
    assert gap(first["calibrated"], second["calibrated"]) == 0


def test_ranks_measure_a_whole_data_set_together(together: list[dict[str, Any]]) -> None:
    """By a metric that gathers; the rest is refused, never a number of a part or of samples given twice."""
    torch.manual_seed(0)
    model, metric = programs.Plain(), programs.Macro()
    wanted = dmcp.evaluate(model, torch.utils.data.DataLoader(programs.digits(), 8), metric)
    for found in (rank["measured"] for rank in together):
        assert found["own"] == wanted and "it must gather" in found["parts"]


def test_a_rank_without_samples_scores_channels_as_the_others(together: list[dict[str, Any]]) -> None:
    alone = programs.score_channels(SINGLE_PROCESS)
    assert all(gap(rank["scores"], alone) < NEAR for rank in together)
    assert all(gap(rank["scores"], together[0]["scores"]) == 0 for rank in together)
    assert all(float(score.std()) > 10 * NEAR for score in alone.values())


def test_a_rank_without_samples_refits_the_same_weights(together: list[dict[str, Any]]) -> None:
    alone = programs.refit_weights(SINGLE_PROCESS)
    assert all(gap(rank["refit"], alone) < NEAR for rank in together)
    assert all(gap(rank["refit"], together[0]["refit"]) == 0 for rank in together)


def test_the_first_rank_says_what_a_loss_distils(together: list[dict[str, Any]]) -> None:
    assert programs.read_loss(SINGLE_PROCESS)
    assert [rank["of classes"] for rank in together] == [True] * 3


def statistics(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means and variances, without the counters of batches."""
    return {name: tensor for name, tensor in buffers.items() if "running" in name}


# the command


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Where torchrun has started two ranks that nothing disturbed, and what they have printed."""
    folder = tmp_path_factory.mktemp("launched")
    ours = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dmcp"]
    with subprocess.Popen(
        [*ours, *ASKED.split()],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=3 * MINUTE)
        finally:
            process.terminate()  # it ends its ranks
    return folder, subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
def test_torchrun_starts_ranks_of_which_one_writes(launched: Any) -> None:
    folder, process = launched
    assert process.returncode == 0, process.stderr
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder / "runs").iterdir()] == [NAME]  # though each rank looks for a free name
    run = folder / "runs" / NAME
    assert not (run / "checkpoints").exists() and not (run / LOCK).exists()
    assert process.stdout.count("88 search steps") == process.stdout.count("ms per") == 1
    assert process.stdout.endswith(f"\n\nruns/{NAME}\n")
    assert process.stderr.count("dmcp: 220 of 220") == 1
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [(record["stage"], record.get("step")) for record in records] == [
        *(("search", step) for step in range(88)),
        *(("dmcp", step) for step in range(220)),
        ("test", None),
    ]


@pytest.mark.slow
def test_a_run_survives_the_loss_of_either_rank(launched: Any, tmp_path: Path) -> None:
    wanted, run = launched[0] / "runs" / NAME, tmp_path / "run"
    goes_on = ["prune", "--resume", str(run)]
    asked = [*ASKED.split(), "--out", str(run)]
    interrupt(tmp_path / "first", run, asked, lost=1, ready=lambda: any(run.glob("checkpoints/search/*.safetensors")))

    with started(tmp_path / "alone", 1, "command", *goes_on) as processes:
        assert ends(processes, MINUTE) == [2]
    assert "world_size was 2, is 1" in told(tmp_path / "alone", 0)

    # the training is saved after 100 steps, and has logged 132 by the next epoch's end
    interrupt(tmp_path / "second", run, goes_on, lost=0, ready=lambda: logged(run) >= 88 + 132)
    saved = load_checkpoint(run / "checkpoints" / "dmcp")
    assert saved and saved.step == 100
    with started(tmp_path / "third", 2, "command", *goes_on) as processes:
        assert ends(processes, 2 * MINUTE) == [0, 0], [told(tmp_path / "third", rank) for rank in range(2)]
    for name in ("log.jsonl", "widths.json", "search.safetensors", "model.safetensors"):
        assert (run / name).read_bytes() == (wanted / name).read_bytes(), name
    assert not (run / "checkpoints").exists() and not (run / LOCK).exists()


def logged(run: Path) -> int:
    """Lines in the log of a run."""
    return len((run / "log.jsonl").read_text().splitlines())


def interrupt(folder: Path, run: Path, asked: list[str], lost: int, ready: Callable[[], bool]) -> None:
    """Kill one of two ranks as soon as the run is ready for it; the other one must end, and say why."""
    with started(folder, 2, "command", *asked) as processes:
        deadline = time.monotonic() + 2 * MINUTE
        while not ready():
            assert time.monotonic() < deadline and ends(processes, 0) == [None, None], told(folder, 0)
            time.sleep(0.01)
        os.kill(processes[lost].pid or 0, signal.SIGKILL)
        assert ends(processes[1 - lost : 2 - lost], MINUTE) == [75], told(folder, 1 - lost)
        assert processes[lost].exitcode == -signal.SIGKILL
    assert f"Rank {1 - lost} " in told(folder, 1 - lost)
    assert not (run / "report.md").exists()
