"""recipes: they are the rows and the settings of the paper, they can be searched, and their hours are right."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from dmcp.budget import check_reachable, parse
from dmcp.cli import config
from dmcp.cli.config import Recipe, find, hours, hours_table, loader_rate, main, names
from dmcp.cli.job import build, shape, trace_job
from dmcp.errors import DmcpError
from dmcp.settings import Retrain
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import learning_rate

PAGE = (Path(__file__).parents[1] / "docs" / "imagenet.md").read_text()

# Table 6 of the paper, its DMCP rows in order: network, FLOPs, top-1, and * for slimmable training.
TABLE_6 = """
MBV2   300M   73.5
MBV2   211M   72.2
MBV2   97M    67.0
MBV2   87M    66.1
MBV2   59M    62.7
MBV2   43M    59.1
MBV2   300M   74.6 *
MBV2   211M   73.5 *
Res18  1.04G  69.2
Res50  2.8G   76.7
Res50  2.2G   76.2
Res50  1.1G   74.4
Res50  278M   66.4
"""
ROWS = [line.split() for line in TABLE_6.strip().splitlines()]
MODELS = {"MBV2": "mobilenet_v2", "Res18": "resnet18", "Res50": "resnet50"}
UNITS = {"M": 10**6, "G": 10**9}
TIMES = {"batch": 256, "plain_ms": 100.0, "stage1_ms": 400.0, "search_ms": 500.0}


def macs(text: str) -> int:
    """211M as a count."""
    return round(float(text[:-1]) * UNITS[text[-1]])


def row_name(row: list[str]) -> str:
    """What the recipe of a row must be called: millions of MACs, so that it is a name in Python."""
    return f"imagenet_{MODELS[row[0]]}_{macs(row[1]) // 10**6}m" + "_slimmable" * (row[-1] == "*")


@functools.cache
def traced(model: str) -> tuple[Supernet, ChannelGraph]:
    """The network that the recipes of this model start from, and its graph, without data."""
    recipe = next(recipe for recipe in map(find, names()) if recipe.job.model == model)
    net = build(recipe.job, 1000)
    graph = trace_job(recipe.job, net, shape(recipe.job.input))
    return Supernet(net, graph, recipe.search.groups, recipe.search.align), graph


def test_names_are_the_rows_of_table_6() -> None:
    assert names() == [row_name(row) for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_recipe_is_its_row(row: list[str]) -> None:
    recipe = find(row_name(row))
    assert recipe == getattr(config, recipe.name)()
    assert (recipe.job.model, recipe.paper_macs, recipe.paper_top1) == (MODELS[row[0]], row[1], float(row[2]))
    assert recipe.retrain is (Retrain.SLIMMABLE if row[-1] == "*" else Retrain.SCRATCH)
    assert recipe.job.data == ""


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_recipe_has_the_settings_of_section_4_1(row: list[str]) -> None:
    recipe, mobile = find(row_name(row)), row[0] == "MBV2"
    search, train = recipe.search, recipe.train
    assert (recipe.job.batch, recipe.train_batch) == (1024, 2048)
    assert recipe.job.model_args == (("width_mult=1.5",) if mobile else ())
    assert (search.groups, train.epochs) == ((15, 250) if mobile else (10, 100))
    assert search.weight_decay == train.weight_decay == (4e-5 if mobile else 1e-4)
    assert (search.epochs, search.warmup_epochs) == (40, 20)
    assert (search.lr, search.min_lr, search.reference_batch) == (0.2, 0.02, recipe.job.batch)  # so never scaled
    assert (search.budget_weight, search.tolerance) == (0.1, 0.95)
    steps = train.epochs * 625
    rates = [learning_rate(step, steps, recipe.train_batch, train) for step in (0, 625, steps)]
    assert rates == pytest.approx([0.2, 0.8, 0.0])


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_the_budget_is_the_papers_and_can_be_reached(row: list[str]) -> None:
    recipe = find(row_name(row))
    net, graph = traced(recipe.job.model)
    budget = parse(recipe.search.budget, graph)
    assert [(limit.kind, limit.target) for limit in budget.limits] == [("macs", macs(row[1]))]
    check_reachable(budget, graph, net.min_widths)
    assert graph.macs(net.min_widths) < macs(row[1]) < graph.macs()


@pytest.mark.parametrize(("model", "printed"), [("mobilenet_v2", 672e6), ("resnet18", 1.8e9), ("resnet50", 4.1e9)])
def test_the_unpruned_network_is_the_papers(model: str, printed: float) -> None:
    net, graph = traced(model)
    assert graph.macs() == pytest.approx(printed, rel=0.015)  # its appendix A.1, and table 6
    assert net.sizes.shape[1] == (15 if model == "mobilenet_v2" else 10)


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(DmcpError, match="nearest is imagenet_mobilenet_v2_211m;"):
        find("mobilenet_v2_211m")
    with pytest.raises(DmcpError, match="There is no recipe ''"):
        find("")


def test_a_recipe_is_changed_by_replace_only() -> None:
    recipe = find("imagenet_resnet18_1040m")
    with pytest.raises(FrozenInstanceError):
        recipe.train_batch = 256  # type: ignore[misc]
    short = replace(recipe, search=replace(recipe.search, epochs=2))
    assert (short.search.epochs, find(recipe.name).search.epochs) == (2, 40)


# hours


def counted_hours(recipe: Recipe, gpus: int, images: int, retrain_ms: float) -> float:
    """Every step of one GPU, one after the other."""
    steps = images // gpus // 256
    epochs = [400.0] * 20 + [500.0] * 20 + [retrain_ms] * recipe.train.epochs
    return math.fsum(ms for ms in epochs for _ in range(steps)) / 1000 / 3600


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(
    ("name", "retrain_ms"),
    [
        ("imagenet_resnet50_1100m", 100.0),
        ("imagenet_mobilenet_v2_211m", 100.0),
        ("imagenet_mobilenet_v2_211m_slimmable", 200.0),  # two of the four networks of a weight step
    ],
)
def test_hours_are_those_of_all_steps(name: str, retrain_ms: float, gpus: int) -> None:
    images = 256 * 8 * 5
    assert hours(find(name), TIMES, gpus, images) == pytest.approx(counted_hours(find(name), gpus, images, retrain_ms))


def test_hours_of_imagenet_by_hand() -> None:
    # 5004.56 batches of 256; 20 epochs of 0.4 s, 20 of 0.5 s, 100 of 0.1 s: 28 s for each batch of an epoch
    assert hours(find("imagenet_resnet50_1100m"), TIMES, gpus=8) == pytest.approx(5004.56 * 28 / 8 / 3600, rel=1e-5)


def test_a_slow_loader_makes_the_hours() -> None:
    recipe = find("imagenet_resnet18_1040m")
    needed = loader_rate(recipe, TIMES, gpus=8)
    assert needed == pytest.approx(8 * 256 / 0.1)  # the fastest steps are those of the retraining
    assert hours(recipe, TIMES, 8, loader=needed) == hours(recipe, TIMES, 8)
    assert hours(recipe, TIMES, 8, loader=0.9 * needed) > hours(recipe, TIMES, 8)
    assert hours(recipe, TIMES, 8, images=3600, loader=1.0) == pytest.approx(140)  # an hour for each epoch
    for wrong in ({"gpus": 0}, {"gpus": 8, "loader": 0.0}, {"gpus": 8, "loader": math.nan}):
        with pytest.raises(DmcpError, match="at least one GPU"):
            hours(recipe, TIMES, **wrong)  # type: ignore[arg-type]


def benches() -> list[dict[str, object]]:
    """What benchmarks/bench.py writes of the three networks, each slower than the one before."""
    nets: list[tuple[str, list[str]]] = [("resnet18", []), ("mobilenet_v2", ["width_mult=1.5"]), ("resnet50", [])]
    return [
        {"model": model, "model_args": args, "batch": 256, "plain_ms": k, "stage1_ms": 4 * k, "search_ms": 5 * k}
        for k, (model, args) in enumerate(nets, start=1)
    ]


def test_the_table_of_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{bench['model']}.json" for bench in benches()]
    for file, bench in zip(files, benches(), strict=True):
        file.write_text(json.dumps(bench))
    main(["hours", *map(str, files), "--gpus", "2"])
    printed = capsys.readouterr().out.strip()
    assert printed == hours_table(benches(), 2)
    cells = {row[1].strip(" `"): row[2:-1] for row in (line.split("|") for line in printed.splitlines()[2:])}
    assert list(cells) == names()
    for name, row in cells.items():
        bench = next(bench for bench in benches() if bench["model"] == find(name).job.model)
        *parts, whole, rate = (float(cell.replace(",", "")) for cell in row)
        k = float(str(bench["plain_ms"]))
        assert sum(parts) == pytest.approx(whole, abs=0.2)
        epochs = find(name).train.epochs * (2 if name.endswith("slimmable") else 1)
        assert whole == pytest.approx((20 * 4 + 20 * 5 + epochs) * k * 1281167 / 256 / 2 / 3.6e6, abs=0.051)
        assert rate == pytest.approx(2 * 256_000 / k / (2 if name.endswith("slimmable") else 1), abs=1)


def test_wrong_step_times_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = [bench | {"model_args": []} for bench in benches()]
    with pytest.raises(DmcpError, match=r"No step times of mobilenet_v2 width_mult=1\.5"):
        hours_table(narrow, 8)
    whole = [bench | {"model": str(bench["model"]).replace("_v2", "_v2 width_mult=1.5")} for bench in narrow]
    assert hours_table(whole, 8) == hours_table(benches(), 8)
    for wrong in (None, 0, -1.0, "3", math.nan, math.inf):
        with pytest.raises(DmcpError, match="must have a search_ms above 0"):
            hours_table([bench | {"search_ms": wrong} for bench in benches()], 8)
    with pytest.raises(SystemExit):
        main(["hours", str(tmp_path / "missing.json")])
    assert "missing.json: cannot be read" in capsys.readouterr().err


# the page


def test_every_recipe_on_the_page_exists_and_none_is_missing() -> None:
    assert set(re.findall(r"\bimagenet_(?:mobilenet|resnet)\w*", PAGE)) == set(names())
    assert all(find(name).name == name for name in re.findall(r"--recipe (\w+)", PAGE))


def test_the_pages_table_is_table_6() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| ([\d.]+[MG]) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert [(name, printed, float(top1)) for name, _, printed, top1 in rows] == [
        (row_name(row), row[1], float(row[2])) for row in ROWS
    ]


def test_the_pages_code_runs() -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    left: dict[str, Recipe] = {}
    exec(compile(source, "docs/imagenet.md", "exec"), left)  # type: ignore[arg-type]
    assert (left["aligned"].search.align, left["recipe"].search.align) == (8, 1)


def test_the_pages_files_and_place_for_hours_are_there() -> None:
    assert PAGE.count("\n<!-- hours -->\n") == 1
    assert all((Path(__file__).parents[1] / "docs" / link).is_file() for link in re.findall(r"\]\(([^)]+)\)", PAGE))
