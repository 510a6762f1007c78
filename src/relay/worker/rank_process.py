"""A rank of a worker other than the first: ``python -m relay.worker.rank_process``, started by ``ranks.py`` of its engine.

Loads its part of the model, then makes rank 0's calls until that closes the link or ends. It never outlives its engine.
"""

import argparse
import os
import signal
import socket
import sys

from relay.errors import RelayError
from relay.worker.host import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay-rank")
    for name in ("--spec", "--place"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--parent", "--link", "--pool", "--floats"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains and then closes
    if not die_with_parent(arguments.parent):
        os._exit(1)
    os._exit(_run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    from relay.kernels.ranks import calls
    from relay.kernels.ranks.exchange import MeetingPlace
    from relay.kernels.ranks.follower import obey
    from relay.models.llama import build_program
    from relay.worker.device import rank_share
    from relay.worker.served_pack import open_pack
    from relay.worker.spec import decode_spec

    link = socket.socket(fileno=arguments.link)
    spec = decode_spec(arguments.spec)
    memory, *bells = (int(text) for text in arguments.place.split(","))
    rows = tuple(tuple(bells[start : start + spec.ranks]) for start in range(0, len(bells), spec.ranks))
    place = MeetingPlace(spec.ranks, arguments.floats, memory, rows)
    try:
        try:
            pack = open_pack(spec)
            share = rank_share(spec, arguments.rank, place)
            share.load(build_program(pack.config), pack)
        except RelayError as error:
            calls.send(link, calls.encode(calls.CannotStart(str(error), error.exit_code)))
            return error.exit_code
        calls.send(link, calls.encode(calls.Loaded(share.backend.numerics(), share.handle())))
        obey(share, link, arguments.pool, arguments.rank)
    except calls.LinkEnded:
        return 1
    except RelayError as error:
        print(f"rank {arguments.rank} of {spec.worker}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
