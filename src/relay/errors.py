"""Errors a user can meet at start-up; each has one line of text and its own exit code."""


class RelayError(Exception):
    """Base of the errors that end a command with one clear line instead of a traceback."""

    exit_code = 1


class UsageError(RelayError):
    """A flag or an argument that cannot be honoured."""

    exit_code = 2


class ModelNotFoundError(RelayError):
    """The model is neither a local path nor in the cache, and may or can not be fetched."""

    exit_code = 3


class DoesNotFitError(RelayError):
    """Weights or one request do not fit in the memory given; the text holds the numbers."""

    exit_code = 4


class PortInUseError(RelayError):
    """A listening address is taken; the text names it."""

    exit_code = 5


class CorruptModelError(RelayError):
    """A model file is truncated, damaged or of a shape Relay does not serve; the text names file and field."""

    exit_code = 6


class StartupError(RelayError):
    """The cluster could not become ready (a worker keeps dying, a deadline passed)."""

    exit_code = 7


class DeviceLostError(RelayError):
    """A CUDA error: nothing can be computed in this process any more. It ends; its requests resume elsewhere."""

    exit_code = 9


class WeightsLostError(RelayError):
    """The process that held this engine's weights has ended, for no fault of what was computed. The engine ends, too."""

    exit_code = 10
