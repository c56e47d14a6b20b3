"""The command line: what people see, also when they mistype."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.cli import main
from dmcp.cli import prune as commands
from dmcp.cli.config import Plan, plan_from_json
from dmcp.cli.job import Job, load_weights, open_job
from dmcp.cli.session import Progress, clock
from dmcp.compare.runner import Task, tasks
from dmcp.errors import DmcpError, WidthsError
from dmcp.models import build
from dmcp.runtime.engine import KernelWarning
from dmcp.training import Event, StepRecord

DOCS = Path(__file__).parents[1] / "docs"
LONG = "a_name_that_does_not_fit_on_a_line_of_eighty_columns_and_must_still_be_found_by_grep"
WARM = "in a search --warmup 0.5 trains it first.\n"
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, as if piped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *arguments])
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as stop:
            main.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_version_and_python_m() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dmcp", "--version"]  # what is imported is on stderr
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == f"torch-dmcp {dmcp.__version__}\n"
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in printed.stderr.splitlines()}
    assert {"torch", "dmcp"} <= imported
    assert not imported & {"matplotlib", "torchvision", "timm", "triton", "onnx", "accelerate"}  # they take long


def test_help_names_everything(capsys: Capture) -> None:
    every = run(capsys, "--help")[1]
    for name in ("inspect", "prune", "search", "sample", "train", "evaluate"):
        assert name in every
        assert run(capsys, name, "--help")[0] == 0
    code, out, _ = run(capsys, "inspect", "--help")
    assert code == 0
    for option in ("MODEL", "--input", "--model-args", "--ignore", "--inexact", "--json"):
        assert option in out


def test_inspect_resnet50_shows_totals_and_tied_layers(capsys: Capture) -> None:
    code, out, err = run(capsys, "inspect", "resnet50")
    assert (code, err) == (0, "")
    assert "4.09 G MACs" in out
    assert "25.56 M params" in out
    for layer in ("layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3", "layer1.2.conv3"):  # one residual stream
        assert layer in out
    assert "\x1b" not in out  # no colours in a pipe
    assert "…" not in out  # no name cut short


def test_inspect_takes_model_arguments(capsys: Capture) -> None:
    code, out, _ = run(capsys, "inspect", "mobilenet_v2", "--model-args", "width_mult=1.5")
    assert code == 0
    assert "0.67 G MACs" in out


def test_inspect_prints_plain_data(capsys: Capture) -> None:
    whole = json.loads(run(capsys, "inspect", "resnet18", "--input", "3x64x64", "--json")[1])
    assert whole["input_shape"] == [3, 64, 64]
    assert whole["params"] == 11_689_512
    with FlopCounterMode(display=False) as counter:
        build("resnet18")(torch.zeros(1, 3, 64, 64))
    assert whole["macs"] == counter.get_total_flops() // 2
    less = json.loads(run(capsys, "inspect", "resnet18", "--input", "3x64x64", "--json", "--ignore", "layer1")[1])
    assert len(less["spaces"]) < len(whole["spaces"])


def test_inspect_shows_a_segmentation_net_and_timm(capsys: Capture) -> None:
    assert run(capsys, "inspect", "lraspp_mobilenet_v3_large", "--input", "3x64x64")[0] == 0
    pytest.importorskip("timm")
    code, out, _ = run(capsys, "inspect", "timm:test_resnet")
    assert code == 0
    assert "timm:test_resnet, one sample of 3x160x160" in out  # the size that timm has for it


def test_inspect_builds_a_network_of_the_current_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n"
        "def build(width=8, act=True, name=''):\n"
        "    assert (width, act, name) == (12, False, 'x')\n"
        "    net = nn.Sequential(nn.Conv2d(1, width, 3), nn.Conv2d(width, 2, 3))\n"
        f"    net.add_module({LONG!r}, nn.Conv2d(2, 3, 3))\n"
        "    return net\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--input", "1x8x8", "--model-args", "width=12", "--model-args", "act=false", "--model-args", "name=x")
    code, out, err = run(capsys, "inspect", "mynet:build", *options)
    assert (code, err) == (0, "")
    assert "12" in out
    assert LONG in out  # not broken, since nobody reads a pipe at 80 columns
    assert "it is an output of the model" in out
    assert "did you mean build?" in run(capsys, "inspect", "mynet:biuld")[2]
    assert "not a function or class" in run(capsys, "inspect", "mynet:number")[2]
    assert "its builder failed: AssertionError" in run(capsys, "inspect", "mynet:build")[2]


MISTAKES = {
    ("resnet81",): "There is no 'resnet81' in torchvision; did you mean resnet18",
    ("timm:resnet81",): "There is no 'resnet81' in timm; did you mean",
    ("zzzzzzzz",): "no name near it. Other ways: timm:NAME, package.module:factory.",
    ("nowhere.at_all:build",): "nowhere.at_all cannot be imported: ModuleNotFoundError",
    ("resnet18", "--model-args", "width=3"): "resnet18: its builder failed: TypeError",
    ("resnet18", "--model-args", "wide"): "'wide' is not of the form name=value",
    ("resnet18", "--input", "3,224,224"): "write it like 3x224x224",
    ("resnet18", "--input", "0x224x224"): "write it like 3x224x224",
    ("resnet18", "--input", "4x32x32"): "",
    ("resnet18", "--input", "3x64x64", "--ignore", "layer9"): "layer9",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments: tuple[str, ...], capsys: Capture) -> None:
    code, out, err = run(capsys, "inspect", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dmcp: ")
    assert MISTAKES[arguments] in err
    assert "Traceback" not in err


def test_build_downloads_nothing_and_says_what_is_not_a_network() -> None:
    build("deeplabv3_mobilenet_v3_large", num_classes=3)
    build("googlenet", init_weights=False)
    with pytest.raises(dmcp.DmcpError, match="gave a dict, not an"):
        build("builtins:dict")


SMALL = ("--model", "digits:resnet", "--data", "digits", "--device", "cpu", "--batch", "708", "--quiet")
SLOW = "Not faster here: most widths are no multiples of 8, which many runtimes need; "
NOT_FASTER = f"{SLOW}dmcp prune --align 8 gives such.\n"
NO_KERNELS = "Own kernels run on GPUs only: --kernels changes nothing on cpu.\n"
NO_GRAPHS = "CUDA graphs run on GPUs only: --graphs changes nothing on cpu.\n"
SHORT = (*SMALL, "--search-epochs", "2", "--epochs", "1")
DRY = (*SHORT, "--batch", "64", "--dry-run")  # what it measures is steps, not epochs: these are shorter


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a very short run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    words = ["dmcp", "prune", *SHORT, "--budget", "50%", "--baselines", "--out", str(folder)]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main.main()
    assert not stop.value.code
    return folder, printed.getvalue()


def table(printed: str) -> dict[str, list[str]]:
    """Numbers of each row of the final table: macs, params, accuracy, ms."""
    lines = [line for line in printed.splitlines() if re.search(r"%\s+[\d.]+$", line)]
    return {line.split("  ")[0]: [line.split()[place] for place in (-6, -4, -2, -1)] for line in lines}


def test_prune_writes_a_run_and_prints_its_table(pruned: tuple[Path, str]) -> None:
    folder, printed = pruned
    rows = table(printed)
    assert list(rows) == ["unpruned", "uniform", "dmcp"]
    assert printed.endswith(f"{folder}\n")
    small = dmcp.load(folder, build("digits:resnet"))
    with FlopCounterMode(display=False) as counter:
        small(torch.zeros(1, 1, 8, 8))
    for words in (
        "382 test samples: an accuracy is known to ± ",
        "the fastest of 10 passes",
        "points against unpruned",
    ):
        assert words in printed
    assert rows["dmcp"][0] == f"{counter.get_total_flops() // 2:,}"
    assert counter.get_total_flops() // 2 <= int(rows["unpruned"][0].replace(",", "")) // 2


def test_evaluate_gives_the_accuracy_of_the_run(pruned: tuple[Path, str], capsys: Capture) -> None:
    folder, printed = pruned
    code, out, _ = run(capsys, "evaluate", str(folder), "--device", "cpu")
    assert code == 0
    assert table(out)["short"][:3] == table(printed)["dmcp"][:3]


def test_sample_gives_different_structures_inside_the_budget(pruned: tuple[Path, str], capsys: Capture) -> None:
    folder, _ = pruned
    code, out, _ = run(capsys, "sample", str(folder), "--direct", "3")
    assert code == 0
    graph = dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8))
    drawn = [
        graph.widths(dmcp.Widths.from_json(json.loads((folder / f"direct-{n}.json").read_text()))) for n in (1, 2, 3)
    ]
    assert len(set(drawn)) == 3
    assert all(graph.macs(widths) <= graph.macs() // 2 for widths in drawn)
    assert all(" ".join(map(str, widths.values())) in out for widths in drawn)
    assert run(capsys, "sample", str(folder))[0] == 0
    assert json.loads((folder / "expected.json").read_text())["widths"] == read_widths(folder)


def test_sample_writes_elsewhere_where_a_run_is_not_to_be_touched(
    pruned: tuple[Path, str], tmp_path: Path, capsys: Capture
) -> None:
    folder, before = pruned[0], sorted(pruned[0].iterdir())
    out = tmp_path / "new" / "structures"
    code, printed, _ = run(capsys, "sample", str(folder), "--budget", "40%", "--out", str(out))
    assert code == 0 and printed.startswith(f"{out}/expected-40%.json: ")
    assert [path.name for path in out.iterdir()] == ["expected-40%.json"] and sorted(folder.iterdir()) == before
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "sample", str(folder), "--out", str(tmp_path / "file"))
    assert code == 2 and err == f"dmcp: --out: {tmp_path / 'file'} is a file: name a folder.\n"


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_label_smoothing_is_that_of_search_and_training(
    value: float, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def take(plan: Plan, *_: object) -> None:
        plans.append(plan)
        raise DmcpError("seen")

    monkeypatch.setattr(commands, "session", take)
    words = [
        "prune",
        "--model",
        "digits:resnet",
        "--data",
        "digits",
        *(["--label-smoothing", "0"] if not value else []),
    ]
    for recipe in ([], ["--recipe", "imagenet_resnet50_2200m"]):
        assert "seen" in run(capsys, *words, *recipe)[2]
    found = [(plan.search, plan.train) for plan in plans]
    assert [(s.label_smoothing, t.label_smoothing) for s, t in found if s and t] == [(value, value)] * 2


def test_sample_scales_a_search_to_another_budget(pruned: tuple[Path, str], capsys: Capture) -> None:
    folder, _ = pruned
    code, out, told = run(capsys, "sample", str(folder), "--budget", "30%")
    assert code == 0 and told == "The search was for 50%: its widths are scaled to 30%, not searched again.\n"
    graph = dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8))
    widths = graph.widths(dmcp.Widths.from_json(json.loads((folder / "expected-30%.json").read_text())))
    assert 0.95 * 0.3 <= graph.macs(widths) / graph.macs() <= 0.3 and "expected-30%.json" in out
    assert run(capsys, "sample", str(folder), "--budget", "50%")[2] == ""
    assert "draws that fit 45% are kept" in run(capsys, "sample", str(folder), "--budget", "45%", "--direct", "1")[2]
    code, _, told = run(capsys, "sample", str(folder), "--budget", "0.1%")
    assert code == 2 and "less than the floor costs" in told and told.count("\n") == 1


def read_widths(folder: Path) -> dict[str, int]:
    widths: dict[str, int] = json.loads((folder / "widths.json").read_text())["widths"]
    return widths


def test_train_takes_widths_and_weights(pruned: tuple[Path, str], capsys: Capture, tmp_path: Path) -> None:
    widths = str(pruned[0] / "widths.json")
    torch.save({"state_dict": build("digits:resnet").state_dict()}, tmp_path / "start.pth")
    start = ("--weights", str(tmp_path / "start.pth"), "--epochs", "1")
    code, out, err = run(capsys, "train", *SMALL, *start, "--widths", widths, "--out", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    assert table(out)["dmcp"][:2] == table(pruned[1])["dmcp"][:2]
    assert list(table(out)) == ["original", "dmcp"]
    assert read_widths(tmp_path / "run") == read_widths(pruned[0])


def test_weights_for_other_classes_give_all_but_the_last_layer(capsys: Capture, tmp_path: Path) -> None:
    torch.manual_seed(7)  # not the job's
    given = build("digits:resnet", num_classes=1000)
    torch.save(given.state_dict(), tmp_path / "imagenet.pth")
    options = ("--weights", str(tmp_path / "imagenet.pth"), "--epochs", "1", "--out", str(tmp_path / "run"))
    code, out, err = run(capsys, "train", *SMALL, *options)
    assert (code, err) == (0, "fc is for 1000 classes, the data have 10: it starts fresh; " + WARM)
    assert list(table(out)) == ["unpruned"]  # as given it can do nothing yet
    code, out, _ = run(capsys, "prune", *SMALL, *SHORT, *options[:-1], str(tmp_path / "pruned"))
    assert code == 0 and list(table(out)) == ["dmcp"]
    opened = open_job(Job(model="digits:resnet", data="digits", weights=str(tmp_path / "imagenet.pth"), device="cpu"))
    for name, tensor in opened.model.state_dict().items():
        source = opened.fresh.fc if name.startswith("fc.") else given
        assert torch.equal(tensor, source.state_dict()[name.removeprefix("fc.")])
    with pytest.raises(WidthsError, match=r"fc\.weight is 1000x64, but the network has 10x64"):
        load_weights(build("digits:resnet"), tmp_path / "imagenet.pth")
    two = nn.ModuleList([nn.Linear(4, 10), nn.Linear(4, 10)])  # which one gives the classes?
    torch.save(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).state_dict(), tmp_path / "two.pth")
    with pytest.raises(WidthsError, match="of one for another number of classes"):
        load_weights(two, tmp_path / "two.pth", 10)


def test_frozen_weights_of_a_file_are_in_the_fresh_network_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from dmcp.models import build", "def still():", "    net = build('digits:resnet')"]
    (tmp_path / "my_still_net.py").write_text(
        "\n".join([*lines, "    net.layer1.requires_grad_(False)", "    return net"])
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(7)  # not the job's
    torch.save(build("digits:resnet").state_dict(), tmp_path / "start.pth")
    opened = open_job(Job(model="my_still_net:still", data="digits", weights=str(tmp_path / "start.pth"), device="cpu"))
    first, second = ([it.layer1[0].conv1.weight, it.conv1.weight] for it in (opened.model, opened.fresh))
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_search_from_weights_needs_no_warm_up(capsys: Capture, tmp_path: Path) -> None:
    save_file(build("digits:resnet").state_dict(), tmp_path / "start.safetensors")
    options = (*SMALL, "--search-epochs", "1", "--weights", str(tmp_path / "start.safetensors"), "--holdout", "0.2")
    code, _, err = run(capsys, "search", *options, "--batch", "566", "--out", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["search"]
    assert (settings["warmup"], settings["sort"]) == (0, True)
    assert (tmp_path / "run" / "search.safetensors").exists()


def test_dry_run_trains_and_writes_nothing(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "prune", *DRY, "--baselines", "--kernels")
    assert (code, err) == (0, NO_KERNELS)
    assert list(tmp_path.iterdir()) == []
    for words in ("reachable: from", "asked for: at most 381,760 MACs", "uniform", "GiB on cpu", "Nothing was"):
        assert words in out


def test_a_dry_run_knows_of_bounds(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "forecast", lambda *_: [])  # the times of steps are not asked for
    words = ("prune", *DRY, "--json")
    reached = [
        json.loads(run(capsys, *words, *more)[1])["reachable"]
        for more in (
            (),
            ("--min-channels", "8"),
            ("--max-channels", "60"),
            ("--min-channels", "8", "--min-channels", "layer3=9"),
        )
    ]
    least, most = ([it[end]["macs"] for it in reached] for end in ("least", "most"))
    graph = dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8))
    assert least[1] == graph.macs({space.name: 8 for space in graph.spaces})
    assert most[2] == graph.macs({space.name: min(60, space.size) for space in graph.spaces})
    assert least[0] == least[2] < least[1] < least[3] and most[0] == most[1] == most[3] > most[2]


def test_bounds_on_the_command_line(capsys: Capture, tmp_path: Path) -> None:
    words = ("search", *SMALL, "--search-epochs", "2", "--budget", "30%", "--out", str(tmp_path / "run"))
    given = ("--min-channels", "6", "--min-channels", "layer2.0.conv1=12", "--max-channels", "layer3=40")
    code, out, err = run(capsys, *words, *given, "--json")
    assert (code, err) == (0, "")
    widths = json.loads(out)["widths"]
    assert all(width >= 6 for width in widths.values()) and widths["layer2.0.conv1"] >= 12
    assert all(width <= 40 for name, width in widths.items() if name.startswith("layer3"))
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["search"]["min_channels"] == {"": 6, "layer2.0.conv1": 12}
    assert settings["search"]["max_channels"] == {"layer3": 40}
    read = plan_from_json(settings, "run").search
    assert read and read.smallest == {"": 6, "layer2.0.conv1": 12}
    code, _, err = run(capsys, "search", "--resume", str(tmp_path / "run"), "--min-channels", "7")
    assert code == 2 and "--min-channels was ['6', 'layer2.0.conv1=12'], is ['7']." in err


@pytest.mark.parametrize(
    ("words", "min_channels"), [((), {}), (("--min-channels", "8"), 8), (("--min-channels", "a.b=3"), {"a.b": 3})]
)
def test_one_bound_is_kept_as_one_number(
    words: tuple[str, ...], smallest: object, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bounds a plan is written as it was before there were such options; a recipe has them, too."""
    seen: list[Plan] = []
    monkeypatch.setattr(commands, "_forecast", lambda plan, _: seen.append(plan))
    for more in (SMALL, ("--recipe", "imagenet_resnet18_1040m", "--data", "digits")):
        assert run(capsys, "prune", *more, *words, "--dry-run")[::2] == (0, "")
        plain = json.loads(json.dumps(seen[-1].to_json()))
        assert plain["search"]["min_channels"] == smallest and plain["search"]["max_channels"] == {}
        assert plan_from_json(plain, "run").search == seen[-1].search


def test_what_the_device_cannot_run_is_noticed_once(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.cli.show.run_comparison", lambda *_: [])
    network = ("--model", "digits:resnet", "--data", "digits", "--device", "cpu", "--quiet")
    for command in (
        ("train", *SMALL, "--epochs", "1", "--out", str(tmp_path / "run")),
        ("compare", *network, "--epochs", "1", "--methods", "uniform", "--out", str(tmp_path / "out")),
    ):
        assert run(capsys, *command, "--kernels", "--graphs")[::2] == (0, NO_GRAPHS + NO_KERNELS), command
    assert run(capsys, *command, "--no-kernels", "--no-graphs")[::2] == (0, "")


def test_what_a_person_may_not_know_is_said_once_for_all_cells(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Task] = []
    monkeypatch.setattr("dmcp.cli.show.run_comparison", lambda it, *_: started.extend(tasks(it)) or [])
    network = ("--model", "digits:resnet", "--model-args", "num_classes=12", "--data", "digits", "--device", "cpu")
    usual = ("--quiet", "--epochs", "1", "--batch", "128", "--out", str(tmp_path / "out"))
    told = "The network has 12 outputs, the data have 10 classes: build it with num_classes=10, unless that is meant.\n"
    for more in ((), ("--dry-run",)):
        assert run(capsys, "compare", "--methods", "uniform", *network, *usual, *more)[::2] == (0, told)
    monkeypatch.setattr("dmcp.cli.show.run_cell", lambda here: None)
    (tmp_path / "plan.json").write_text(json.dumps(started[0].plan.to_json()))
    cell = run(capsys, "cell", str(tmp_path / "plan.json"), str(tmp_path / "cell"))
    assert cell == (0, "", "")  # each of them would say it again


def test_time_left_is_by_whole_bundles(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records come in bundles of 50, each after 20 s: the line at the start of the third knows 200 steps in 80 s."""
    now = [0.0]
    monkeypatch.setattr("dmcp.cli.session.time.monotonic", lambda: now[0])
    progress = Progress()
    for step in range(150):
        now[0] = 20.0 * (step // 50 + 1)
        progress.on_event(Event("dmcp", 200, StepRecord(0, step, 200, 0.1, 1.0)))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"ours: step {step} of 200" for step in (1, 51, 101)]
    assert lines[2].endswith("20 s left")
    assert [clock(seconds) for seconds in (5, 200, 7500)] == ["5 s", "3 min 20 s", "2 h 05 min"]


def test_progress_is_plain_lines_in_a_pipe(capsys: Capture, tmp_path: Path) -> None:
    options = [option for option in SMALL if option != "--quiet"]
    code, out, err = run(capsys, "train", *options, "--epochs", "2", "--out", str(tmp_path / "run"))
    assert code == 0
    settings, progress = err.splitlines()
    assert settings == "training: batch 708, highest learning rate 0.2766"
    assert re.fullmatch(r"unpruned: step 2 of 2, loss [\d.]+, \d+ s left", progress)
    assert "\x1b" not in out + err


WRONG = {
    ("--budget", "120%"): "choose from",
    ("--budget", "0.1%"): "every space at its floor",
    ("--budget", "latency:8"): "like 8ms, 800us",
    ("--budget", "8ms", "--latency", "nowhere.json"): "nowhere.json: cannot be read",
    ("--budget", "half"): "cannot be read",
    ("--model", "digits:resent"): "did you mean resnet",
    ("--model", "resnet18"): "cannot take images of 1x8x8",
    ("--data", "digit"): "Did you mean digits?",
    ("--batch", "5000"): "there are 1415 training images; lower --batch (in Python batch_size) to at most 1415.",
    ("--train-batch", "5000"): "there are 1415 training images; lower --train-batch to at most 1415.",
    ("--batch", "0"): "batch size must be an int of at least 1",
    ("--epochs", "0"): "epochs must be an int of at least 1",
    ("--search-epochs", "1", "--warmup", "0.9"): "leaves none of 1 epochs for the alphas",
    ("--groups", "0"): "groups must be an int of at least 1",
    ("--holdout", "1.5"): "held-out share must lie between 0 and 1",
    ("--device", "tpu9"): "'tpu9' cannot be used here",
    ("--weights", "nowhere.pth"): "nowhere.pth: cannot be read",
    ("--input", "3x32x32"): "the images of digits are 1x8x8",
    ("--model-args", "num_classes=3"): "The labels go up to 9, but the network has 3 outputs",
    ("--search-lr", "1e30"): "is again as it was before the first step",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_cannot_be_pruned_is_a_sentence(
    arguments: tuple[str, ...], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "prune", *SHORT, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dmcp: ") and "Traceback" not in err
    assert WRONG[arguments] in err
    assert list(tmp_path.iterdir()) == [] or arguments[0] == "--search-lr"  # refused before anything is written


def test_wrong_weights_and_folders_are_a_sentence(capsys: Capture, tmp_path: Path) -> None:
    torch.save(build("digits:resnet"), tmp_path / "pickle.pth")
    torch.save(build("digits:resnet", width=24).state_dict(), tmp_path / "wide.pth")
    torch.save(build("digits:resnet", width=24, num_classes=3).state_dict(), tmp_path / "both.pth")
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "other.pth")
    for name, words in (
        ("pickle", "not a file of plain weights"),
        ("wide", "conv1.weight is 24x1x3x3, but the network has 16x1x3x3"),
        ("both", "conv1.weight is 24x1x3x3, but the network has 16x1x3x3"),
        ("other", "weights of another network"),
    ):
        code, _, err = run(capsys, "prune", *SHORT, "--weights", str(tmp_path / f"{name}.pth"))
        assert code == 2 and words in err
    assert "settings.json: cannot be read" in run(capsys, "sample", str(tmp_path))[2]
    (tmp_path / "settings.json").write_text("{}")
    assert "not the settings of a run" in run(capsys, "evaluate", str(tmp_path))[2]
    assert "already holds files" in run(capsys, "prune", *SHORT, "--out", str(tmp_path))[2]


# for programs: plain data, exit codes, completion


COMMANDS = ("inspect", "data", "prune", "search", "sample", "train", "evaluate", "runs", "report")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_that_are_lines_of_their_own(command: str, capsys: Capture) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    examples = out.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) >= 2
    assert all(re.match(rf"    (torchrun .* -m )?dmcp {command}( |$)", line) for line in examples)
    assert "--debug" in out


def test_exit_codes_are_in_help_and_docs(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert run(capsys)[:2] == (0, out)  # no command is no mistake
    page = (DOCS / "cli.md").read_text()
    for number in ("0", "1", "2", "3", "75", "130", "141"):
        assert re.search(rf"^ +{number} +\w", out, re.MULTILINE)
        assert f"\n| {number} | " in page


OPTION = r"(?<![\w-])--[a-z][a-z0-9-]*"


def options_of_commands() -> dict[str, set[str]]:
    """The options of each command, but those that all have."""
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    return {
        name: {option for it in command.params for option in (*it.opts, *it.secondary_opts) if option[:2] == "--"}
        for name, command in commands.items()
        if not command.hidden
    }


def test_every_option_is_on_the_page_of_commands() -> None:
    page = (DOCS / "cli.md").read_text()
    assert set().union(*options_of_commands().values()) - set(re.findall(OPTION, page)) == set()


def test_commands_in_the_documents_have_these_options() -> None:
    known = {name: options | {"--help"} for name, options in options_of_commands().items()}
    typed = re.compile(rf"\bdmcp ({'|'.join(known)}) ([^\n`|]*)")
    pages = [path for path in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))) if path.name != "errors.md"]
    lines = [(path.name, *found) for path in pages for found in typed.findall(path.read_text().replace("\\\n", " "))]
    assert len(lines) > 40
    assert [(*line,) for line in lines if not set(re.findall(OPTION, line[2])) <= known[line[1]]] == []


def numbers(text: str) -> list[dict[str, object]]:
    """The rows of a result that is plain data, and nothing else."""
    found: list[dict[str, object]] = json.loads(text)["networks"]
    return found


def test_results_are_plain_data(pruned: tuple[Path, str], capsys: Capture, tmp_path: Path) -> None:
    folder, printed = pruned
    graph = dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8))
    code, out, _ = run(capsys, "evaluate", str(folder), "--device", "cpu", "--json")
    assert code == 0
    (row,) = numbers(out)
    assert [f"{row['macs']:,}", f"{row['params']:,}", f"{100 * float(str(row['accuracy'])):.2f}"] == [
        text.rstrip("%") for text in table(printed)["dmcp"][:3]
    ]
    data = json.loads(out)
    assert data["widths"] == read_widths(folder) and data["folder"] == str(folder)
    assert data["macs_share"] == data["macs"] / graph.macs()
    drawn = json.loads(run(capsys, "sample", str(folder), "--direct", "2", "--json")[1])
    assert [Path(it["file"]).name for it in drawn] == ["direct-1.json", "direct-2.json"]
    assert all(it["macs"] == graph.macs(it["widths"]) for it in drawn)
    code, out, err = run(capsys, "train", *SMALL, "--epochs", "1", "--json", "--out", str(tmp_path / "trained"))
    assert (code, err) == (0, "")
    assert [row["name"] for row in numbers(out)] == ["unpruned"] and json.loads(out)["macs"] == graph.macs()
    code, out, err = run(capsys, "search", *SMALL, "--search-epochs", "2", "--json", "--out", str(tmp_path / "found"))
    assert (code, err) == (0, "")
    assert graph.macs(json.loads(out)["widths"]) == json.loads(out)["macs"] <= graph.macs() // 2


def test_prune_says_where_odd_widths_gain_no_time(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow, align, words in ((0.0, "1", NOT_FASTER), (0.0, "8", "")):
        monkeypatch.setattr("dmcp.results._SLOW", slow)
        odd = (*SHORT, "--align", align, "--out", str(tmp_path / f"{slow}-{align}"))
        code, _, err = run(capsys, "prune", *odd)
        assert (code, err) == (0, words), read_widths(tmp_path / f"{slow}-{align}")


def test_prune_gives_plain_data(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = run(capsys, "prune", *SHORT, "--json", "--out", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["search_steps"] == 2 and len(data["expected_shares"]) == 1
    assert [row["name"] for row in data["networks"]] == ["dmcp"] and data["networks"][0]["macs"] == data["macs"]
    code, out, err = run(capsys, "prune", *DRY, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["asked"] == {"macs": 381_760}
    assert sum(stage["steps"] for stage in json.loads(out)["stages"]) == json.loads(out)["steps"] == 3 * (1415 // 64)


def test_debug_shows_where_a_mistake_was_found(capsys: Capture) -> None:
    for words in (["inspect", "resent18"], ["prune", "--bugdet", "3"]):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
        more = run(capsys, *words, "--debug")
        assert more[:2] == (2, "") and "Traceback" in more[2] and more[2].endswith(err)
    assert "Traceback" in run(capsys, "--debug", "inspect", "resent18")[2]


def test_a_bug_is_1_and_an_interrupt_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> None:
        def trace(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(main, "trace", trace)

    fail(ZeroDivisionError("dmcp"))
    code, out, err = run(capsys, "inspect", "digits:resnet")
    assert (code, out) == (1, "") and "Traceback" in err and "this is a bug" in err.splitlines()[-1]
    fail(KeyboardInterrupt())
    assert run(capsys, "inspect", "digits:resnet") == (130, "", "")
    fail(OSError(28, "No space left on device", "disk"))
    assert run(capsys, "inspect", "digits:resnet") == (2, "", "dmcp: disk: No space left on device.\n")
    fail(dmcp.DmcpError("two\nlines \x1b[31m" + 5000 * "x"))
    (line,) = run(capsys, "inspect", "digits:resnet")[2].splitlines()
    assert line.startswith("dmcp: two lines \N{REPLACEMENT CHARACTER}[31mxxx") and len(line) < 1100


def test_warnings_of_ours_are_plain_lines(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object, **__: object) -> None:
        warnings.warn("Own kernels are not used.", KernelWarning, stacklevel=1)
        warnings.warn("of somebody else", UserWarning, stacklevel=1)
        raise DmcpError("The end.")

    monkeypatch.setattr(main, "trace", trace)
    warnings.simplefilter("default")
    err = run(capsys, "inspect", "digits:resnet")[2].splitlines()
    assert (err[0], err[-1]) == ("Own kernels are not used.", "dmcp: The end.")
    assert "test_cli.py" in err[1] and err[1].endswith("UserWarning: of somebody else")


def test_nobody_reads_and_nothing_is_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{sys.executable} -m dmcp --version | true; exit ${{PIPESTATUS[0]}}"  # seen when Python ends
    end = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (141, "", "")

    def trace(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "trace", trace)  # seen in the midst of a longer output
    monkeypatch.setattr("os.dup2", lambda *_: 0)
    assert run(capsys, "inspect", "digits:resnet") == (141, "", "")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("dmcp pr", {"prune"}),
        ("dmcp prune --see", {"--seed", "--seeds"}),
        ("dmcp inspect resnet1", {"resnet18", "resnet101", "resnet152"}),
        ("dmcp train --model digits:", {"digits:resnet"}),
        ("dmcp prune --recipe imagenet_resnet18", {"imagenet_resnet18_1040m"}),
        ("dmcp prune --retrain in", {"finetune"}),
    ],
)
def test_a_shell_completes_words(
    words: str, wanted: set[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DMCP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(run(capsys)[1].split()) == wanted


def test_of_several_ranks_one_speaks(
    pruned: tuple[Path, str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = str(pruned[0])
    alone = (
        ("inspect", "digits:resnet"),
        ("data", "digits"),
        ("sample", folder),
        ("evaluate", folder),
        ("runs", folder),
        ("report", folder),
        ("prune", *DRY),
    )
    monkeypatch.setenv("RANK", "1")
    for words in alone:
        assert run(capsys, *words) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert run(capsys, "inspect", "digits:resnet")[1] != ""
    code, _, err = run(capsys, "prune", *SHORT, "--seeds", "2")
    assert code == 2 and "leave torchrun out" in err


def write_photos(folder: Path) -> None:
    for part, name in itertools.product(("train", "val"), ("cat", "dog")):
        (folder / part / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (60 * number, 0, 90)).save(folder / part / name / f"{number}.png")


def test_images_that_cannot_be_read_are_skipped_and_named(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    bad = tmp_path / "photos" / "train" / "dog" / "2.png"
    bad.write_bytes(b"no image")
    words = ("train", "--model", "cifar:resnet20", "--data", "photos", "--input", "3x32x32", "--device", "cpu")
    words += ("--batch", "4", "--epochs", "1", "--workers", "0", "--quiet", "--json")
    code, _, err = run(capsys, *words, "--out", "one")
    assert code == 2 and "photos/train/dog/2.png cannot be read as an image" in err
    code, out, err = run(capsys, *words, "--corrupt", "skip", "--out", "two")
    assert code == 0
    assert err == "1 image file could not be read and was replaced: photos/train/dog/2.png\n"
    assert json.loads(out)["folder"] == "two"


def test_a_broken_test_image_costs_no_training(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read when all is trained: what the sentence advises must be possible then."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    bad = tmp_path / "photos" / "val" / "dog" / "3.png"
    bad.write_bytes(bad.read_bytes()[:-20])  # its first bytes, which are looked at before, are sound
    words = ("train", "--model", "cifar:resnet20", "--data", "photos", "--input", "3x32x32", "--device", "cpu")
    words += ("--batch", "4", "--epochs", "1", "--workers", "0", "--quiet", "--json", "--out", "one")
    code, _, err = run(capsys, *words)
    assert code == 2 and "skip such files with --corrupt skip" in err and "dmcp train --resume one" in err
    kept = bad.read_bytes()
    bad.unlink()
    code, _, err = run(capsys, "train", "--resume", "one")
    assert code == 2 and "Put files back that were removed; --corrupt skip" in err
    bad.write_bytes(kept)
    code, out, err = run(capsys, "train", "--resume", "one", "--corrupt", "skip", "--workers", "0", "--quiet", "--json")
    assert code == 0, err
    assert err == "1 image file could not be read and was replaced: photos/val/dog/3.png\n"
    assert json.loads(out)["folder"] == "one"


def test_wrong_widths_leave_no_run_behind(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "widths.json").write_text('{"widths": {"conv9": 3}, "input_shape": [1], "fingerprint": "x"}')
    code, _, err = run(capsys, "train", *SMALL, "--widths", "widths.json")
    assert code == 2 and "dmcp: --widths widths.json: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["widths.json"]
