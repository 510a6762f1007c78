"""Names of things that travel between processes."""

from typing import NamedTuple


class SequenceKey(NamedTuple):
    """One placement of one choice of one request: the fence against anything older.

    ``request`` is unique within a gateway's life, ``choice`` counts from 0 within the request (n > 1),
    ``attempt`` counts placements from 1.
    """

    request: int
    choice: int
    attempt: int


class WorkerKey(NamedTuple):
    """One life of one worker. ``incarnation`` is assigned by the gateway and only grows; it is never a pid."""

    worker: str
    incarnation: int
