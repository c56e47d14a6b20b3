"""A network as it was given: what it is worth before pruning, and what is said where nothing can be done with it."""

from __future__ import annotations

import copy
import json
import math
import random
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import Residual
from test_cli import SHORT, SMALL, Capture, numbers, run
from test_pruning import SEARCH, TRAIN, Noise, traced
from torch import Tensor, nn

import dmcp
from dmcp.cli.config import RetrainKind
from dmcp.cli.session import _signals
from dmcp.errors import DataError, DmcpError, TrainingError
from dmcp.losses import DistillationWarning, MetricWarning
from dmcp.models import build
from dmcp.preflight import check_classifier, check_finite, check_input
from dmcp.report.html import draw_runs, make_page
from dmcp.results import DMCP, ORIGINAL, UNPRUNED, Row, divergence, notes, standard_error
from dmcp.results import results_table as table
from dmcp.retraining import DivergenceWarning
from dmcp.runs import open_run, read_run
from dmcp.settings import Retrain
from dmcp.training import evaluate

NETS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self, classes):
        super().__init__()
        layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.body = nn.Sequential(*layers)
        self.head, self.box = nn.Linear(8, classes), nn.Linear(8, 4)

    def forward(self, x):
        x = self.body(x)
        return {"classes": self.head(x), "box": self.box(x)}

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(-1 - x.square())

def two(num_classes):
    return Two(num_classes)

def root(num_classes):
    first = [nn.Conv2d(1, 8, 3), nn.ReLU(), Root()]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights."""
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.manual_seed(0)
    torch.save(build("digits:resnet").state_dict(), path)
    return path


# inherited weights


@pytest.mark.parametrize(
    ("words", "kind", "epochs"),
    [((), "finetune", 20), (("--retrain", "scratch"), "scratch", 100), (("--retrain", "teacher"), "teacher", 100)],
)
def test_given_weights_are_kept_unless_somebody_says_otherwise(
    words: tuple[str, ...], kind: str, epochs: int, trained: Path, capsys: Capture
) -> None:
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmcp.cli.prune._forecast", lambda plan, as_json: plans.append(plan))
        assert run(capsys, "prune", *SMALL, "--dry-run", *words, "--weights", str(trained))[0] == 0
        assert run(capsys, "prune", *SMALL, "--dry-run", *words)[0] == 0
        assert run(capsys, "prune", "--recipe", "imagenet_resnet18_1040m", *SMALL, "--dry-run", *words)[0] == 0
    with_weights, without, recipe = plans
    assert (with_weights.retrain, with_weights.train.epochs) == (kind, epochs)
    assert without.retrain == recipe.retrain == (words[1] if words else "scratch")
    assert json.loads(json.dumps(with_weights.to_json()))["options"]["retrain"] == kind
    assert "inherit with --weights" in RetrainKind.__metadata__[0].help


def test_the_given_network_is_tested_as_it_is() -> None:
    model, graph = traced()
    before = copy.deepcopy(model)
    test = Noise(3)
    result = dmcp.prune(model, Noise(), test, graph=graph, search=SEARCH, train=TRAIN, retrain=Retrain.FINETUNE)
    given, ours = result.rows
    assert (given.name, ours.name) == (ORIGINAL, DMCP)
    assert given.accuracy == evaluate(before, test)
    assert (given.macs, given.params) == (graph.macs(), graph.params())
    assert "points against as given" in result.table


def test_a_command_tests_the_given_network(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    words = (*SMALL, "--epochs", "1", "--weights", str(trained), "--json", "--out", str(tmp_path / "run"))
    code, out, err = run(capsys, "train", *words)
    assert (code, err) == (0, "")
    assert [row["name"] for row in numbers(out)] == [ORIGINAL, "unpruned"]
    past = read_run(tmp_path / "run")
    assert past.result is not None and past.result.name == "unpruned"
    assert "original" in make_page([past]) and "| as given |" in (tmp_path / "run" / "report.md").read_text()


# networks that nothing can be done with


def test_numbers_that_are_none_are_named() -> None:
    model, graph = traced()
    broken = copy.deepcopy(model)
    name, parameter = list(broken.named_parameters())[2]
    parameter.data.view(-1)[0] = float("inf")
    for graph_or_none in (graph, None):
        with pytest.raises(TrainingError, match=f"^The network's {name} holds numbers that are NaN or infinite"):
            dmcp.prune(broken, Noise(), Noise(1), graph=graph_or_none)
    broken = copy.deepcopy(model)
    name, buffer = next((name, it) for name, it in broken.named_buffers() if it.is_floating_point())
    buffer[0] = float("nan")
    with pytest.raises(TrainingError, match=f"^The network's {name} holds numbers that are NaN:"):
        dmcp.prune(broken, Noise(), Noise(1))
    masked = nn.Sequential(nn.Conv2d(3, 4, 3))
    masked.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    check_finite(masked, torch.zeros(2, 3, 8, 8))  # a mask may be infinite


class Writing(Residual):
    """Writes into its input."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__(**Residual.FULL)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return super().forward(x)


def test_a_forward_that_writes_into_its_input_is_refused() -> None:
    """All sub-networks of a step get the same batch, and each would see what the one before has left."""
    with pytest.raises(TrainingError, match="The forward of the network changes its input"):
        dmcp.prune(Writing(lambda x: x.mul_(2)), Noise(), Noise(1), search=SEARCH, train=TRAIN)
    doubling = Writing(lambda x: x.mul_(2))
    supernet = dmcp.Supernet(doubling, dmcp.trace(doubling, torch.randn(2, *Residual.SHAPE)), groups=SEARCH.groups)
    with pytest.raises(TrainingError, match="The forward of the network changes its input"):
        dmcp.search(supernet, Noise(), SEARCH)
    x = torch.randn(2, *Residual.SHAPE)
    check_input(Writing(lambda x: x.relu_()), x)  # a second pass finds it as the first has left it
    check_input(Writing(lambda x: x.clone().mul_(2)), x)


class Dicing(Residual):
    """Rolls the dice of Python, NumPy and torch in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(1, dtype=x.dtype) * random.random() * np.random.rand()
        return super().forward(x + noise)


def test_looking_at_the_first_batch_of_a_search_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    found = []
    for look in (check_input, lambda model, example: looks.append(model)):
        monkeypatch.setattr("dmcp.searching.search.check_input", look)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        net = Dicing(**Residual.FULL).float()
        graph = dmcp.trace(net, torch.randn(2, *Residual.SHAPE))
        supernet = dmcp.Supernet(net, graph, groups=SEARCH.groups)
        result = dmcp.search(supernet, Noise(), SEARCH)
        found.append([result.alphas, *supernet.model.state_dict().values()])
    assert len(looks) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Hiding(Residual):
    """Has a layer that torch does not know of."""

    def __init__(self) -> None:
        super().__init__(**Residual.FULL)
        self.layers = [nn.Conv2d(3, 3, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x))


class Late(Residual):
    """Has a layer without a shape."""

    def __init__(self) -> None:
        super().__init__(**Residual.FULL)
        self.late = nn.LazyConv2d(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.late(x))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Hiding, "plain list or dict.*nn.ModuleList"),
        (Late, "late.weight has no shape yet: call the model once"),
        (lambda: Residual(**Residual.FULL).to("meta"), "meta device"),
    ],
)
def test_networks_that_are_not_built_as_torch_wants_are_refused(model: Any, words: str) -> None:
    with pytest.raises(DmcpError, match=words):
        dmcp.prune(model(), Noise(), Noise(1), search=SEARCH, train=TRAIN)


def test_inputs_that_are_no_numbers_are_not_the_networks_fault() -> None:
    model, graph = traced()
    bad = Noise()
    bad.batches = [(x * float("nan"), y) for x, y in bad.batches]
    with pytest.raises(DataError, match="The input of a batch holds NaN or infinite numbers"):
        dmcp.prune(model, bad, Noise(1), search=SEARCH, train=TRAIN, graph=graph)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"baselines": "no"}, "controls must be True or False, not 'no'"),
        ({"test_given": 0}, "test_given must be True or False, not 0"),
        ({"graph": 1}, "graph must be a dmcp.ChannelGraph.*not a int"),
        ({"fresh": 1}, "fresh must be a torch.nn.Module, not a int"),
        ({"seed": 2**64}, "seed must be at most 4611686018427387904, not"),
    ],
)
def test_arguments_of_another_kind_are_refused(how: Any, words: str) -> None:
    with pytest.raises(DmcpError, match=words):
        dmcp.prune(traced()[0], Noise(), Noise(1), search=SEARCH, train=TRAIN, **how)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda model, graph: dmcp.train(model, Noise(), {"epochs": 1}),
            "config must be a dmcp.TrainConfig, not a dict",
        ),
        (lambda model, graph: dmcp.search(model, Noise(), SEARCH), r"dmcp.Supernet\(model, graph\), not a Residual"),
        (
            lambda model, graph: dmcp.search(dmcp.Supernet(model, graph), Noise(), TRAIN),
            "config must be a dmcp.SearchConfig, not a TrainConfig",
        ),
        (lambda model, graph: dmcp.Supernet(model, None), "graph must be a dmcp.ChannelGraph.*dmcp.trace.*NoneType"),
        (lambda model, graph: dmcp.evaluate(model, None), "loader must yield batches, but a NoneType does not"),
        (lambda model, graph: dmcp.random_widths(graph, "50%", 0), "generator must be a torch.Generator.*manual_seed"),
        (
            lambda model, graph: dmcp.trace(model, torch.zeros(2, *Residual.SHAPE), ignore=3),
            r"ignore takes names.*not \[3\]",
        ),
        (lambda model, graph: dmcp.verify(model, graph, torch.zeros(2, 1, 8, 8)), "example input.*channels"),
        (lambda model, graph: dmcp.Checkpointer(3), "A keeper needs the path of a folder, not 3"),
        (lambda model, graph: dmcp.Checkpointer("a", every_steps="x"), "every_steps must be a number, not 'x'"),
        (lambda model, graph: dmcp.Checkpointer("a", every_seconds=None), "every_seconds must be a number, not None"),
        (lambda model, graph: dmcp.recalibrate(model, 3), "loader must yield batches, but a int does not"),
        (lambda model, graph: dmcp.recalibrate(3, Noise()), "A torch.nn.Module is needed, not int"),
        (lambda model, graph: dmcp.recalibrate(model, Noise(), "2"), "batches must be an int of at least 1.*not '2'"),
        (lambda model, graph: dmcp.recalibrate(model, Noise(), 0), "batches must be an int of at least 1.*not 0"),
        (lambda model, graph: dmcp.recalibrate(model, Noise(), forward=3), "forward must be a function, not a int"),
        (lambda model, graph: dmcp.parse_budget("50%", None), "graph must be a dmcp.ChannelGraph.*not a NoneType"),
        (lambda model, graph: dmcp.parse_budget("1M", model), "graph must be a dmcp.ChannelGraph.*not a Residual"),
        (lambda model, graph: dmcp.cut(model, 3, 3), "graph must be a dmcp.ChannelGraph.*dmcp.trace.*not a int"),
        (lambda model, graph: dmcp.cut(3, graph, {}), "A torch.nn.Module is needed, not int"),
        (lambda model, graph: dmcp.verify(model, 3, graph), "graph must be a dmcp.ChannelGraph.*not a int"),
        (lambda model, graph: dmcp.uniform(3, "50%"), "graph must be a dmcp.ChannelGraph.*not a int"),
        (lambda model, graph: dmcp.uniform(graph, "50%", tolerance="x"), "tolerance must be a number.*not 'x'"),
        (lambda model, graph: dmcp.random_widths(3, "50%"), "graph must be a dmcp.ChannelGraph.*not a int"),
        (lambda model, graph: dmcp.random_widths(graph, "50%", tolerance=[]), r"tolerance must be a number.*not \[\]"),
        (lambda model, graph: dmcp.expected(3), "result must be a dmcp.SearchResult.*dmcp.search.*not a int"),
        (lambda model, graph: dmcp.direct(graph, 1), "result must be a dmcp.SearchResult.*not a ChannelGraph"),
        (lambda model, graph: dmcp.load(3, model), "load needs the path of a folder, not 3"),
        (lambda model, graph: dmcp.save(model, graph.full, 3), "save needs the path of a folder, not 3"),
        (
            lambda model, graph: dmcp.export(model, torch.zeros(2, *Residual.SHAPE), 3),
            "export needs the path of a file",
        ),
        (lambda model, graph: dmcp.quantize(3, [], "a.onnx"), "quantize needs the path of a file, not 3"),
        (lambda model, graph: dmcp.Latency.load(3), "A latency table needs the path of a file, not 3"),
        (lambda model, graph: dmcp.evaluate(3, []), "A torch.nn.Module is needed, not int"),
        (lambda model, graph: dmcp.evaluate(Residual, []), "not the class Residual: build one"),
        (lambda model, graph: dmcp.evaluate(model, [], forward=3), "forward must be a function, not a int"),
        (lambda model, graph: dmcp.evaluate(model, "words"), "The input of a batch holds no tensor"),
        (lambda model, graph: dmcp.train(3, Noise(), TRAIN), "A torch.nn.Module is needed, not int"),
        (lambda model, graph: dmcp.reinitialize(model, init=3), "init must be a function, not a int"),
        (lambda model, graph: dmcp.reinitialize(model, generator=0), "generator must be a torch.Generator, not 0"),
        (
            lambda model, graph: dmcp.train(model, Noise(), TRAIN, runtime=dmcp.Runtime(engine="cpu")),
            "engine must be a dmcp.Engine, not a str",
        ),
        (
            lambda model, graph: dmcp.train(model, Noise(), TRAIN, runtime=dmcp.Runtime(checkpointer="a")),
            "keeper must be a dmcp.Keeper, not a str",
        ),
        (
            lambda model, graph: dmcp.train(model, Noise(), TRAIN, task=dmcp.Task(loss=3)),
            "loss must be a function, not a int",
        ),
        (
            lambda model, graph: dmcp.search(
                dmcp.Supernet(model, graph), Noise(), SEARCH, runtime=dmcp.Runtime(engine="cpu")
            ),
            "engine must be a dmcp.Engine, not a str",
        ),
        (
            lambda model, graph: dmcp.search(
                dmcp.Supernet(model, graph), Noise(), SEARCH, runtime=dmcp.Runtime(on_event=3)
            ),
            "on_record must be a function, not a int",
        ),
        (
            lambda model, graph: dmcp.measure_latency(model, torch.zeros(2, *Residual.SHAPE), 3),
            "graph must be a dmcp.ChannelGraph.*not a int",
        ),
        (
            lambda model, graph: dmcp.measure_latency(model, torch.zeros(2, *Residual.SHAPE), measure=3),
            "measure must be a function, not a int: it gets a network",
        ),
        (lambda model, graph: dmcp.evaluate(model, torch.zeros(2)), "dim 0 of its first tensor, which has none"),
        (lambda model, graph: dmcp.evaluate(model, [], precision="x"), "precision must be one of float32.*not 'x'"),
        (lambda model, graph: dmcp.prune(model, None, Noise()), "The loader, a NoneType, has no length"),
        (lambda model, graph: dmcp.Supernet(model, graph).fold(3), "Gates must be one number per channel.*not a int"),
        (lambda model, graph: dmcp.verify(model, graph, 3), "The example input holds no tensor"),
        (
            lambda model, graph: dmcp.trace(model, torch.zeros(2, *Residual.SHAPE), rules=3),
            r"rules are a mapping.*RULES \| .*not a int",
        ),
        (
            lambda model, graph: dmcp.export(model, torch.zeros(2, *Residual.SHAPE), "a.pt2", preprocessing=object()),
            "preprocessing must be plain data.*object",
        ),
        (lambda model, graph: dmcp.Budget("50%", "50%"), "a tuple of Limits: dmcp.parse_budget"),
    ],
)
def test_parts_that_are_given_another_thing_say_what_they_take(call: Any, words: str) -> None:
    with pytest.raises(DmcpError, match=words) as raised:
        call(*traced())
    assert "plain list" not in str(raised.value)


@pytest.mark.parametrize("field", ["sort", "distill", "independent", "task_loss", "train_weights"])
def test_a_word_is_no_yes_or_no(field: str) -> None:
    with pytest.raises(TrainingError, match=f"^{field} must be True or False, not 'no'"):
        dmcp.SearchConfig(budget="50%", **{field: "no"})
    with pytest.raises(TrainingError, match="nesterov must be True or False, not 'no'"):
        dmcp.TrainConfig(nesterov="no")  # type: ignore[arg-type]


def test_a_loss_for_labels_is_told_that_it_gets_the_batch() -> None:
    model, graph = traced()
    how = {"search": SEARCH, "train": TRAIN, "graph": graph}
    with pytest.warns(DistillationWarning), pytest.raises(TypeError) as raised:
        dmcp.prune(model, Noise(), Noise(1), **how, task=dmcp.Task(loss=nn.functional.cross_entropy))
    assert "loss(output, batch)" in " ".join(raised.value.__notes__)
    with pytest.raises(TypeError) as raised:
        dmcp.prune(model, Noise(), Noise(1), **how, task=dmcp.Task(metric=lambda output, y: (output.argmax(1) - y, 1)))
    assert "metric(output, batch)" in " ".join(raised.value.__notes__)


def test_a_network_without_a_finite_output_is_refused() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(-1 - x.square())

    model = nn.Sequential(nn.Conv2d(*(traced()[1].input_shape[0], 8), 3), Root(), nn.Flatten(), nn.LazyLinear(5))
    model(torch.zeros(2, *traced()[1].input_shape))
    with pytest.raises(TrainingError, match="output of the network on an example is NaN or infinite"):
        dmcp.prune(model, Noise(), Noise(1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given_nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.parametrize("command", ["prune", "search", "train"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "given_nets:two",
            "gives a dict, not one tensor of 2 images x 10 classes: the command line trains classifiers",
        ),
        ("given_nets:root", "output of the network on an example is NaN or infinite"),
    ],
)
def test_a_command_refuses_before_it_writes(model: str, words: str, command: str, here: Path, capsys: Capture) -> None:
    other = [word for word in SMALL if word != "digits:resnet"]
    other.insert(1, model)
    code, out, err = run(capsys, command, *other, "--out", "runs/one")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert words in err
    assert {path.name for path in here.iterdir()} <= {"given_nets.py", "__pycache__"}


def test_weights_with_nan_are_refused_by_name(here: Path, capsys: Capture) -> None:
    state = build("digits:resnet").state_dict()
    state["fc.bias"][3] = float("nan")
    torch.save(state, "bad.pth")
    code, _, err = run(capsys, "prune", *SHORT, "--weights", "bad.pth", "--dry-run")
    assert code == 2 and "The network's fc.bias holds numbers that are NaN or infinite" in err


def test_outputs_that_differ_in_training_are_seen() -> None:
    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            x = self.norm(x)
            return (x, x) if self.training else x

    net, x = Aux(), torch.randn(2, 4)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(TrainingError, match="gives a tuple in training"):
        check_classifier(net, x, 4)
    with pytest.raises(TrainingError, match=r"gives a tensor \(2, 4\), not one tensor of 2 images x 5 classes"):
        check_classifier(net, x, 5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_that_fails_before_its_first_step_leaves_nothing(exists: bool, here: Path, capsys: Capture) -> None:
    if exists:
        (here / "mine" / "one").mkdir(parents=True)
    words = ("prune", *SHORT, "--out", "mine/one")
    assert run(capsys, *words, "--search-lr", "1e30")[0] == 2
    assert list((here / "mine").rglob("*")) == ([here / "mine" / "one"] if exists else [])
    assert (here / "mine").exists() == exists


# what is said of a result


def test_a_training_that_went_wrong_is_told() -> None:
    model, graph = traced()
    loader = Noise(6)
    wild = type(TRAIN)(epochs=5, reference_batch=None, lr=3000.0, warmup_lr=3000.0, weight_decay=0)
    with pytest.warns(DivergenceWarning, match=r"The training of 'ours' went wrong: its loss was .* \(--lr"):
        dmcp.prune(model, loader, Noise(1), graph=graph, search=SEARCH, train=wild)


def test_only_a_rise_is_a_divergence() -> None:
    assert divergence("dmcp", [2.3, *[9.0] * 8, 4e5])
    assert divergence("dmcp", [-1.0] * 10 + [-0.5] * 10)
    assert not divergence("dmcp", [2.3] * 18 + [9.0, 1.0, 1.0])
    assert not divergence("dmcp", [0.1] * 10 + [0.105] * 10)  # inherited weights, as good as before
    assert not divergence("dmcp", [2.3, 9.0])  # too short to tell


def test_a_command_tells_that_a_training_went_wrong(tmp_path: Path, capsys: Capture) -> None:
    words = (*SMALL, "--batch", "470", "--epochs", "4", "--lr", "100", "--out", str(tmp_path / "run"))
    code, _, err = run(capsys, "train", *words)
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("The training of 'unpruned' went wrong") and "--lr" in line
    assert line in (tmp_path / "run" / "report.md").read_text()


def test_the_error_is_that_of_a_share() -> None:
    assert standard_error(0.6, 60) == pytest.approx(0.0632, abs=1e-4)
    assert 0 < standard_error(1.0, 60) < 0.02
    _, graph = traced()
    rows = [Row(DMCP, 5, 5, 0.6, 1.0, 8, 60)]
    assert "60 test samples: an accuracy is known to ± 6.3 points (standard error)" in notes(rows, graph)
    assert not [note for note in notes([Row(DMCP, 5, 5, 0.6)], graph) if "test samples" in note]  # an old log
    assert f"{100 * 5 / graph.macs():.1f}%" in table(rows, graph)


def test_own_metrics_are_plain_numbers_in_a_report(tmp_path: Path) -> None:
    model, graph = traced()
    folder = open_run(tmp_path / "run")
    result = dmcp.prune(
        model,
        Noise(),
        Noise(1),
        graph=graph,
        search=SEARCH,
        train=TRAIN,
        baselines=True,
        task=dmcp.Task(metric=lambda output, batch: (torch.tensor(7.34731 * len(output)), len(output))),
        runtime=dmcp.Runtime(on_event=folder.on_event),
    )
    folder.finish(result)
    past = read_run(folder.folder)
    assert all(row.own_metric for row in past.rows)
    page = make_page([past])
    assert "7.347" in page and "734.7" not in page and "Metric, ours" in page
    assert "| metric |" in (folder.folder / "report.md").read_text()


def test_a_metric_of_which_little_is_good_is_told_so(tmp_path: Path) -> None:
    """By words: a plain + or - would be read as a gain or a loss of quality."""
    _, graph = traced()

    def errors(*values: float) -> list[Row]:
        return [
            Row(name, 5, 5, value, own_metric=True, lower_is_better=True)
            for name, value in zip([UNPRUNED, "uniform", DMCP], values, strict=True)
        ]

    text = table(errors(0.25, 0.75, 0.5), graph)
    assert "0.25 worse than unpruned, 0.25 better than uniform widths" in text and "+" not in text
    assert text.splitlines()[0].split("share")[-1].strip().startswith("metric (lower is better)")
    assert "ours: as good as unpruned" in table(errors(0.5, 0.75, 0.5), graph)
    (tmp_path / "settings.json").write_text("{}")
    lines = [json.dumps({"stage": "test"} | asdict(row)) + "\n" for row in errors(0.25, 0.75, 0.5)]
    (tmp_path / "log.jsonl").write_text("".join(lines))
    page = make_page([read_run(tmp_path)])
    assert "0.25 better than uniform widths" in page and "Metric (lower is better), ours" in page


@pytest.mark.parametrize("lower", [False, True])
def test_a_metric_that_is_no_number_is_compared_with_nothing(lower: bool) -> None:
    """Neither better nor worse: every comparison with NaN is false."""
    _, graph = traced()
    values = {UNPRUNED: math.nan, "uniform": 0.25, DMCP: 0.5}
    rows = [Row(name, 5, 5, value, own_metric=True, lower_is_better=lower) for name, value in values.items()]
    text = table(rows, graph)
    gap = "0.25 worse than uniform widths" if lower else "+0.25 against uniform widths"
    assert f"ours: not comparable with unpruned, {gap}" in text and "nan worse" not in text and "+nan" not in text
    assert "unpruned: its metric is nan, so nobody knows how good it is; look at the metric and at the outputs" in text
    worst = [replace(row, accuracy=math.nan) for row in rows]
    assert "ours: not comparable with unpruned, not comparable with uniform widths" in table(worst, graph)
    endless = [replace(row, accuracy=math.inf) for row in rows]  # of a perfect picture, say
    assert "nan" not in table(endless, graph)


@pytest.mark.parametrize("lower", [False, True])
def test_a_metric_that_is_no_number_is_warned_of(lower: bool) -> None:
    model, graph = traced()
    metric: Any = lambda output, batch: (output.sum() * math.nan, len(output))  # noqa: E731
    metric = dmcp.LowerIsBetter(metric) if lower else metric
    with pytest.warns(MetricWarning, match="ours: its metric is nan") as told:
        dmcp.prune(model, Noise(), Noise(1), graph=graph, search=SEARCH, train=TRAIN, task=dmcp.Task(metric=metric))
    assert len(told) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_with_a_metric_that_is_no_number_is_listed_and_reported(
    value: float, tmp_path: Path, capsys: Capture
) -> None:
    """It was "damaged", and its other networks were not shown."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text("{}")
    values = {UNPRUNED: value, "uniform": 0.25, DMCP: value}
    rows = [Row(name, 5, 5, value, own_metric=True) for name, value in values.items()]
    (folder / "log.jsonl").write_text("".join(json.dumps({"stage": "test"} | asdict(row)) + "\n" for row in rows))
    past = read_run(folder)
    assert [row.name for row in past.rows] == [*values] and not past.problems
    page = make_page([past])
    assert (
        page.count(f'<td class="number">{value}</td>') == 3
        and "0.25" in page
        and "accuracy-macs" not in draw_runs([past])
    )
    if math.isnan(value):
        assert "not comparable with uniform widths" in page and "ours: its metric is nan, so nobody knows" in page
    assert f" {value} " in run(capsys, "runs", str(folder.parent))[1]
    (fact,) = json.loads(
        run(capsys, "runs", str(folder.parent), "--json")[1], parse_constant=pytest.fail
    )  # NaN is no JSON
    assert fact["accuracy"] is None


def test_a_share_that_is_no_number_is_damage(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "log.jsonl").write_text(json.dumps({"stage": "test"} | asdict(Row(DMCP, 5, 5, math.nan))) + "\n")
    assert read_run(tmp_path).state == "damaged" and not read_run(tmp_path).rows


def test_it_is_said_once_that_a_stop_was_asked_for(capsys: Capture) -> None:
    with _signals() as asked:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert asked()
    assert capsys.readouterr().err.count("asked to stop") == 1


def test_processes_that_read_images_leave_ctrl_c_to_the_one_that_saves(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends it to all of them, and they have the handler of the process that forked them."""
    with _signals() as asked:
        monkeypatch.setattr("os.getpid", lambda: -1)  # as in a worker
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert not asked()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("typed", "said"), [("import", "see dmcp --help"), ("reprot", "Did you mean 'report'?")])
def test_only_what_is_alike_is_suggested(typed: str, said: str, capsys: Capture) -> None:
    code, _, err = run(capsys, typed)
    assert code == 2 and said in err and ("report" in err) == (typed == "reprot")
