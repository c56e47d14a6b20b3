"""Image files that folders or a table list: their labels, how they are split, and which files are broken."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dmcp.data.images import ENDINGS, Broken, Size, inspect_files
from dmcp.errors import DataError
from dmcp.runtime.batches import generator

PARTS = ("train", "val")
_SAMPLED = 99  # files whose sizes `some_sizes` tells


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Image files and their labels."""

    paths: tuple[str, ...]
    labels: Tensor  # (N,) int64
    classes: int
    size: Size  # height and width that the model gets
    names: tuple[str, ...] = ()  # of the classes, in the order of their numbers
    root: str = ""  # folder that `train/` and `val/` are in
    whole: tuple[str, ...] = ()  # all paths of the part that these are taken from; empty: these are all
    channels: int = 3  # or 1: grey
    part: str = ""  # what these files are of the data set: "train", "val"

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image as the model gets it: channels, height, width."""
        return self.channels, *self.size

    def subset(self, indices: Tensor) -> FolderSet:
        """Take the files at these indices."""
        return replace(
            self,
            paths=tuple(self.paths[index] for index in indices.tolist()),
            labels=self.labels[indices],
            whole=self.whole or self.paths,
        )


def list_part(root: Path, part: str, size: Size) -> FolderSet:
    """List the files of `train/` or `val/` in the order of torchvision, but without hidden ones.

    Without a part the folder itself has the classes.
    """
    folder = root / part
    paths: list[str] = []
    labels: list[int] = []
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
        names = tuple(sorted(entry.name for entry in entries))
        if not names:
            raise FileNotFoundError(f"no class folders in {folder}")
        for label, name in enumerate(names):
            images = [path for path in _files_in(folder / name) if _is_image(path)]
            paths += images
            labels += [label] * len(images)
    except OSError as error:
        needs = "needs one folder of images per class, alone or in train/ and val/, or train-*.npz and test-*.npz"
        raise DataError(f"{root} {needs} ({str(error).splitlines()[0]}).") from error
    numbers = torch.tensor(labels, dtype=torch.int64)
    return FolderSet(tuple(paths), numbers, len(names), size, names, str(root), part=part)


def _files_in(top: Path) -> list[str]:
    """The files in a folder and all below it, sorted, following links; without hidden ones such as ._1.png of macOS."""
    found: list[tuple[str, list[str]]] = []
    for root, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            link = os.path.join(root, name)
            if os.path.islink(link):
                _refuse_loop(link, Path(root))
        found.append((root, [name for name in files if not name.startswith(".")]))
    return [os.path.join(root, name) for root, names in sorted(found) for name in sorted(names)]


def _is_image(path: str) -> bool:
    return path.lower().endswith(ENDINGS)


def _refuse_loop(link: str, folder: Path) -> None:
    """Refuse a link, in this folder, to a folder that it is itself in."""
    target = os.path.realpath(link)
    for parent in (folder, *folder.parents):
        if Path(os.path.realpath(parent)).is_relative_to(target):
            raise DataError(f"{link} links to a folder that contains it. Remove this link.")


# one set of files that becomes two

_TEST_SHARE = 0.2
_SPLIT_SEED = 0  # the same for all runs: their results are of the same test images
SPLIT = f"split at random with the fixed seed {_SPLIT_SEED}: {_TEST_SHARE:.0%} of each class for the test"


def split_files(files: FolderSet) -> tuple[FolderSet, FolderSet]:
    """Split files into those for training and for the test: of each class the same share, at least one for each.

    The split is a function of the names of the files, whatever their order was.
    """
    order = torch.randperm(len(files), generator=generator(_SPLIT_SEED))
    ranks = sorted(range(len(files)), key=lambda index: files.paths[index])
    shuffled = torch.tensor(ranks, dtype=torch.int64)[order]
    is_test = torch.zeros(len(files), dtype=torch.bool)
    for label in range(files.classes):
        of_label = shuffled[files.labels[shuffled] == label]
        count = max(1, round(_TEST_SHARE * len(of_label)))
        if len(of_label) > 1:  # a single image is for training
            is_test[of_label[:count]] = True
    return _subset_as(files, ~is_test, "train"), _subset_as(files, is_test, "val")


def _subset_as(files: FolderSet, chosen: Tensor, part: str) -> FolderSet:
    """Take some of the files as a part of its own."""
    name = f"{files.part} {part}".strip()
    return replace(files.subset(chosen.nonzero().flatten()), whole=(), part=name)


# what is wrong with them


def wrong_classes(train: FolderSet, test: FolderSet) -> list[str]:
    """Return the folders of classes in train/ and val/ that hold no images or do not exist.

    In a folder of classes alone, these are the ones with fewer than two images, since both parts need one.
    """
    names = {*train.names, *test.names}
    folders: list[str] = []
    for part, files in zip(PARTS, (train, test), strict=True):
        with_images = {files.names[label] for label in set(files.labels.tolist())}
        folders += [str(top / name) for top in _tops(files, part) for name in sorted(names - with_images)]
    return folders


def other_files(train: FolderSet, test: FolderSet) -> list[str]:
    """Return the files in the folders of classes that are left out, since their names do not end as images do."""
    tops = dict.fromkeys(top for part, files in zip(PARTS, (train, test), strict=True) for top in _tops(files, part))
    return [path for top in tops for path in _files_in(top) if not _is_image(path)]


def _tops(files: FolderSet, part: str) -> list[Path]:
    """The folder in which the folders of the classes are; none if a table lists the files."""
    if files.part != part:
        return []
    top = Path(files.root, part)
    return [top if top.is_dir() else Path(files.root)]


def some_sizes(dataset: FolderSet) -> list[Size]:
    """Return the heights and widths of a few files, sorted; broken ones are left out, and reported elsewhere."""
    every = -(-len(dataset) // _SAMPLED)
    sizes = inspect_files(dataset.paths[::every], whole=False)
    return sorted(size for size in sizes if not isinstance(size, Broken))


def no_images(dataset: FolderSet) -> list[Broken]:
    """Return the files that do not begin as images do, such as empty ones. Files that are cut off are not noticed."""
    return [file for file in inspect_files(dataset.paths, whole=False) if isinstance(file, Broken)]
