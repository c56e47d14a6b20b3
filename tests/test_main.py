"""cli/main: words, help, exit codes; answered at once, without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import DRY, SHORT, Capture, run

import dmcp
from dmcp.cli import main
from dmcp.cli import show as commands
from dmcp.errors import DmcpError, RankError, StoppedError
from dmcp.runtime.engine import KernelWarning

BLOCKED = "import sys; sys.modules['torch'] = None; from dmcp.cli.main import main; main()"
COMMANDS = ("prune", "search", "sample", "train", "evaluate", "compare", "inspect", "data", "latency", "export")
EVERY = (*COMMANDS, "report", "runs")


def blocked(*words: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in a process that cannot import torch."""
    environment = os.environ | {"PYTHONPATH": str(Path(main.__file__).parents[2])} | variables
    command = [sys.executable, "-c", BLOCKED, *words]
    end = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return end.returncode, end.stdout, end.stderr


def test_nothing_that_people_wait_for_imports_torch() -> None:
    assert blocked("--version") == (0, f"torch-dmcp {dmcp.__version__}\n", "")
    assert all(name in blocked("--help")[1] for name in EVERY)
    code, out, _ = blocked("prune", "--help")
    assert code == 0 and all(f"\n{group}:\n" in out for group in ("Model and data", "Budget", "Search", "Training"))
    assert blocked("prune", "--modle", "x") == (2, "", "dmcp: There is no option --modle; did you mean --model?\n")
    for words, told in (
        (["pruen"], "Did you mean 'prune'?"),
        (["import"], "see dmcp --help"),
        (["prune", "--data", "digits"], "--model is missing"),
        (["train", "--model", "x", "--data", "y", "--epochs", "0"], "epochs must be an int of at least 1"),
        (["prune", "--budget", "1", "--budget", "2"], "--budget is given 2 times"),
        (["compare", "--resume", "x"], "the same command with the same --out goes on"),
        (["sample"], "Missing argument"),
        (["prune", "--retrain", "teacher"], "is not one of"),
    ):
        code, out, err = blocked(*words)
        assert (code, out) == (2, "") and told in err and len(err.splitlines()) == 1, err
    words = {"COMP_WORDS": "dmcp prune --see", "COMP_CWORD": "2", "_DMCP_COMPLETE": "complete_bash"}
    assert set(blocked(**words)[1].split()) == {"--seed", "--seeds"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("dmcp pr", {"prune"}),
        ("dmcp inspect resnet1", {"resnet18", "resnet101", "resnet152"}),
        ("dmcp train --model digits:", {"digits:resnet"}),
        ("dmcp prune --recipe imagenet_resnet18", {"imagenet_resnet18_1040m"}),
        ("dmcp prune --retrain fi", {"finetune"}),
    ],
)
def test_a_shell_completes_words(
    words: str, wanted: set[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DMCP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(run(capsys)[1].split()) == wanted


@pytest.mark.parametrize("command", EVERY)
def test_every_help_has_examples(command: str, capsys: Capture) -> None:
    code, out, err = run(capsys, command, "--help")
    examples = out.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert (code, err) == (0, "") and len(examples) >= 2 and "--debug" in out
    assert all(re.match(rf"    (torchrun .* -m )?dmcp {command}( |$)", line) for line in examples)


def test_exit_codes_are_in_the_help(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and run(capsys)[:2] == (0, out)  # no command is no mistake
    for number in ("0", "1", "2", "3", "75", "130", "141"):
        assert re.search(rf"^ +{number} +\w", out, re.MULTILINE)


# exit codes


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `dmcp inspect` fail."""

    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "build", build)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (
            ZeroDivisionError("dmcp"),
            1,
            "dmcp: this is a bug, please report it with the lines above (ZeroDivisionError).",
        ),
        (DmcpError("two\nlines \x1b[31m"), 2, "dmcp: two lines \N{REPLACEMENT CHARACTER}[31m"),
        (OSError(28, "No space left on device", "disk"), 2, "dmcp: disk: No space left on device."),
        (StoppedError("Stopped."), 3, "dmcp: Stopped."),
        (RankError("Lost."), 75, "dmcp: Lost."),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, BaseException) else "",
)
def test_exit_codes(
    error: BaseException, code: int, told: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.dup2", lambda *_: 0)
    fail(monkeypatch, error)
    found, out, err = run(capsys, "inspect", "digits:resnet")
    assert (found, out) == (code, "") and err.splitlines()[-1:] == ([told] if told else [])
    assert ("Traceback" in err) == (code == 1)
    if code == 2:
        assert "Traceback" in run(capsys, "inspect", "digits:resnet", "--debug")[2]
        assert "Traceback" in run(capsys, "--debug", "inspect", "digits:resnet")[2]


def test_a_long_sentence_is_cut(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, DmcpError(5000 * "x"))
    (line,) = run(capsys, "inspect", "digits:resnet")[2].splitlines()
    assert len(line) < 1100


def test_nobody_reads_and_nothing_is_said() -> None:
    line = f"{sys.executable} -m dmcp --version | true; exit ${{PIPESTATUS[0]}}"
    end = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (141, "", "")


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Also where these tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(main.__file__).parents[2])])
    command = [sys.executable, "-m", "dmcp", "inspect", "digits:resnet"]
    end = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert (end.returncode, end.stdout, end.stderr) == (130, "", "")


def test_warnings_of_ours_are_plain_lines(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        warnings.warn("Own kernels are not used.", KernelWarning, stacklevel=1)
        warnings.warn("of somebody else", UserWarning, stacklevel=1)
        raise DmcpError("The end.")

    monkeypatch.setattr(commands, "build", build)
    warnings.simplefilter("default")
    err = run(capsys, "inspect", "digits:resnet")[2].splitlines()
    assert (err[0], err[-1]) == ("Own kernels are not used.", "dmcp: The end.")
    assert "test_main.py" in err[1] and err[1].endswith("UserWarning: of somebody else")


def test_of_several_ranks_one_speaks(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run_words = [(name, "folder") for name in ("sample", "evaluate", "export", "runs", "report")]
    for words in (*run_words, ("inspect", "digits:resnet"), ("data", "digits"), ("prune", *DRY)):
        assert run(capsys, *words) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert run(capsys, "inspect", "digits:resnet")[1] != ""
    code, _, err = run(capsys, "prune", *SHORT, "--seeds", "2")
    assert code == 2 and "leave torchrun out" in err
