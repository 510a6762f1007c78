"""The gateway's end of control connections, for tests: blocking, one message at a time."""

import socket

from relay.protocol.framing import FrameDecoder, encode
from relay.protocol.messages import AgentToGateway, EngineToGateway, Hello, Tokens, Welcome

PATIENCE_S = 60


class GatewaySide:
    """One accepted control connection."""

    def __init__(self, connection):
        self.socket = connection
        self.socket.settimeout(PATIENCE_S)
        self.decoder = FrameDecoder(AgentToGateway | EngineToGateway)
        self.inbox = []

    def send(self, message):
        self.socket.sendall(encode(message))

    def expect(self, kind, where=lambda message: True):
        """The next message of ``kind`` for which ``where`` holds; others are skipped."""
        while True:
            while self.inbox:
                message = self.inbox.pop(0)
                if isinstance(message, kind) and where(message):
                    return message
            data = self.socket.recv(65536)
            assert data, f"connection ended before {kind.__name__}"
            self.inbox += self.decoder.feed(data)

    def stream(self, request):
        """(tokens, finish) of one request to its finish; positions must follow each other."""
        tokens = []
        while True:
            for entry in self.expect(Tokens).entries:
                if entry.request == request:
                    assert entry.position == len(tokens)
                    tokens += entry.token_ids
                    if entry.finish is not None:
                        return tokens, entry.finish

    def until_closed(self):
        """Read until the peer ends the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            return


def listen():
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(PATIENCE_S)
    return server


def address_of(server):
    return "tcp://{}:{}".format(*server.getsockname())


def accept(server):
    return GatewaySide(server.accept()[0])


def accept_hello(server):
    """Accept, read the hello, welcome it: (hello, connection)."""
    side = accept(server)
    hello = side.expect(Hello)
    side.send(Welcome(1))
    return hello, side
