"""The command that looks at data before anything is trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from dmcp.commands import options as o
from dmcp.commands.printing import print_json
from dmcp.data import swapped
from dmcp.errors import DataError
from dmcp.files import plain
from dmcp.running.data_checks import DataFacts, check_data
from dmcp.running.progress import Progress
from dmcp.tables import counted

Name = Annotated[str, typer.Argument(metavar="FOLDER", help="A folder, or digits, cifar10, cifar100; as for --data.")]
Input = Annotated[str, typer.Option(help="Count what must be enlarged to this size, like 3x224x224.")]
Threads = Annotated[
    int | None, typer.Option(min=0, max=1024, help="Threads that decode files; default: the cores, up to 8.")
]
Most = Annotated[int, typer.Option(min=0, help="Lines of each list; --json has all.")]


def data(
    name: Name,
    input: Input = "",
    workers: Threads = None,
    most: Most = 20,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Look at data as the other commands read them: classes, sizes, broken files, test images that are trained on.

    Every image file is decoded. Exit code 2 if there are files that cannot be read, or classes that other commands
    refuse.

    \b
    Examples:
      dmcp data ~/photos
      dmcp data ~/photos --input 3x224x224 --workers 16
      dmcp data cifar10 --json
    """
    if not o.is_first():
        return
    with Progress(quiet) as progress:

        def tell(done: int, count: int) -> None:
            progress.count("reading", done, count, "files")

        facts = check_data(name, input=input, workers=workers, tell=tell)
    if as_json:
        print_json(_plain(name, facts))
    else:
        for line in _lines(name, facts, input, most):
            print(plain(line))
    if wrong := _mistake(name, facts):
        raise DataError(wrong)


def _mistake(name: str, facts: DataFacts) -> str:
    """What other commands would refuse, in one sentence; empty if nothing."""
    if facts.broken:
        some = f"{len(facts.broken)} of {counted(facts.train + facts.test, 'image file')}"
        skip = "" if any(it.refused for it in facts.broken) else ", or skip them with --corrupt skip"
        return f"{some} cannot be read: repair or remove them{skip}."
    if not facts.wrong_classes:
        return ""
    if not facts.empty_classes and not facts.lone_classes:
        return f"{name}: there is one class; at least two are needed."
    parts = []
    if empty := len(facts.empty_classes):
        parts.append(f"{counted(empty, 'class folder')} {'is' if empty == 1 else 'are'} empty")
    if lone := len(facts.lone_classes):
        parts.append(f"{lone} {'is' if lone == 1 else 'are'} not in both train/ and val/")
    return f"{name}: {', and '.join(parts)}: put images there, or remove them."


def _lines(name: str, facts: DataFacts, input: str, most: int) -> Iterator[str]:
    (small, few), (large, many) = facts.smallest_class, facts.largest_class
    ends = f"the smallest {small} ({counted(few, 'training image')}), the largest {large} ({many:,})"
    yield f"{name}: {facts.classes} class{'' if facts.classes == 1 else 'es'}, {ends}"
    to = " in" if facts.is_files else ":"
    yield f"{counted(facts.train, 'training image')}{to} {facts.train_from}"
    yield f"{counted(facts.test, 'test image')}{to} {facts.test_from}"
    yield from filter(None, [swapped(facts.train, facts.test, facts.is_files)])
    if facts.sizes:
        words = zip(("smallest", "median", "largest"), facts.sizes, strict=True)
        yield f"height x width: {', '.join(f'{word} {_by(found)}' for word, found in words)}"
        modes = ", ".join(f"{mode} {count:,}" for mode, count in facts.modes.items())
        yield f"colour: {modes}{'; all are read as RGB' if facts.is_files else ''}"
    if facts.enlarged is not None:
        size = input.partition("x")[2]
        yield f"smaller than {size} in height or width, and enlarged: {facts.enlarged:,}"
    if facts.empty_classes:
        yield from _list("Empty classes:", facts.empty_classes, most)
    if facts.lone_classes:
        yield from _list("Classes that are not in both train/ and val/:", facts.lone_classes, most)
    if facts.broken:
        head = f"{counted(len(facts.broken), 'file')} cannot be read:"
        yield from _list(head, (f"{it.file}: {it.reason}" for it in facts.broken), most)
    elif facts.is_files:
        yield "All files can be read."
    if both := facts.in_both:
        head = f"{counted(len(both), 'test image')} {'is' if len(both) == 1 else 'are'} among the training images"
        yield from _list(f"{head} (same bytes):", (f"{one} is {other}" for one, other in both), most)
    else:
        yield "No test image is among the training images (same bytes)."


def _list(head: str, entries: Iterable[str], most: int) -> Iterator[str]:
    every = list(entries)
    yield head
    yield from (f"  {entry}" for entry in every[:most])
    if len(every) > most:
        yield f"  and {len(every) - most:,} more: --most {len(every)} lists all"


def _plain(name: str, facts: DataFacts) -> dict[str, Any]:
    ends = {"smallest": facts.smallest_class, "largest": facts.largest_class}
    return {
        "data": name,
        "well": facts.is_well,
        "classes": {"count": facts.classes}
        | {word: {"name": found, "train_images": count} for word, (found, count) in ends.items()},
        "train": {"images": facts.train, "from": facts.train_from},
        "test": {"images": facts.test, "from": facts.test_from},
        "sizes": dict(zip(("smallest", "median", "largest"), map(list, facts.sizes), strict=False)),
        "modes": facts.modes,
        "enlarged": facts.enlarged,
        "broken": [it._asdict() for it in facts.broken],
        "in_both": [{"test": one, "train": other} for one, other in facts.in_both],
        "empty_classes": list(facts.empty_classes),
        "classes_in_one_part": list(facts.lone_classes),
    }


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
