"""Record a command in a terminal as an animated SVG.

    python tools/cast.py docs/prune.svg -- dmcp prune --model digits:resnet --data digits --budget 50%

It needs pyte. Pauses are shortened: a frame is shown for a second at most, the last one for five.
"""

from __future__ import annotations

import os
import pty
import select
import struct
import sys
import termios
import time
from fcntl import ioctl
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyte

COLUMNS, LINES, FRAMES = 92, 24, 40
WIDTH, HEIGHT = 7.8, 17  # of a character, in pixels
NAMES = ("default", "white", "black", "red", "green", "brown", "blue", "magenta", "cyan")
VALUES = ("#d8dee9", "#d8dee9", "#7f848e", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2")
COLOURS = dict(zip(NAMES, VALUES, strict=True))


def record(command: list[str]) -> list[tuple[float, list[list[tuple[str, str]]]]]:
    """(time, screen) after each piece of output; a screen has lines of (text, colour)."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream, found, start = pyte.ByteStream(screen), [], time.monotonic()
    child, master = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    stream.feed(
        f"$ {' '.join(Path(word).name if not place else word for place, word in enumerate(command))}\r\n".encode()
    )
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


def _runs(line: Any) -> list[tuple[str, str]]:
    """A line as pieces of one colour."""
    runs: list[tuple[str, str]] = []
    for column in range(COLUMNS):
        cell = line[column]
        colour = COLOURS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else COLOURS["default"])
        if runs and runs[-1][1] == colour:
            runs[-1] = (runs[-1][0] + cell.data, colour)
        else:
            runs.append((cell.data, colour))
    return runs


def draw(frames: list[tuple[float, list[list[tuple[str, str]]]]]) -> str:
    """The SVG; each frame is a group that is visible in its part of one endless animation."""
    kept = frames[:: max(1, len(frames) // FRAMES)]
    kept = kept if kept[-1] is frames[-1] else [*kept, frames[-1]]
    lasts = [min(1.0, max(0.15, later[0] - now[0])) for now, later in pairwise(kept)] + [5.0]
    total, begun = sum(lasts), 0.0
    size = (round(COLUMNS * WIDTH + 24), LINES * HEIGHT + 24)
    styles, groups = [], []
    for number, ((_, lines), last) in enumerate(zip(kept, lasts, strict=True)):
        left, right = 100 * begun / total, 100 * (begun + last) / total
        steps = f"0%,{left:.3f}%{{visibility:hidden}}{left + 0.001:.3f}%,{right:.3f}%{{visibility:visible}}"
        styles.append(f"@keyframes f{number}{{{steps}{min(100, right + 0.001):.3f}%,100%{{visibility:hidden}}}}")
        styles.append(f"#f{number}{{visibility:hidden;animation:f{number} {total:.1f}s step-end infinite}}")
        text = []
        for row, line in enumerate(lines):
            if not "".join(piece for piece, _ in line).strip():
                continue
            spans = "".join(f'<tspan fill="{colour}">{escape(piece)}</tspan>' for piece, colour in line)
            text.append(f'<text x="12" y="{12 + HEIGHT * (row + 0.8):.0f}" xml:space="preserve">{spans}</text>')
        groups.append(f'<g id="f{number}">{"".join(text)}</g>')
        begun += last
    font = "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}">'
        f"<style>{font}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#22272e"/>{"".join(groups)}</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(record(sys.argv[sys.argv.index("--") + 1 :])))
