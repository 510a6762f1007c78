"""A peer is killed while KV goes through D's area, with files in the place of a device's memory."""

import pytest

from tests.transfer.ipc_engines import FileGround, d_is_killed, p_is_killed


@pytest.mark.parametrize("scenario", [p_is_killed, d_is_killed])
def test_the_peer_is_killed(scenario, tmp_path):
    scenario(FileGround(tmp_path))
