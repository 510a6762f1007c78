"""A real cluster whose decode worker has room for two streams: nothing fails, nothing differs, and KV goes the way it was told."""

import threading

import pytest
from tests.cli.serving import Serve, write_tiny_model

PROMPTS = [[(index * 37 + 11 * j + j * j) % 250 + 3 for j in range(180 + index)] for index in range(7)]
NEW_TOKENS = 140
POOL = "352K"  # 704 tokens: two streams and the room they are to grow into


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return write_tiny_model(folder / "tiny"), folder / "cache"


def complete_all(server: Serve) -> list[list[int]]:
    """All prompts at once."""
    found: list[list[int]] = [[] for _ in PROMPTS]

    def ask(index: int) -> None:
        found[index] = server.complete(PROMPTS[index], NEW_TOKENS)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture(scope="module")
def expected(model):
    server = Serve(*model, "--backend", "cpu", "--prefill", "0", "--decode", "1").ready()
    try:
        return complete_all(server)
    finally:
        server.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_full_d_parks_on_p_and_fails_nothing(model, expected, transport):
    server = Serve(*model, "--backend", "cpu", "--transport", transport, "--kv-cache-memory", POOL).ready()
    try:
        assert complete_all(server) == expected
        metrics = server.metrics()
        assert metrics["relay_refused_full_total"] > 0
        assert metrics["relay_parked_total"] > 0
        assert metrics.get("relay_requests_failed_total", 0) == 0
        server.wait_for(lambda: server.worker("decode-0")["transports"].get(transport, 0) > 0)
        assert set(server.worker("decode-0")["transports"]) == {transport}
        server.wait_for(lambda: server.worker("prefill-0")["kv_used"] == 0)
    finally:
        server.close()
