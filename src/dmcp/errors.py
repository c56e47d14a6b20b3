"""Every error that is raised on purpose, in one tree."""

from __future__ import annotations


class DmcpError(Exception):
    """The root of all errors that this package raises on purpose."""


class ArgumentError(DmcpError, TypeError, ValueError):
    """An argument of a public function that has the wrong type, or is none of the values that are allowed."""


class TraceError(DmcpError):
    """The model could not be recorded, or nothing in it can be pruned."""


class WidthsError(DmcpError, ValueError):
    """Widths, indices or names that do not fit the network."""


class BudgetError(DmcpError, ValueError):
    """A budget that cannot be read, reached or kept."""


class DataError(DmcpError):
    """Data that is missing, or does not fit the network or the settings."""


class TrainingError(DmcpError):
    """Training that cannot go on: a loss that is not a number."""


class CutError(DmcpError):
    """A cut network that does not do what the graph predicted."""


class FileError(DmcpError, OSError):
    """A saved result that cannot be written, read or trusted."""


class RankError(DmcpError):
    """Processes of one run that cannot meet, have lost each other or do not agree."""


class StoppedError(DmcpError):
    """A run that was asked to stop, and has saved where it is."""
