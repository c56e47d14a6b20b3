"""A network that learns from another one: which one that is, how much it counts, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Residual
from test_cli import DRY, SHORT, SMALL, Capture, numbers, run
from test_pruning import SEARCH, TRAIN, Noise, prune, same, tensors, traced
from torch import Tensor, nn

import dmcp
from dmcp import runs, training
from dmcp.batches import generator
from dmcp.cli.config import Plan, plan_from_json
from dmcp.cli.job import _read_tensors, open_job
from dmcp.cli.prune import forecast
from dmcp.errors import TrainingError
from dmcp.losses import DistillationWarning, classification_loss, distillation_loss, top1
from dmcp.models import build
from dmcp.report.html import make_page
from dmcp.results import DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED, Row
from dmcp.retraining import TeacherWarning, train_all
from dmcp.runs import read_run
from dmcp.settings import Retrain
from dmcp.supernet import Supernet
from dmcp.training import Event, evaluate

pytestmark = pytest.mark.filterwarnings("ignore::dmcp.pruning.TeacherWarning")  # most of them know nothing here
TAUGHT = TRAIN


def other() -> nn.Module:
    """The same architecture with other weights."""
    torch.manual_seed(7)
    return Residual(**Residual.FULL)


class Mean(nn.Module):
    """Another architecture with the same classes."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.head = nn.Linear(Residual.SHAPE[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


# in Python


@pytest.mark.parametrize("kind", [Retrain.SCRATCH, Retrain.FINETUNE])
@pytest.mark.parametrize("make", [other, Mean])
def test_a_given_teacher_is_the_one_that_teaches(kind: Retrain, make: Any) -> None:
    """The same as the parts by hand; the teacher is not trained, and comes out as it was."""
    (model, graph), teacher = traced(), make()
    teacher.train()
    before, seen = tensors(teacher), list[Event]()
    result = prune(retrain=kind, teacher=teacher, runtime=dmcp.Runtime(on_event=seen.append))
    assert same(before, tensors(teacher)) and teacher.training
    assert {event.stage for event in seen} == {"search", DMCP, "test"}  # none is trained first
    net = dmcp.Supernet(model, graph, SEARCH.groups)
    dmcp.search(net, Noise(), SEARCH)
    small = dmcp.cut(net.model, graph, result.widths)
    if kind is Retrain.FINETUNE:
        dmcp.recalibrate(small, Noise())
    else:
        dmcp.reinitialize(small, generator=generator(TRAIN.seed))
    dmcp.train(small, Noise(), TAUGHT, teacher=teacher)
    assert same(tensors(small), tensors(result.model))


class Counting(Mean):
    """Writes into itself when it is asked, and has a length, which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_a_teacher_that_writes_into_itself_comes_out_as_it_was() -> None:
    torch.manual_seed(7)
    teacher = Counting()
    torch.manual_seed(7)
    one, two = (prune(teacher=it) for it in (teacher, Mean()))
    assert teacher.count == 0 and same(tensors(one.model), tensors(two.model))


def test_the_teacher_is_a_row_where_its_costs_are_known() -> None:
    model, graph = traced()
    names = lambda **how: [row.name for row in prune(**how).rows]  # noqa: E731
    assert names(teacher=model) == names(retrain="finetune", teacher=model) == [ORIGINAL, DMCP]
    assert names(teacher=model, test_given=False) == [DMCP]
    assert names(teacher=Mean()) == [DMCP]  # nobody has counted what it costs
    everyone = [ORIGINAL, TEACHER, UNPRUNED, UNIFORM, DMCP]
    assert names(retrain="finetune", teacher=other(), baselines=True) == everyone
    row = prune(teacher=other()).rows[0]
    assert (row.name, row.macs, row.accuracy) == (TEACHER, graph.macs(), evaluate(other(), Noise(1)))


def test_the_table_says_where_the_weights_come_from() -> None:
    """Else runs with a teacher and without look alike."""
    model, _ = traced()
    torch.manual_seed(7)
    recipe = replace(TRAIN, kd_weight=0.7, kd_temperature=4)
    told = "70% of its loss from {} (temperature 4), the rest from the labels"
    for how, words in (
        ({"retrain": "scratch"}, "from fresh weights"),
        ({"retrain": "finetune"}, "on from the weights of the search"),
        ({"retrain": "finetune", "teacher": model}, "on from the weights of the search, {the network as given}"),
        ({"teacher": other()}, "from fresh weights, {the teacher}"),
        (
            {"teacher": Mean()},
            "from fresh weights, {a teacher that is no row here (accuracy 16.67%)}",
        ),
        ({"teacher": "unpruned"}, "from fresh weights, {the unpruned network, which was trained first}"),
    ):
        begun, _, who = words.rstrip("}").partition("{")
        line = f"ours: trained {begun}{told.format(who) if who else ''}"
        assert line in prune(train=recipe if who else TRAIN, **how).table.splitlines()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("finetune", ""), "on from the weights of the search."),
        (("finetune", "given"), "on from the weights of the search, 50% of its loss from the network as given (temp"),
        (("teacher", "a.pth"), "from fresh weights, 50% of its loss from the teacher, a.pth (temperature 1), the"),
        (("teacher", ""), "from fresh weights, 50% of its loss from the unpruned network, which was trained first"),
    ],
)
def test_the_page_says_it_too(settings: tuple[str, str], said: str, tmp_path: Path) -> None:
    kind, teacher = settings
    job = {"model": "digits:resnet", "data": "digits"} | ({"teacher": teacher} if teacher else {})
    plain = {"command": "prune", "job": job, "retrain": kind, "train": {"kd_weight": 0.5}}
    (tmp_path / runs.SETTINGS).write_text(json.dumps(plain))
    row = {"name": DMCP, "macs": 5, "params": 5, "accuracy": 0.5}
    past = replace(read_run(tmp_path), rows=(Row(**row),))
    assert f"<p>ours: trained {said}" in make_page([past])


class Answers(Noise):
    """Noise with the answers that a network gives as its labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(3, 40)
        with torch.no_grad():
            self.batches = [(x, net.eval()(x).argmax(1)) for x, _ in self.batches]


GUESSES = "of the test data (5 classes: guessing gives 20%): was it trained, and are its classes in the same order?"


@pytest.mark.parametrize("make", [other, Mean])
def test_a_teacher_that_knows_nothing_is_noticed_before_the_search(make: Any) -> None:
    (model, graph), teacher = traced(), make()
    with torch.no_grad():
        for tensor in teacher.head.parameters():
            tensor.zero_()  # it always says the first class
    tests = Answers(other())
    tests.batches = [(x, torch.arange(40) % 5) for x, _ in tests.batches]
    how: dict[str, Any] = {"graph": graph, "search": SEARCH, "train": TRAIN, "retrain": "teacher"}

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.warns(TeacherWarning) as told, pytest.raises(KeyboardInterrupt):
        dmcp.prune(model, Noise(), tests, teacher=teacher, **how, runtime=dmcp.Runtime(on_event=stop))
    assert [str(it.message) for it in told] == [f"The teacher is right on 20.00% {GUESSES}"]


def test_a_teacher_that_is_worse_than_the_network_is_noticed() -> None:
    """A good one is not, nor is one without anything to be compared with."""
    model, graph = traced()
    how: dict[str, Any] = {"graph": graph, "search": SEARCH, "train": TRAIN}
    good, half = other(), Answers(model)
    with torch.no_grad():
        good.head.weight.zero_()  # it says one class, and the model seldom that one
        good.head.bias[:] = torch.arange(5) == half.batches[0][1].bincount(minlength=5).argmin()
    best = Answers(good)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TeacherWarning)
        result = dmcp.prune(model, Noise(), best, teacher=good, retrain="finetune", **how)
    assert [row.accuracy for row in result.rows if row.name == TEACHER] == [1.0]
    half.batches[0] = best.batches[0]  # a third of the answers are the teacher's
    score = evaluate(good, half)
    assert 0.28 < score < evaluate(model, half) - 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error", TeacherWarning)
        assert dmcp.prune(model, Noise(), half, teacher=good, **how).rows
    words = f"^The teacher has an accuracy of {100 * score:.2f}%, the network as given .*: learning from it may harm"
    with pytest.warns(TeacherWarning, match=words):
        dmcp.prune(model, Noise(), half, teacher=good, retrain="finetune", **how)
    with pytest.warns(TeacherWarning, match=r"^The teacher has a metric of 1, the network as given of 0"):
        dmcp.prune(
            model,
            Noise(),
            best,
            teacher=good,
            retrain="finetune",
            **how,
            task=dmcp.Task(metric=dmcp.LowerIsBetter(top1)),
        )


def test_controls_learn_from_a_given_teacher_as_well() -> None:
    model, graph = traced()
    wanted = {UNPRUNED: graph.full}
    alone, taught = (
        train_all(model, graph, wanted, Noise(), TRAIN, Retrain.FINETUNE, teacher=it)[UNPRUNED] for it in (None, Mean())
    )
    assert not same(tensors(alone), tensors(taught))


def test_share_and_temperature_change_what_is_learnt() -> None:
    changes: tuple[dict[str, float], ...] = ({}, {"kd_weight": 0.9}, {"kd_temperature": 4.0})
    found = [prune(train=replace(TRAIN, **it), teacher=other()) for it in changes]
    one, two, three = (tensors(it.model) for it in found)
    assert not same(one, two) and not same(one, three) and not same(two, three)


@pytest.mark.parametrize("kind", [Retrain.SCRATCH, Retrain.SLIMMABLE])
def test_a_teacher_whom_nobody_would_listen_to_is_refused(kind: Retrain) -> None:
    with pytest.raises(TrainingError, match=f'^retrain="{kind}" has no use for a teacher: take "teacher" for weights'):
        prune(retrain=kind, teacher=other(), runtime=dmcp.Runtime(on_event=pytest.fail))
    with pytest.raises(TrainingError, match=r'distillation="teacher".* take teacher="unpruned"'):
        prune(retrain=kind, train=TAUGHT, runtime=dmcp.Runtime(on_event=pytest.fail))


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.009, 101.0, 1e200, float("inf"), float("nan")])
def test_a_temperature_that_teaches_nothing_is_refused(value: float) -> None:
    """Small ones leave no gradient, large ones overflow, after the search."""
    with pytest.raises(TrainingError, match=r"^teacher_temperature must lie in \[0\.01, 100\], not "):
        replace(TRAIN, kd_temperature=value)


@pytest.mark.parametrize("value", [0.01, 100.0])
def test_all_other_temperatures_teach(value: float) -> None:
    (x, _), teacher = Noise(1).batches[0], other().eval()
    scores = torch.zeros(6, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(distillation_loss(scores, [teacher(x).detach()], value), scores)
    assert gradient.isfinite().all() and gradient.abs().max() > 1e-4


@pytest.mark.parametrize("kind", [Retrain.SCRATCH, Retrain.FINETUNE, Retrain.SLIMMABLE])
@pytest.mark.parametrize("change", [{"kd_weight": 0.9}, {"kd_temperature": 4.0}])
def test_settings_of_a_teacher_that_there_is_not_are_refused(kind: Retrain, change: dict[str, float]) -> None:
    """As on the command line: nobody would see that they change nothing."""
    (name,) = change
    words = f'^{name}={change[name]}: a network with retrain="{kind}" learns from no teacher: take teacher="unpruned"'
    with pytest.raises(TrainingError, match=words):
        prune(retrain=kind, train=replace(TRAIN, **change), runtime=dmcp.Runtime(on_event=pytest.fail))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [other, Mean])
def test_a_teacher_of_other_numbers_teaches(dtype: torch.dtype, make: Any) -> None:
    teacher = make().to(dtype)
    plain = copy.deepcopy(teacher).float()
    one, two = (prune(teacher=it) for it in (teacher, plain))
    assert same(tensors(one.model), tensors(two.model)) and teacher.head.weight.dtype == dtype
    assert [row.accuracy for row in one.rows] == [row.accuracy for row in two.rows]


def test_a_teacher_that_makes_its_own_numbers_is_asked_as_it_is() -> None:
    class Half(Mean):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double()).float()

    assert prune(teacher=Half().double()).rows


def test_settings_may_say_themselves_that_there_is_a_teacher() -> None:
    one, two = (prune(teacher="unpruned", train=it) for it in (TRAIN, TAUGHT))
    assert same(tensors(one.model), tensors(two.model))


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (Mean(7), r"^The teacher gives \[\(2, 7\)\] .* the network in training \[\(2, 5\)\].* the same classes"),
        (nn.Sequential(nn.Linear(3, 5)), "^The teacher cannot take the network's inputs: RuntimeError: "),
        ("resnet18", r"^teacher must be a trained torch.nn.Module, not a str\.$"),
        (Mean, r"^teacher must be a trained torch.nn.Module, not the class Mean: build it and load its weights\.$"),
        (torch.jit.ScriptModule(), "^teacher is a TorchScript module, .* the Python"),
        (lambda: None, "^teacher must be a trained torch.nn.Module, not a function"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_the_search(teacher: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        prune(teacher=teacher, runtime=dmcp.Runtime(on_event=pytest.fail))


def test_a_teacher_that_is_broken_is_refused() -> None:
    broken = other()
    broken.head.bias.data[0] = float("nan")
    with pytest.raises(TrainingError, match=r"^The teacher's head\.bias holds numbers that are NaN"):
        prune(retrain="finetune", teacher=broken, runtime=dmcp.Runtime(on_event=pytest.fail))


@pytest.mark.filterwarnings("ignore::dmcp.losses.DistillationWarning")
def test_a_network_with_more_outputs_in_training_than_its_teacher_is_refused_before_the_search() -> None:
    class Aux(Residual):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return (found, found) if self.training else found

    def loss(output: Any, batch: Any) -> Tensor:
        return classification_loss()(output[0] if isinstance(output, tuple) else output, batch)

    how: dict[str, Any] = {"search": SEARCH, "train": TRAIN, "loss": loss, "on_event": pytest.fail}
    with pytest.raises(TrainingError, match=r"^The unpruned network as a teacher gives \[\(2, 5\)\]"):
        dmcp.prune(Aux(**Residual.FULL), Noise(), Noise(1), teacher="unpruned", **how)


def test_a_loss_of_ones_own_is_told_that_a_teacher_is_imitated() -> None:
    how: dict[str, Any] = {"search": replace(SEARCH, distill=False), "loss": classification_loss()}
    with pytest.warns(DistillationWarning, match="With a teacher .* class scores .* leave the teacher out"):
        prune(retrain="finetune", teacher=other(), **how)


def test_a_job_goes_on_with_the_same_teacher_only(tmp_path: Path) -> None:
    calls = itertools.count()

    def stopping(name: str) -> dmcp.Checkpointer:
        return dmcp.Checkpointer(
            tmp_path / name, every_steps=1, stop_requested=lambda: name == DMCP and next(calls) > 0
        )

    def going(name: str) -> dmcp.Checkpointer:
        return dmcp.Checkpointer(tmp_path / name)

    how: dict[str, Any] = {"train": replace(TRAIN, epochs=3)}
    with pytest.raises(dmcp.StoppedError):
        prune(teacher=other(), keep=stopping, **how)
    for wrong in (None, traced()[0]):
        with pytest.raises(dmcp.FileError, match="the digest of the teacher's weights was"):
            prune(teacher=wrong, keep=going, **how)
    again, whole = prune(teacher=other(), keep=going, **how), prune(teacher=other(), **how)
    assert same(tensors(again.model), tensors(whole.model))


# how long it takes


def test_the_forecast_knows_a_given_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("dmcp.cli.prune._now", lambda model: float(next(ticks)))  # each step takes 1 s
    model, graph = traced()

    def stages(kind: Retrain, baselines: bool, taught: bool) -> dict[str, float]:
        net = Supernet(model, graph, 4)
        found = forecast(net, Noise(3), replace(SEARCH, groups=4), TRAIN, kind, baselines, taught)
        return {stage.name: stage.seconds / stage.steps for stage in found[2:]}

    assert stages(Retrain.SCRATCH, False, False) == {UNPRUNED: 1, DMCP: pytest.approx(4 / 3)}
    assert stages(Retrain.SCRATCH, False, True) == {DMCP: pytest.approx(4 / 3)}
    assert stages(Retrain.FINETUNE, True, True) == dict.fromkeys([UNPRUNED, UNIFORM, DMCP], pytest.approx(4 / 3))
    assert stages(Retrain.FINETUNE, False, False) == {DMCP: 1}


# on the command line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a trained network, of another one, and of one for three classes."""
    folder = tmp_path_factory.mktemp("weights")
    for number, name in enumerate(("net", "other")):
        torch.manual_seed(number)
        torch.save(build("digits:resnet").state_dict(), folder / f"{name}.pth")
    torch.save(build("digits:resnet", num_classes=3).state_dict(), folder / "three.pth")
    return folder


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    return files


def plan_of(capsys: Capture, *words: str) -> Plan:
    plans: list[Plan] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmcp.cli.prune._forecast", lambda plan, as_json: plans.append(plan))
        code, _, err = run(capsys, "prune", *SMALL, "--dry-run", *words)
    assert (code, err) == (0, "")
    return plans[0]


def test_options_say_how_much_a_teacher_counts(here: Path, capsys: Capture) -> None:
    usual = plan_of(capsys, "--retrain", "teacher").train
    assert usual is not None and (usual.kd_weight, usual.kd_temperature) == (0.5, 1.0)
    words = ("--kd-weight", "0.9", "--kd-temperature", "4")
    for more in (("--retrain", "teacher"), ("--teacher", "net.pth"), ("--weights", "net.pth", "--teacher", "given")):
        plan = plan_of(capsys, *more, *words)
        assert plan.train is not None
        assert (plan.train.kd_weight, plan.train.kd_temperature) == (0.9, 4.0)
        assert plan_from_json(json.loads(json.dumps(plan.to_json())), "here") == plan
    recipe = plan_of(capsys, "--recipe", "imagenet_resnet18_1040m", "--retrain", "teacher", *words).train
    assert recipe is not None and (recipe.kd_weight, recipe.kd_temperature) == (0.9, 4.0)


def test_a_teacher_decides_how_the_network_gets_its_weights(here: Path, capsys: Capture) -> None:
    weights = ("--weights", "net.pth")
    assert plan_of(capsys, "--teacher", "net.pth").retrain is Retrain.SCRATCH
    assert plan_of(capsys, *weights, "--teacher", "given").retrain is Retrain.FINETUNE
    assert plan_of(capsys, *weights, "--teacher", "given", "--retrain", "teacher").retrain is Retrain.SCRATCH


USELESS = "learns from no teacher: add --retrain teacher, which trains one, or name one with --teacher."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("prune --kd-weight 0.9", f"--kd-weight: a network with --retrain scratch {USELESS}"),
        ("prune --kd-temperature 4", f"--kd-temperature: a network with --retrain scratch {USELESS}"),
        ("prune --weights net.pth --kd-weight 0.9", f"--kd-weight: a network with --retrain inherit {USELESS}"),
        ("train --kd-weight 0.9", f"--kd-weight: a network with --retrain scratch {USELESS}"),
        (
            "train --retrain teacher --kd-weight 0.9",
            "--kd-weight: the unpruned network is its own teacher: add --widths, or name one with --teacher.",
        ),
        (
            "prune --retrain slimmable --teacher net.pth",
            "--teacher: --retrain slimmable has no use for it: take --retrain teacher for weights that are drawn anew, "
            "or inherit for those of the search.",
        ),
        (
            "prune --teacher given",
            "--teacher given: that is the network of --weights, and there is none: add --weights FILE, or name a file "
            "of the teacher's weights.",
        ),
        (
            "prune --weights three.pth --teacher given",
            "--teacher given: its last layer starts fresh, since --weights are for other classes: train it first, or "
            "name a file of the teacher's weights.",
        ),
        (
            "prune --teacher three.pth",
            "three.pth: fc.weight is 3x64, but the network has 10x64: these are the weights of another network, or of "
            "one for another number of classes.",
        ),
        (
            "prune --retrain teacher --teacher-model cifar:resnet20",
            "--teacher-model: it must be trained already: add --teacher FILE, the file of its weights.",
        ),
        (
            "prune --teacher net.pth --teacher-model-args width=8",
            "--teacher-model-args: they are for the builder of another network: name it with --teacher-model.",
        ),
        (
            "train --teacher net.pth --teacher-model digits:resnet --teacher-model-args wide",
            "--teacher-model-args: 'wide' is not of the form name=value, like width_mult=1.5.",
        ),
        ("prune --teacher nowhere.pth", "nowhere.pth: cannot be read: No such file or directory."),
        ("prune --teacher oter.pht", "oter.pht: cannot be read: No such file or directory. Did you mean other.pth?"),
        ("prune --weights NET.pth", "NET.pth: cannot be read: No such file or directory. Did you mean net.pth?"),
        (
            "prune --weights net.pth --teacher Given",
            "Given: cannot be read: No such file or directory. Did you mean given?",
        ),
        (
            "prune --weights a/net.pth",
            "a/net.pth: cannot be read: No such file or directory.",
        ),
        (
            "prune --retrain teacher --kd-weight 1.5",
            "Training: teacher_share must lie in [0, 1], not 1.5.",
        ),
        (
            "prune --retrain teacher --kd-temperature 0",
            "Training: teacher_temperature must lie in [0.01, 100], not 0.0.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, said: str, here: Path, capsys: Capture) -> None:
    command, *rest = words.split()
    code, out, err = run(capsys, command, *SMALL, *rest)
    assert (code, out, err) == (2, "", f"dmcp: {said}\n")
    assert not (here / "runs").exists()


def test_a_broken_teacher_is_refused_before_anything_is_written(here: Path, tmp_path: Path, capsys: Capture) -> None:
    state = torch.load("net.pth", weights_only=True)
    state["fc.bias"][3] = float("nan")
    torch.save(state, tmp_path / "bad.pth")
    code, _, err = run(capsys, "train", *SMALL, "--teacher", str(tmp_path / "bad.pth"), "--out", str(tmp_path / "run"))
    assert code == 2 and "The teacher's fc.bias holds numbers that are NaN" in err and not (tmp_path / "run").exists()


def test_a_command_trains_with_a_given_teacher(
    here: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And needs it no more when all is trained."""
    teachers: list[nn.Module] = []
    train = training.train

    def noting(*args: Any, **how: Any) -> Any:
        teachers.append(args[4])
        return train(*args, **how)

    monkeypatch.setattr(training, "train", noting)
    shutil.copy("other.pth", tmp_path / "mine.pth")
    words = (*SMALL, "--epochs", "1", "--json", "--teacher", str(tmp_path / "mine.pth"))
    for more, names in (((), [TEACHER, UNPRUNED]), (("--weights", "net.pth"), [ORIGINAL, TEACHER, UNPRUNED])):
        folder = tmp_path / str(len(names))
        code, out, err = run(capsys, "train", *words, *more, "--out", str(folder))
        assert (code, err) == (0, "") and [row["name"] for row in numbers(out)] == names
        past = read_run(folder)
        assert past.result is not None and past.result.name == UNPRUNED
        assert "| teacher |" in (folder / "report.md").read_text()
    wanted = torch.load("other.pth", weights_only=True)
    assert len(teachers) == 2
    assert all(torch.equal(it, wanted[name]) for net in teachers for name, it in net.state_dict().items())
    (tmp_path / "mine.pth").unlink()
    assert run(capsys, "evaluate", str(tmp_path / "3"))[0] == 0


def test_a_teacher_may_be_another_network(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    net = "nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))"
    (tmp_path / "large_net.py").write_text(f"from torch import nn\n\ndef build():\n    return {net}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(build("large_net:build").state_dict(), "large.pth")
    words = ("train", *SMALL, "--epochs", "1", "--teacher", "large.pth")
    code, out, err = run(capsys, *words, "--teacher-model", "large_net:build", "--out", "run")
    assert code == 0 and "of its loss from a teacher that is no row here (accuracy " in out, err
    code, _, err = run(capsys, *words, "--teacher-model", "cifar:resnet20")
    assert code == 2 and "dmcp: --teacher-model cifar:resnet20: The network cannot take images of 1x8x8" in err
    code, _, err = run(capsys, *words)
    assert code == 2 and "large.pth: " in err  # weights of another network


def test_the_network_of_a_teacher_may_have_arguments(tmp_path: Path, capsys: Capture) -> None:
    torch.save(build("digits:resnet", width=24).state_dict(), tmp_path / "wide.pth")
    asked = ("--teacher", str(tmp_path / "wide.pth"), "--teacher-model", "digits:resnet")
    plan = plan_of(capsys, *asked, "--teacher-model-args", "width=24")
    assert plan.job.teacher_model_args == ("width=24",) and plan.job.model_args == ()
    assert plan_from_json(json.loads(json.dumps(plan.to_json())), "here") == plan
    teacher = open_job(plan.job).teacher
    assert teacher is not None and teacher.get_submodule("conv1").weight.shape[0] == 24
    assert run(capsys, "train", *SMALL, *asked)[0] == 2  # the weights are of a wider one


def test_the_table_of_a_training_says_who_taught(here: Path, tmp_path: Path, capsys: Capture) -> None:
    train = ("train", *SMALL, "--epochs", "1", "--quiet")
    widths = json.dumps(dmcp.trace(build("digits:resnet"), torch.zeros(2, 1, 8, 8)).full.to_json())
    (tmp_path / "widths.json").write_text(widths)
    share, kept = "50% of its loss from", ("--weights", "net.pth")
    for number, (more, told) in enumerate(
        (
            (("--teacher", "other.pth"), f"unpruned: trained from fresh weights, {share} the teacher (temp"),
            ((*kept, "--teacher", "given"), f"unpruned: trained on from the given weights, {share} the network as giv"),
            (("--retrain", "teacher", "--widths", str(tmp_path / "widths.json")), f"weights, {share} the unpruned net"),
            (kept, ""),
            (("--retrain", "teacher"), ""),  # nobody taught
        )
    ):
        code, out, _ = run(capsys, *train, *more, "--out", str(tmp_path / str(number)))
        report = (tmp_path / str(number) / "report.md").read_text()
        assert code == 0 and told in out and told in report
        assert told or "of its loss" not in out + report


def test_the_command_says_that_a_teacher_knows_nothing(here: Path, tmp_path: Path, capsys: Capture) -> None:
    words = (*SMALL, "--epochs", "1", "--quiet", "--teacher", "other.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("always", TeacherWarning)
        code, _, err = run(capsys, "train", *words, "--out", str(tmp_path / "run"))
    assert code == 0 and err.startswith("The teacher is right on ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--teacher", "other.pth"), "teacher: other.pth; what it takes to ask it is in these times"),
        pytest.param(
            ("--weights", "net.pth", "--teacher", "given"),
            "teacher: the network as given; what it takes to ask it is",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--retrain", "teacher"),
            "teacher: the unpruned network, which was trained first; what it takes to ask it",
            marks=pytest.mark.slow,
        ),
        pytest.param((), "", marks=pytest.mark.slow),
    ],
)
def test_a_forecast_names_the_teacher(more: tuple[str, ...], told: str, here: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "prune", *DRY, *more)
    assert code == 0 and told in out and (told or "teacher" not in out)


@pytest.mark.parametrize(
    ("words", "itself"), [(("--teacher", "other.pth"), False), (("--weights", "net.pth", "--teacher", "given"), True)]
)
def test_the_command_gives_prune_its_teacher(
    words: tuple[str, ...], itself: bool, here: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[nn.Module, nn.Module]] = []

    def noting(model: nn.Module, *_: Any, teacher: nn.Module, **__: Any) -> None:
        seen.append((model, teacher))
        raise TrainingError("enough")

    monkeypatch.setattr("dmcp.cli.prune.pruning.prune", noting)
    assert run(capsys, "prune", *SMALL, *words, "--out", str(tmp_path / "run"))[0] == 2
    ((model, teacher),) = seen
    wanted = torch.load("net.pth" if itself else "other.pth", weights_only=True)
    assert (teacher is model) is itself and same(tensors(teacher), [*wanted.values()])


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_teacher_only(
    here: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy("net.pth", tmp_path / "mine.pth")
    monkeypatch.chdir(tmp_path)
    words = ("prune", *SHORT, "--save-steps", "1", "--teacher", "mine.pth", "--kd-weight", "0.9")
    assert run(capsys, *words, "--out", "unprunable")[0] == 0
    assert [row.name for row in read_run(tmp_path / "unprunable").rows] == [TEACHER, DMCP]
    log = runs.Run.on_event

    def log_and_die(it: runs.Run, event: Event) -> None:
        log(it, event)
        if event.stage == DMCP:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Run, "on_event", log_and_die)
        assert run(capsys, *words, "--out", "half")[0] == 130
    for wrong in (("--teacher", "given"), ("--kd-weight", "0.5")):
        code, _, err = run(capsys, "prune", "--resume", "half", *wrong)
        assert code == 2 and f"leave these out: {wrong[0]} was" in err
    mine, moved = tmp_path / "mine.pth", tmp_path / "moved.pth"
    mine.rename(moved)
    code, _, err = run(capsys, "prune", "--resume", "half")
    assert code == 2 and "there is no file 'mine.pth' here" in err
    shutil.copy(here / "other.pth", mine)
    code, _, err = run(capsys, "prune", "--resume", "half")
    assert code == 2 and "half: the teacher is not what it was: teacher was" in err
    moved.replace(mine)
    assert run(capsys, "prune", "--resume", "half", "--quiet", "--kd-weight", "0.9")[0] == 0
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("unprunable", "half")]
    assert ends[0] == ends[1]


def test_help_names_the_options_of_a_teacher(capsys: Capture) -> None:
    for command in ("prune", "train"):
        told = run(capsys, command, "--help")[1]
        names = ("--teacher ", "--teacher-model ", "--teacher-model-args", "--kd-weight", "--kd-temperature")
        assert all(name in told for name in names)


def test_the_given_network_is_never_changed() -> None:
    model = copy.deepcopy(traced()[0])
    before = tensors(model)
    dmcp.prune(model, Noise(), Noise(1), search=SEARCH, train=TRAIN, teacher=model)
    assert same(before, tensors(model)) and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_of_wrapped_networks_are_read(wrapper: str, tmp_path: Path) -> None:
    """As DDP, torch.compile and both together name them."""
    net = other().state_dict()
    torch.save({wrapper + name: value for name, value in net.items()}, tmp_path / "a.pth")
    assert list(_read_tensors(tmp_path / "a.pth")) == list(net)
