"""Names of things that travel between processes."""

from typing import NamedTuple


class SequenceKey(NamedTuple):
    """One placement of one choice of one request: the fence against anything older.

    ``request`` is unique over all gateways and their lives (``first_id``), ``choice`` counts from 0 within the request (n > 1),
    ``attempt`` counts placements from 1.
    """

    request: int
    choice: int
    attempt: int


class WorkerKey(NamedTuple):
    """One life of one worker. ``incarnation`` is assigned by the gateway and only grows; it is never a pid."""

    worker: str
    incarnation: int


_EPOCH_SHIFT = 40


def first_id(epoch: int) -> int:
    """The first request or transfer id of a gateway's life; 2^40 follow it that no other life uses. 0 ≤ ``epoch`` < 2^23."""
    return (epoch << _EPOCH_SHIFT) + 1


def epoch_of(number: int) -> int:
    """The epoch of the gateway that gave a request or a transfer its id."""
    return number >> _EPOCH_SHIFT
