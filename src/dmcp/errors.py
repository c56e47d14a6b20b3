"""Every error that is raised on purpose, in one tree, and every warning."""

from __future__ import annotations

import sys
import warnings


class DmcpError(Exception):
    """The base class of all errors that this package raises on purpose."""


class ArgumentError(DmcpError, TypeError, ValueError):
    """An argument of a public function has the wrong type, or is not one of the allowed values."""


class TraceError(DmcpError):
    """The model could not be recorded, or nothing in it can be pruned."""


class WidthsError(DmcpError, ValueError):
    """Widths, indices or names do not fit the network."""


class BudgetError(DmcpError, ValueError):
    """A budget cannot be read, reached or kept."""


class DataError(DmcpError):
    """Data are missing, or do not fit the network or the settings."""


class TrainingError(DmcpError):
    """Training cannot continue: a loss is not finite, or the settings are impossible."""


class CutError(DmcpError):
    """A cut network does not do what the graph predicted."""


class FileError(DmcpError, OSError):
    """A saved result cannot be written, read or trusted."""


class RankError(DmcpError):
    """Processes of one run that cannot meet, have lost each other or do not agree."""


class StoppedError(DmcpError):
    """A run was asked to stop, and saved its state."""


class DmcpWarning(UserWarning):
    """The base class of all warnings of this package."""


def warn(text: str, category: type[DmcpWarning] = DmcpWarning) -> None:
    """Warn at the line of the user's code that led here."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "dmcp":
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)
