"""Unpack the parts that pack.py made: python3 unpack.py PART.zip ... --root FOLDER. Needs NumPy and Pillow only.

A set of data is a folder once all of its pieces have come; until then it has another name, so that nothing trains on a
half of it. Parts may come in several calls, in any order, and again.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

STATE = "unpacked.json"  # what has come, by set


def read_images(piece: bytes) -> dict[str, np.ndarray]:
    """Images and labels of a piece, as shards have them. (N, H, W, 3), (N,)"""
    arrays = np.load(io.BytesIO(piece))
    ends = arrays["sizes"].cumsum()
    data = arrays["data"].tobytes()
    blobs = [data[end - size : end] for end, size in zip(ends, arrays["sizes"], strict=True)]
    pictures = [np.asarray(Image.open(io.BytesIO(blob)).convert("RGB")) for blob in blobs]
    if side := int(arrays["side"]):
        images = np.concatenate([picture.reshape(-1, side, picture.shape[1], 3) for picture in pictures])
    else:
        images = np.stack(pictures)
    return {"images": images, "labels": arrays["labels"]}


def write_piece(archive: Path, member: str, root: Path) -> None:
    """Write the file that a member of an archive stands for."""
    with zipfile.ZipFile(archive) as opened:
        data = opened.read(member)
    path = root / member
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".stacks" | ".files":
            np.savez(path.with_suffix(""), **read_images(data))
        case ".webp":
            Image.open(io.BytesIO(data)).save(path.with_suffix(""), compress_level=1)
        case _:
            path.write_bytes(data)


def unpack(archives: list[Path], root: Path) -> dict[str, bool]:
    """Write all files; whether each set is complete, by its name."""
    root.mkdir(parents=True, exist_ok=True)
    state_file = root / STATE
    state = json.loads(state_file.read_text()) if state_file.exists() else {}
    waiting = root / "incomplete"
    with ThreadPoolExecutor(16) as pool:  # Pillow decodes without Python's lock
        done = []
        for archive in archives:
            with zipfile.ZipFile(archive) as opened:
                sets = json.loads(opened.read("sets.json"))
            for name, total in sets.items():
                known = state.setdefault(name, {"pieces": total["pieces"], "here": []})
                new = [member for member in total["here"] if member not in known["here"]]
                known["here"] += new
                done += [pool.submit(write_piece, archive, member, waiting) for member in new]
        for future in done:
            future.result()

    complete = {name: len(known["here"]) == known["pieces"] for name, known in state.items()}
    for name, known in state.items():
        for member in known["here"] if complete[name] else []:
            path = strip(Path(member))
            if (waiting / path).exists():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (waiting / path).replace(root / path)
    state_file.write_text(json.dumps(state))
    return complete


def strip(member: Path) -> Path:
    """The path of the file that a member stands for."""
    return member.with_suffix("") if member.suffix in (".stacks", ".files", ".webp") else member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--root", type=Path, default=Path())
    options = parser.parse_args()
    for name, complete in unpack(options.parts, options.root).items():
        print(f"{name}: {'complete' if complete else 'waits for more parts'}")


if __name__ == "__main__":
    main()
