"""The commands of cli/prune and cli/show: what they write and print."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import DRY, SHORT, SMALL, Capture, command, run
from nets import counted_macs
from safetensors.torch import save_file
from torch import nn

import dmcp
from dmcp.cli import forecast as commands
from dmcp.cli.job import open_job
from dmcp.cli.weights import load_weights
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import FileError, WidthsError
from dmcp.models import build
from dmcp.runs.config import RunConfig
from dmcp.runtime.batches import size_of

pytestmark = pytest.mark.usefixtures("quick_commands")

LONG = "a_name_that_does_not_fit_on_a_line_of_eighty_columns_and_must_still_be_found_by_grep"
Pruned = tuple[Path, str]  # the folder of a run, and what it printed


def table(printed: str) -> dict[str, list[str]]:
    """Numbers of each row of the final table: macs, params, accuracy, ms."""
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("| ")]
    return {row[1]: [row[place] for place in (2, 4, 7, 8)] for row in rows[1:]}


def read_widths(folder: Path, name: str = "widths.json") -> dict[str, int]:
    widths: dict[str, int] = json.loads((folder / name).read_text())["widths"]
    return widths


@pytest.fixture(scope="module")
def graph() -> dmcp.ChannelGraph:
    return dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8))


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """The folder of a very short run, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("runs") / "short", io.StringIO()
    with redirect_stdout(printed):
        assert command("prune", *SHORT, "--budget", "50%", "--baselines", "--out", str(folder)) == 0
    return folder, printed.getvalue()


# prune, search, train


def test_prune_writes_a_run_and_prints_its_table(pruned: Pruned) -> None:
    folder, printed = pruned
    rows = table(printed)
    assert list(rows) == ["unpruned", "uniform", "dmcp"] and printed.endswith(f"{folder}\n")
    small = dmcp.load(folder, build("digits:resnet"))
    macs = counted_macs(small, torch.zeros(1, 1, 8, 8))
    assert rows["dmcp"][0] == f"{macs:,}" and macs <= int(rows["unpruned"][0].replace(",", "")) // 2


def test_results_are_plain_data(pruned: Pruned, graph: dmcp.ChannelGraph, capsys: Capture, tmp_path: Path) -> None:
    folder, printed = pruned
    code, out, err = run(capsys, "evaluate", str(folder), "--device", "cpu", "--json")
    data = json.loads(out)
    (row,) = data["networks"]
    accuracy = f"{100 * row['accuracy']:.2f}%"
    assert (code, err) == (0, "") and [f"{row['macs']:,}", f"{row['params']:,}", accuracy] == table(printed)["dmcp"][:3]
    assert data["widths"] == read_widths(folder) and data["folder"] == str(folder)
    assert data["macs_share"] == data["macs"] / graph.macs() and data["recorded_accuracy"] == row["accuracy"]
    other = shutil.copytree(folder, tmp_path / "other")
    text = (other / "log.jsonl").read_text().replace(f'"accuracy": {row["accuracy"]}', '"accuracy": 0.875')
    (other / "log.jsonl").write_text(text)
    code, out, err = run(capsys, "evaluate", str(other), "--device", "cpu")
    assert (code, err.count("\n")) == (0, 1) and "87.50%" in out
    code, out, err = run(capsys, "prune", *SHORT, "--json", "--out", str(tmp_path / "run"))
    data = json.loads(out)
    assert (code, err, data["search_steps"], len(data["expected_budget_shares"])) == (0, "", 2, 1)
    names = [row["name"] for row in data["networks"]]
    assert names == ["unpruned", "dmcp"] and data["networks"][1]["macs"] == data["macs"]
    code, out, err = run(capsys, "train", *SMALL, "--epochs", "1", "--json", "--out", str(tmp_path / "trained"))
    assert (code, err, [row["name"] for row in json.loads(out)["networks"]]) == (0, "", ["unpruned"])


def test_search_takes_bounds_weights_and_held_out_images(weights: str, capsys: Capture, tmp_path: Path) -> None:
    words = (*SMALL, "--search-epochs", "1", "--weights", weights, "--holdout", "0.2")
    words += ("--min-channels", "6", "--min-channels", "layer2.0.conv1=12", "--max-channels", "layer3=40")
    words += ("--budget", "30%", "--batch", "566", "--out", str(tmp_path / "run"), "--json")
    code, printed, err = run(capsys, "search", *words)
    widths = json.loads(printed)["widths"]
    assert (code, err) == (0, "") and min(widths.values()) >= 6 and widths["layer2.0.conv1"] >= 12
    assert all(width <= 40 for name, width in widths.items() if name.startswith("layer3"))
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["search"]
    assert (settings["warmup"], settings["sort"], settings["min_channels"]) == (0, True, {"": 6, "layer2.0.conv1": 12})
    assert (tmp_path / "run" / "search.safetensors").exists()


def test_train_takes_widths_and_weights(pruned: Pruned, capsys: Capture, tmp_path: Path) -> None:
    widths = str(pruned[0] / "widths.json")
    torch.save({"state_dict": build("digits:resnet").state_dict()}, tmp_path / "start.pth")
    start = ("--weights", str(tmp_path / "start.pth"), "--epochs", "1")
    code, out, err = run(capsys, "train", *SMALL, *start, "--widths", widths, "--out", str(tmp_path / "run"))
    assert (code, err.count("untrained"), list(table(out))) == (0, 1, ["original", "dmcp"])
    assert table(out)["dmcp"][:2] == table(pruned[1])["dmcp"][:2]
    assert read_widths(tmp_path / "run") == read_widths(pruned[0])


def test_weights_for_other_classes_give_all_but_the_last_layer(capsys: Capture, tmp_path: Path) -> None:
    torch.manual_seed(7)  # not the run's
    given = build("digits:resnet", num_classes=1000)
    torch.save(given.state_dict(), tmp_path / "imagenet.pth")
    options = ("--weights", str(tmp_path / "imagenet.pth"), "--epochs", "1", "--out", str(tmp_path / "run"))
    code, out, err = run(capsys, "train", *SMALL, *options)
    assert (code, list(table(out))) == (0, ["unpruned"])  # as given it can do nothing yet
    assert err.startswith("fc ") and "1000" in err and len(err.splitlines()) == 1
    job = open_job(RunConfig(model="digits:resnet", data="digits", weights=options[1], device="cpu"))
    for name, tensor in job.model.state_dict().items():
        source = job.fresh.fc if name.startswith("fc.") else given
        assert torch.equal(tensor, source.state_dict()[name.removeprefix("fc.")])
    two = nn.ModuleList([nn.Linear(4, 10), nn.Linear(4, 10)])  # which one gives the classes?
    torch.save(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).state_dict(), tmp_path / "two.pth")
    with pytest.raises(WidthsError):
        load_weights(two, tmp_path / "two.pth", [], 10)


def test_weights_of_a_wrapped_network_are_those_of_the_network(tmp_path: Path) -> None:
    net = build("digits:resnet")
    wrappers: dict[str, dict[str, Any]] = {
        "DDP of torch.compile": nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": net})}).state_dict(),
        "AveragedModel": torch.optim.swa_utils.AveragedModel(net).state_dict(),
        "Lightning": {"state_dict": nn.ModuleDict({"net": net, "loss": nn.Linear(2, 2)}).state_dict(), "epoch": 3},
    }
    for content in wrappers.values():
        torch.save(content, tmp_path / "wrapped.pth")
        found = build("digits:resnet")
        load_weights(found, tmp_path / "wrapped.pth", [])
        assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in found.state_dict().items())
    net.fc.bias.data[0] = torch.nan
    torch.save(net.state_dict(), tmp_path / "diverged.pth")
    with pytest.raises(FileError, match=r"fc.bias has values that are NaN"):
        load_weights(build("digits:resnet"), tmp_path / "diverged.pth", [])
    torch.save(nn.ModuleDict({"student": net, "teacher": net}).state_dict(), tmp_path / "two.pth")
    with pytest.raises(WidthsError, match=r"conv1.weight is missing .* student.conv1.weight"):
        load_weights(net, tmp_path / "two.pth", [])


def test_weights_are_read_from_plain_files_that_fit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that never ends, a pipe that never answers, and a small file that inflates to 4 GB."""
    net = nn.Linear(4, 3)
    os.mkfifo(tmp_path / "pipe.pth")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (Path("/dev/zero"), tmp_path / "pipe.pth", tmp_path / "pipe.safetensors", tmp_path):
        with pytest.raises(FileError, match="not a plain file"):
            load_weights(net, path, [])
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb/data.pkl", b"")
    data = bytearray((tmp_path / "bomb.pth").read_bytes())
    at = data.index(b"PK\1\2") + 24  # the size of the member in the directory
    data[at : at + 4] = (2**32 - 2**20).to_bytes(4, "little")
    (tmp_path / "bomb.pth").write_bytes(data)
    monkeypatch.setattr("dmcp.runtime.io.free_memory", lambda: 2**50)
    with pytest.raises(FileError, match="inflate to"):
        load_weights(net, tmp_path / "bomb.pth", [])
    save_file(net.state_dict(), tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", (tmp_path / "cut.safetensors").stat().st_size - 4)
    with pytest.raises(FileError):  # its header promises more than the file holds
        load_weights(net, tmp_path / "cut.safetensors", [])


def test_a_dry_run_trains_and_writes_nothing_and_knows_of_bounds(
    graph: dmcp.ChannelGraph, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "prune", *DRY, "--baselines")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    assert all(words in out for words in ("at most 381,760 MACs", "uniform", "total", "Nothing was"))
    monkeypatch.setattr(commands, "forecast", lambda *_: [])  # the times of steps are not asked for
    given = ((), ("--min-channels", "8"), ("--max-channels", "60"))
    reached = [json.loads(run(capsys, "prune", *DRY, "--json", *more)[1])["reachable"] for more in given]
    low, high = ([it[end]["macs"] for it in reached] for end in ("min", "max"))
    assert low[0] == low[2] < low[1] == graph.macs({space.name: 8 for space in graph.spaces})
    assert high[0] == high[1] > high[2] == graph.macs({space.name: min(56, space.size) for space in graph.spaces})


def test_a_dry_run_on_a_cpu_measures_small_batches(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1,024 images of 224 px takes more memory than many CPUs have."""
    monkeypatch.setattr(commands, "_MEASURED", 2**12, raising=False)  # 64 digits
    sizes, real_search, real_training = list[int](), commands.run_search, commands.run_training

    def seen(real: Callable[..., Any], net: nn.Module, batches: list[Any], *rest: Any, **options: Any) -> Any:
        sizes.extend(map(size_of, batches))
        return real(net, batches, *rest, **options)

    monkeypatch.setattr(commands, "run_search", partial(seen, real_search))
    monkeypatch.setattr(commands, "run_training", partial(seen, real_training))
    code, out, _ = run(capsys, "prune", *SHORT, "--dry-run")
    assert code == 0 and {*sizes} == {64} and "64 images" in out and "scaled to 708" in out
    monkeypatch.undo()
    measured = {
        device: commands.measured_batch(1024, (3, 224, 224), torch.device(device)) for device in ("cpu", "cuda")
    }
    assert measured == {"cpu": 13, "cuda": 1024}
    assert commands.measured_batch(256, (3, 32, 32), torch.device("cpu")) == 256


# without a search, and for several budgets


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of weights that were trained a little."""
    net, digits = build("digits:resnet"), load("digits").train
    dmcp.train(net, make_loader(digits, 128, train=True), dmcp.TrainConfig(epochs=2, lr=0.8, warmup_epochs=0))
    save_file(net.state_dict(), path := tmp_path_factory.mktemp("weights") / "trained.safetensors")
    return str(path)


def test_several_budgets_are_one_search_and_a_run_folder_each(weights: str, capsys: Capture, tmp_path: Path) -> None:
    words = (*SHORT, "--weights", weights, "--budget", "70%", "--budget", "params:40%", "--seed", "1")
    folder = tmp_path / "front"
    code, out, _ = run(capsys, "prune", *words, "--out", str(folder))
    names = ["right after the cut 70%", "right after the cut params-40%", "dmcp 70%", "dmcp params-40%"]
    assert code == 0 and list(table(out)) == ["original", *names]
    assert (folder / "front.svg").exists() and "params-40%25/report.md" in (folder / "report.md").read_text()
    assert (folder / "log.jsonl").read_text().count('"stage": "search"') == 2
    tested = table(out)
    params = []
    for name in ("70%", "params-40%"):
        code, printed, _ = run(capsys, "evaluate", str(folder / name), "--device", "cpu", "--json")
        (row,) = json.loads(printed)["networks"]
        assert code == 0 and f"{100 * row['accuracy']:.2f}%" == table(out)[f"dmcp {name}"][2]
        params.append(row["params"])
        assert run(capsys, "sample", str(folder / name), "--out", str(tmp_path))[0] == 0
        assert sum(p.numel() for p in dmcp.load(folder / name, build("digits:resnet")).parameters()) == row["params"]
    listed = [json.loads(run(capsys, "runs", str(it), "--json")[1]) for it in (tmp_path, folder)]
    for runs in listed:  # each network has its line
        assert [[it["budget"], it["state"]] for it in runs] == [["70%", "done"], ["params:40%", "done"]]
        assert [it["name"] for it in runs] == ["front/70%", "front/params-40%"]
        shown = [f"{100 * it['accuracy']:.2f}%" for it in runs]
        assert shown == [tested["dmcp 70%"][2], tested["dmcp params-40%"][2]]
    code, printed, _ = run(capsys, "export", str(folder), "--out", str(tmp_path / "both.pt2"), "--json")
    exported = json.loads(printed)["budgets"]
    assert code == 0 and [facts["params"] for facts in exported.values()] == params
    assert sorted(path.name for path in tmp_path.glob("both*")) == ["both-70%.pt2", "both-params-40%.pt2"]
    words_of_one = ("--budget", "params:40%", "--out", str(tmp_path / "one.pt2"), "--json")
    code, printed, _ = run(capsys, "export", str(folder), *words_of_one)
    assert code == 0 and json.loads(printed)["params"] == params[1] and (tmp_path / "one.pt2").exists()
    code, _, err = run(capsys, "export", str(folder), "--budget", "55%")
    assert code == 2 and "70%" in err and "params-40%" in err
    assert run(capsys, "report", str(folder), str(folder / "70%"), "--out", str(tmp_path / "r.html"))[0] == 0
    for again in (("evaluate", str(folder)), ("prune", "--resume", str(folder)), ("prune", *words, "--budget", "0.1%")):
        code, out, err = run(capsys, *again)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_cut_without_a_search_and_without_training(weights: str, capsys: Capture, tmp_path: Path) -> None:
    words = (*SMALL, "--weights", weights, "--method", "l1", "--no-train", "--json")
    code, out, err = run(capsys, "prune", *words, "--out", str(tmp_path / "run"))
    facts = json.loads(out)
    assert (code, err, [row["name"] for row in facts["networks"]]) == (0, "", ["original", "l1"])
    assert facts["macs_share"] <= 0.5 and "search_steps" not in facts
    assert not list((tmp_path / "run").glob("search*")) and (tmp_path / "run" / "report.md").exists()
    code, out, _ = run(capsys, "prune", *words, "--budget", "40%", "--budget", "20%", "--out", str(tmp_path / "two"))
    assert code == 0 and json.loads(out)["budgets"]["20%"]["macs_share"] <= 0.2


@pytest.mark.filterwarnings("always::dmcp.errors.DmcpWarning", "ignore::dmcp.searching.search.SearchWarning")
def test_a_warning_is_one_plain_line(capsys: Capture, tmp_path: Path) -> None:
    words = ("prune", *SMALL, "--method", "l2", "--retrain", "none", "--out", str(tmp_path / "run"))
    code, _, err = run(capsys, *words)
    assert code == 0 and err.splitlines() == [
        "The network does not count as trained: l2 ranks the weights that it has."
    ]


def test_a_dry_run_says_what_was_chosen_and_why(weights: str, capsys: Capture) -> None:
    words = ("prune", *SMALL[:6], "--weights", weights, "--dry-run", "--json")
    facts = json.loads(run(capsys, *words, "--epochs", "3", "--budget", "60%", "--budget", "40%")[1])
    chosen = {"batch", "search_epochs", "search_lr", "warmup", "optimizer", "lr", "weight_decay"}
    assert facts["chosen"].keys() == chosen
    assert len(facts["asked"]) == 2
    steps = {"search": 35 * 11, "dmcp 60%": 3 * 11, "dmcp 40%": 3 * 11}  # passes, and batches in one
    assert {it["name"]: it["steps"] for it in facts["stages"]} == steps and facts["steps"] == sum(steps.values())
    assert facts["seconds"] == pytest.approx(sum(it["seconds"] for it in facts["stages"]))
    facts = json.loads(run(capsys, *words, "--method", "l2")[1])
    assert facts["chosen"].keys() == {"batch", "epochs", "optimizer", "lr", "weight_decay"}
    assert [it["name"] for it in facts["stages"]] == ["l2"]
    facts = json.loads(run(capsys, *words, "--method", "sensitivity", "--baselines")[1])
    assert [it["name"] for it in facts["stages"]] == ["unpruned", "uniform", "sensitivity"]


@pytest.mark.filterwarnings("always::dmcp.searching.search.SearchWarning")
def test_a_dry_run_does_not_warn_of_the_few_steps_that_it_measures(weights: str, capsys: Capture) -> None:
    code, _, err = run(capsys, "prune", *SMALL[:6], "--quiet", "--weights", weights, "--budget", "50%", "--dry-run")
    assert (code, err) == (0, "")


def test_a_file_of_untrained_weights_does_not_make_a_network_trained(
    weights: str, capsys: Capture, tmp_path: Path
) -> None:
    fresh = build("digits:resnet")
    save_file(fresh.state_dict(), tmp_path / "fresh.safetensors")
    words = ("prune", *SMALL[:6], "--dry-run", "--json", "--weights")
    for file, trained in ((weights, True), (str(tmp_path / "fresh.safetensors"), False)):
        code, out, err = run(capsys, *words, file)
        facts = json.loads(out)
        assert code == 0 and ("untrained" in err) == (not trained)
        assert facts["chosen"]["warmup"].startswith("0.0") == trained  # only an untrained network has a warm-up
        assert ("unpruned" in [stage["name"] for stage in facts["stages"]]) == (not trained)  # as a teacher


# sample


def test_samples_are_inside_the_budget(
    pruned: Pruned, graph: dmcp.ChannelGraph, capsys: Capture, tmp_path: Path
) -> None:
    folder, before = pruned[0], sorted(pruned[0].iterdir())
    out = tmp_path / "new" / "widths"
    words = ("sample", str(folder), "--out", str(out))
    code, printed, err = run(capsys, *words, "--direct", "3", "--json")
    files = [Path(it["file"]).name for it in json.loads(printed)]
    assert (code, err, files) == (0, "", [f"direct-{number}.json" for number in (1, 2, 3)])
    samples = [graph.widths(read_widths(out, name)) for name in files]
    assert len(set(samples)) == 3 and all(graph.macs(widths) <= graph.macs() // 2 for widths in samples)
    assert run(capsys, *words)[0] == 0 and read_widths(out, "expected.json") == read_widths(folder)
    code, printed, err = run(capsys, *words, "--budget", "30%")
    assert code == 0 and "scaled to 30%" in err and printed.startswith(f"{out}/expected-30%.json: ")
    assert 0.95 * 0.3 <= graph.macs(graph.widths(read_widths(out, "expected-30%.json"))) / graph.macs() <= 0.3
    assert run(capsys, *words, "--budget", "50%")[2] == "" and sorted(folder.iterdir()) == before


# inspect


def test_inspect_shows_totals_and_tied_layers(capsys: Capture) -> None:
    code, out, err = run(capsys, "inspect", "resnet50", "--input", "3x64x64")
    assert (code, err) == (0, "") and "\x1b" not in out and "…" not in out
    layers = ("layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3", "layer1.2.conv3")  # one residual stream
    assert all(text in out for text in ("335.7M MACs", "25.56M parameters", *layers))
    assert run(capsys, "inspect", "lraspp_mobilenet_v3_large", "--input", "3x64x64")[0] == 0
    words = ("inspect", "resnet18", "--input", "3x64x64", "--json")
    full = json.loads(run(capsys, *words)[1])
    assert (full["input_shape"], full["params"]) == ([3, 64, 64], 11_689_512)
    assert full["macs"] == counted_macs(build("resnet18"), torch.zeros(1, 3, 64, 64))
    assert len(json.loads(run(capsys, *words, "--ignore", "layer1")[1])["spaces"]) < len(full["spaces"])


def test_inspect_builds_a_net_of_this_folder(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from torch import nn", "def build(width=8, act=True, name=''):"]
    lines += ["    assert (width, act, name) == (12, False, 'x')", f"    long = nn.Conv2d(width, 2, 3), {LONG!r}"]
    lines += ["    net = nn.Sequential(nn.Conv2d(1, width, 3))", "    net.add_module(*long[::-1])", "    return net"]
    (tmp_path / "mynet.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    options = ("--input", "1x8x8", "--model-args", "width=12", "--model-args", "act=false", "--model-args", "name=x")
    code, out, err = run(capsys, "inspect", "mynet:build", *options)
    assert (code, err) == (0, "") and LONG in out  # not broken, since nobody reads a pipe at 80 columns
