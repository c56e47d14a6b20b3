"""cli/main: words, help, exit codes; answered at once, without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import DRY, SHORT, Capture, run
from folders import TEST_LINES, TRAIN_LINE, step_lines, write_run

import dmcp
from dmcp.cli import main
from dmcp.cli import show as commands
from dmcp.errors import DmcpError, RankError, StoppedError

pytestmark = pytest.mark.usefixtures("quick_commands")

SOURCE = str(Path(main.__file__).parents[2])
BLOCKED = "import sys; sys.modules['torch'] = None; from dmcp.cli.main import main; main()"
WITHOUT_TORCH = """
import sys
from dmcp.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
EVERY = ("prune", "search", "sample", "train", "evaluate", "compare", "inspect", "data", "latency", "export")
EVERY += ("report", "runs")


def start(*words: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process."""
    environment = os.environ | {"PYTHONPATH": SOURCE} | variables
    end = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    return end.returncode, end.stdout, end.stderr


def test_nothing_that_people_wait_for_imports_torch() -> None:
    assert start("-c", BLOCKED, "--version") == (0, f"torch-dmcp {dmcp.__version__}\n", "")
    code, out, _ = start("-c", BLOCKED, "prune", "--help")
    assert code == 0 and all(f"\n{group}:\n" in out for group in ("Model and data", "Budget", "Search", "Training"))
    for words, told in (
        (["prune", "--modle", "x"], "--model"),
        (["train", "--model", "x", "--data", "y", "--epochs", "0"], "epochs"),
    ):
        code, out, err = start("-c", BLOCKED, *words)
        assert (code, out) == (2, "") and told in err and len(err.splitlines()) == 1, err
    words = {"COMP_WORDS": "dmcp prune --see", "COMP_CWORD": "2", "_DMCP_COMPLETE": "complete_bash"}
    assert set(start("-c", BLOCKED, **words)[1].split()) == {"--seed", "--seeds"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("runs", "step 5 of 33"),
        ("runs --json", '"state": "stopped"'),
        ("--version", dmcp.__version__),
        ("--help", "Exit codes"),
        ("inspect <Tab>", "resnet18"),
        ("prune --model digits:<Tab>", "digits:resnet"),
        ("prune --model timm:resnet1<Tab>", ""),
        ("export <Tab>", "runs/one\nruns/two"),
        ("prune --resume runs/t<Tab>", "runs/two"),
        ("report runs/one runs/t<Tab>", "runs/two"),
    ],
)
def test_small_commands_do_not_import_torch(
    words: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "one", [*step_lines(40), *TEST_LINES])
    write_run(tmp_path / "runs" / "two", [TRAIN_LINE], done=False)
    (tmp_path / "runs" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    if words.endswith("<Tab>"):
        typed = f"dmcp {words.removesuffix('<Tab>')}"
        position = len(typed.split()) - (not typed.endswith(" "))
        variables = {"COMP_WORDS": typed, "COMP_CWORD": str(position), "_DMCP_COMPLETE": "complete_bash"}
        code, out, err = start("-c", WITHOUT_TORCH, **variables)
    else:
        code, out, err = start("-c", WITHOUT_TORCH, *words.split())
    assert (code, err) == (0, "") and answer in out


def test_a_shell_completes_words(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DMCP_COMPLETE", "complete_bash")
    for words, wanted in (
        ("dmcp inspect resnet1", "resnet101 resnet152 resnet18"),
        ("dmcp train --model digits:", "digits:resnet"),
        ("dmcp prune --recipe imagenet_resnet18", "imagenet_resnet18_1040m"),
        ("dmcp prune --retrain fi", "finetune"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert sorted(run(capsys)[1].split()) == wanted.split()


@pytest.mark.parametrize("command", EVERY)
def test_help_has_no_raw_types_or_ranges(command: str, capsys: Capture) -> None:
    text = run(capsys, command, "--help")[1]
    assert not re.search(r"range|list\[|<=|>=|\[default|\[required", text)


def test_every_help_has_examples_and_the_first_has_the_exit_codes(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and run(capsys)[:2] == (0, out)  # no command is no mistake
    assert all(re.search(rf"^ +{number} +\w", out, re.MULTILINE) for number in (0, 1, 2, 3, 75, 130, 141))
    for command in EVERY:
        assert re.search(rf"^ +{command} ", out, re.MULTILINE)
        code, text, err = run(capsys, command, "--help")
        examples = text.split("Examples:\n")[1].split("\n\n")[0].splitlines()
        assert (code, err) == (0, "") and len(examples) >= 2
        assert all(re.match(rf"    (torchrun .* -m )?dmcp {command}( |$)", line) for line in examples)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ZeroDivisionError("dmcp"), 1, "dmcp: this is a bug, please report it with the lines above "),
        (DmcpError("two\nlines \x1b[31m"), 2, "dmcp: two lines \N{REPLACEMENT CHARACTER}[31m"),
        (OSError(28, "No space left on device", "disk"), 2, "dmcp: disk: No space left on device."),
        (MemoryError(), 2, "dmcp: out of memory"),
        (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), 2, "dmcp: out of memory"),
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
    monkeypatch.setattr(commands, "build", Mock(side_effect=error))
    found, out, err = run(capsys, "inspect", "digits:resnet")
    last = err.splitlines()[-1] if err else ""
    assert (found, out) == (code, "") and last.startswith(told)
    assert ("Traceback" in err) == (code == 1)
    if code == 2:
        assert "Traceback" in run(capsys, "inspect", "digits:resnet", "--debug")[2]
        assert "Traceback" in run(capsys, "--debug", "inspect", "digits:resnet")[2]


def test_a_reader_that_goes_and_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    line = f"{sys.executable} -m dmcp --version | true; exit ${{PIPESTATUS[0]}}"
    end = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (141, "", "")
    send = "[(os.kill(os.getpid(), 2), time.sleep(0.01)) for _ in range(30)]"  # Ctrl-C by an impatient person
    lines = ["import os, threading, time", f"threading.Thread(target=lambda: {send}).start()", "time.sleep(9)"]
    (tmp_path / "torch.py").write_text("\n".join(lines))
    path = os.pathsep.join([str(tmp_path), SOURCE])
    assert start("-m", "dmcp", "inspect", "digits:resnet", PYTHONPATH=path) == (130, "", "")


def test_a_signal_ends_a_command_once_its_unfinished_files_are_removed(tmp_path: Path) -> None:
    code = "import os, sys, tempfile\nfrom dmcp.cli import main, show\n"
    code += (
        "def report(runs, out):\n    with tempfile.TemporaryDirectory(dir=runs[0]):\n        os.kill(os.getpid(), 15)\n"
    )
    code += f"show.report = report\nsys.argv = ['dmcp', 'report', {str(tmp_path)!r}]\nmain.main()\n"
    assert start("-c", code)[0] == -15
    assert list(tmp_path.iterdir()) == []


def test_of_several_ranks_one_speaks(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for words in (("runs", "folder"), ("inspect", "digits:resnet"), ("compare", "--gather", "x"), ("prune", *DRY)):
        assert run(capsys, *words) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert run(capsys, "inspect", "digits:resnet")[1] != ""
    for words in (("prune", *SHORT, "--seeds", "2"), ("compare", *SHORT[:4])):
        code, _, err = run(capsys, *words)
        assert code == 2 and "torchrun" in err


# What Python itself imports from the current folder before the package begins, see docs/command-line.md.
BEFORE_US = {"collections", "contextlib", "functools", "importlib", "keyword", "operator", "reprlib"}
BEFORE_US |= {"types", "warnings"}


def test_a_folder_cannot_take_the_place_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*sys.stdlib_module_names, "jinja2", "safetensors", "torch", "typer", "numpy"} - BEFORE_US:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    for flag in (["-m", "dmcp"], ["-mdmcp"]):
        found = start(*flag, "runs", ".")
        assert found[:2] == (0, ".: no runs.\n"), found
