"""A worker's transport in a process of its own, for tests that kill or stop it.

``python -m tests.transfer.peer ROLE SCHEME [ADDRESS]``. Role ``target``: reserve transfer 7, print the address, print "heard" with
the first KV, then wait. Role ``source``: stream two thirds of transfer 7 to ADDRESS, print "streaming", wait.
"""

import sys
import time

from tests.transfer.nodes import SOURCE_TABLE, Node, receive_order, send_order
from tests.transfer.stores import LAYOUT


def say(text):
    print(text, flush=True)


def main(role, scheme, address=""):
    if role == "target":
        node = Node("d", scheme)
        node.transport.open_receive(receive_order())
        say(node.wire.address)
        while not node.got():
            time.sleep(0.005)
        say("heard")
    else:
        node = Node("p", scheme, seed=1)
        node.transport.open_send(send_order(None, addresses=[address]))
        for layer in range(LAYOUT.num_layers):
            node.transport.layer_written(7, layer, 0, 66, SOURCE_TABLE)
        say("streaming")
    while True:
        node.transport.tick(time.monotonic_ns())
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
