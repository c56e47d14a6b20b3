"""Record a command in a terminal as an animated SVG.

    python tools/cast.py docs/prune.svg -- dmcp prune --model digits:resnet --data digits --budget 50% \
        --baselines --batch 64 --search-epochs 8 --epochs 12

It needs pyte. Lines that are too long break between words. Pauses are shortened: each frame is shown for at most a
quarter of a second, and the last one for six seconds. If the reader or the viewer turns animations off, only the last
frame is shown.
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

COLUMNS, LINES, FRAMES = 92, 28, 60
WIDEST = 400  # columns of the terminal: none of our lines is broken there
INDENT = 2  # of the rest of a line
LONGEST, LAST = 0.25, 6.0  # seconds of a frame
WIDTH, HEIGHT, MARGIN, BAR = 8.4, 19, 16, 34  # of a character, around the text, above it; in pixels
NAMES = ("default", "white", "black", "red", "green", "brown", "blue", "magenta", "cyan")
VALUES = ("#d8dee9", "#d8dee9", "#7f848e", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2")
COLOURS = dict(zip(NAMES, VALUES, strict=True))
Character = tuple[str, str]  # itself, colour
Line = tuple[tuple[int, str, str], ...]  # (column, text, colour)
BLANK: Character = (" ", COLOURS["default"])


def record(command: list[str]) -> list[tuple[float, list[Line]]]:
    """(time, screen) after each piece of output."""
    import pyte  # late: what draws needs nothing

    screen = pyte.Screen(WIDEST, LINES)
    stream, found, start = pyte.ByteStream(screen), [], time.monotonic()
    child, master = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, WIDEST, 0, 0))
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
            found.append((time.monotonic() - start, _lines(screen)))
    os.waitpid(child, 0)
    return found


def _lines(screen: Any) -> list[Line]:
    """The lines to draw; if there are too many, the last of them, as a terminal scrolls."""
    lines = []
    for row in range(LINES):
        cells = screen.buffer[row]
        characters = [(cells[column].data, _colour(cells[column].fg)) for column in range(WIDEST)]
        lines += [_runs(part) for part in break_line(characters)]
    while len(lines) > LINES and not lines[-1]:
        lines.pop()
    return lines[-LINES:]


def _colour(name: str) -> str:
    """As CSS writes it."""
    return COLOURS.get(name, f"#{name}" if len(name) == 6 else COLOURS["default"])


def break_line(characters: list[Character]) -> list[list[Character]]:
    """The line in parts of at most COLUMNS, which break between words."""
    text = "".join(character for character, _ in characters).rstrip()
    parts = []
    start, indent = 0, 0
    while len(text) - start > COLUMNS - indent:
        end = text.rfind(" ", start + 1, start + COLUMNS - indent + 1)
        if end < 0:  # a word that no line can hold
            end = start + COLUMNS - indent
        parts.append([BLANK] * indent + characters[start:end])
        start = end + (text[end] == " ")
        indent = INDENT
    parts.append([BLANK] * indent + characters[start : len(text)])
    return parts


def _runs(characters: list[Character]) -> Line:
    """A line as pieces of one colour, without blanks around them."""
    pieces = []
    column = 0
    for colour, group in groupby(characters, lambda character: character[1]):
        text = "".join(character for character, _ in group)
        if text.strip():
            pieces.append((column + len(text) - len(text.lstrip()), text.strip(), colour))
        column += len(text)
    return tuple(pieces)


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
