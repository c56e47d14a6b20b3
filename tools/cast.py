"""Record a command in a terminal as an animated SVG.

    python tools/cast.py docs/prune.svg -- dmcp prune --model digits:resnet --data digits --budget 50% \
        --baselines --batch 64 --search-epochs 8 --epochs 12

It needs pyte. Pauses are shortened: each frame is shown for at most a quarter of a second, and the last one for six
seconds. If the reader or the viewer turns animations off, only the last frame is shown.
"""

from __future__ import annotations

import os
import pty
import select
import struct
import sys
import termios
import textwrap
import time
from fcntl import ioctl
from html import escape
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import pyte

COLUMNS, LINES, FRAMES = 92, 30, 60
LONGEST, LAST = 0.25, 6.0  # seconds of a frame
WIDTH, HEIGHT, MARGIN, BAR = 8.4, 19, 16, 34  # of a character, around the text, above it; in pixels
NAMES = ("default", "white", "black", "red", "green", "brown", "blue", "magenta", "cyan")
VALUES = ("#d8dee9", "#d8dee9", "#7f848e", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2")
COLOURS = dict(zip(NAMES, VALUES, strict=True))
Line = tuple[tuple[int, str, str], ...]  # (column, text, colour)


def record(command: list[str]) -> list[tuple[float, list[Line]]]:
    """(time, screen) after each piece of output."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream, found, start = pyte.ByteStream(screen), [], time.monotonic()
    child, master = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    words = textwrap.wrap(" ".join([Path(command[0]).name, *command[1:]]), COLUMNS - 6, break_on_hyphens=False)
    stream.feed(("$ " + " \\\r\n    ".join(words) + "\r\n").encode())
    while True:
        try:
            ready, _, _ = select.select([master], [], [], 0.5)
            data = os.read(master, 65536) if ready else None
        except OSError:  # it has ended
            data = b""
        if data == b"":
            break
        if data:
            stream.feed(data)
            found.append((time.monotonic() - start, [_runs(screen.buffer[line]) for line in range(LINES)]))
    os.waitpid(child, 0)
    return found


def _runs(line: Any) -> Line:
    """A line as pieces of one colour, without blanks around them."""
    found = []
    for colour, cells in groupby(range(COLUMNS), lambda column: line[column].fg):
        columns = [*cells]
        text = "".join(line[column].data for column in columns)
        if text.strip():
            shade = COLOURS.get(colour, f"#{colour}" if len(colour) == 6 else COLOURS["default"])
            found.append((columns[0] + len(text) - len(text.lstrip()), text.strip(), shade))
    return tuple(found)


def _span(column: int, text: str, colour: str) -> str:
    fill = "" if colour == COLOURS["default"] else f' fill="{colour}"'
    place = f'x="{MARGIN + WIDTH * column:.1f}" textLength="{WIDTH * len(text):.1f}"'
    return f"<tspan {place}{fill}>{escape(text)}</tspan>"


def draw(frames: list[tuple[float, list[Line]]]) -> str:
    """The SVG. A line that stays over some frames is one text, visible in its part of one endless animation."""
    kept = frames[:: max(1, len(frames) // FRAMES)]
    kept = kept if kept[-1] is frames[-1] else [*kept, frames[-1]]
    lasts = [min(LONGEST, max(0.1, later[0] - now[0])) for now, later in pairwise(kept)] + [LAST]
    begins, total = [0.0, *accumulate(lasts)], sum(lasts)
    styles, texts = dict[tuple[int, int], str](), []
    for row in range(LINES):
        place = 0
        for line, same in groupby(lines[row] for _, lines in kept):
            first, place = place, place + len([*same])
            if not line:
                continue
            left, right = (100 * begins[frame] / total for frame in (first, place))
            seen = "visible" if place == len(kept) else "hidden"  # without an animation
            steps = f"0%{{visibility:{'hidden' if first else 'visible'}}}{left:.2f}%{{visibility:visible}}"
            steps += "" if place == len(kept) else f"{right:.2f}%,to{{visibility:hidden}}"
            name = f"f{first}-{place}"
            move = f"animation:{name} {total:.1f}s step-end {LAST / 2 - total:.1f}s infinite"  # begins with the result
            styles[first, place] = f"@keyframes {name}{{{steps}}}.{name}{{visibility:{seen};{move}}}"
            down = BAR + HEIGHT * (row + 0.8)
            spans = "".join(_span(*piece) for piece in line)
            texts.append(f'<text class="{name}" y="{down:.0f}">{spans}</text>')
    size = (round(COLUMNS * WIDTH + 2 * MARGIN), BAR + LINES * HEIGHT + MARGIN)
    font = f"text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:{VALUES[0]}}}"
    still = "@media(prefers-reduced-motion:reduce){text{animation:none!important}}"
    dots = zip((20, 38, 56), ("#e06c75", "#e5c07b", "#98c379"), strict=True)
    buttons = "".join(f'<circle cx="{across}" cy="18" r="5.5" fill="{colour}"/>' for across, colour in dots)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="Recording of dmcp prune"><style>{font}{"".join(styles.values())}{still}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#22272e"/>{buttons}{"".join(texts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(record(sys.argv[sys.argv.index("--") + 1 :])))
