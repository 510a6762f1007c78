"""The status page: what a reader finds at any instant of any write."""

import pytest

from relay.protocol.messages import ComputedRow
from relay.worker import status_page
from relay.worker.engine_process import compile_phases
from relay.worker.status_page import ManifestRow, StatusPage, manifest_of

ROWS = [ManifestRow(7, 0, 1, 33), ManifestRow(7, 1, 1, 40), ManifestRow(8, 0, 2, 64)]


@pytest.fixture
def page() -> StatusPage:
    return StatusPage.open("")


def test_a_step_in_flight_is_named_until_it_is_done(page: StatusPage) -> None:
    assert page.manifest() == []
    page.begin_step(ROWS, 5_000_000)
    assert page.manifest() == ROWS
    assert page.read(7_000_000) == (0, "stepping", 2)
    page.finish_step()
    assert page.manifest() == []
    assert page.read(7_000_000)[0] == 1


def test_two_steps_in_flight_are_both_named_and_a_third_is_refused(page: StatusPage) -> None:
    for _ in range(5):
        page.begin_step(ROWS[:1], 1)
        page.begin_step(ROWS[1:], 1)
        assert page.manifest() == ROWS
        with pytest.raises(RuntimeError):
            page.begin_step([], 1)
        page.finish_step()
        assert page.manifest() == ROWS[1:]
        page.finish_step()


def test_two_processes_see_one_page() -> None:
    page, path = StatusPage.create()
    engine = StatusPage.open(path)
    engine.begin_step(ROWS, 1)
    engine.set_draining()
    assert page.manifest() == ROWS
    assert page.read(2)[1] == "draining"


def test_a_write_that_is_cut_off_anywhere_names_no_wrong_rows(page: StatusPage) -> None:
    """Apply the writes of a step one by one, as a reader sees them if the engine dies between any two."""
    page.begin_step(ROWS[:1], 1)
    page.finish_step()
    page.begin_step(ROWS[1:2], 1)
    before = bytes(page._bytes[: status_page.PAGE_BYTES])
    page.begin_step(ROWS[2:], 2)
    after = bytes(page._bytes[: status_page.PAGE_BYTES])
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    assert changed
    torn = StatusPage.open("")
    torn._bytes[:] = before
    # Words in the order in which they are written: the rows' slot, then the count of begun steps.
    order = sorted(changed, key=lambda at: (at < status_page._SLOTS * 8, at))
    for at in order:
        torn._bytes[at] = after[at]
        assert torn.manifest() in (ROWS[1:2], ROWS[1:])
    assert torn.manifest() == ROWS[1:]


def test_damage_is_noticed(page: StatusPage) -> None:
    page.begin_step(ROWS, 1)
    start = (status_page._slot(1) + status_page._ROWS) * 8
    page._bytes[start + 8] ^= 1
    assert page.manifest() == []
    page._words[status_page._BEGUN] = 1 << 40
    assert page.manifest() == []


def test_bounds(page: StatusPage) -> None:
    page.begin_step([ManifestRow(-1, 0, 1 << 70, 5)] * 3, 1)
    assert len(page.manifest()) == 3
    page.finish_step()
    page.begin_step([ROWS[0]] * (status_page.MAX_ROWS + 1), 1)
    assert len(page.manifest()) == status_page.MAX_ROWS


def test_each_gateway_is_told_its_own_rows() -> None:
    assert manifest_of(ROWS) == ([ComputedRow(*row) for row in ROWS], False)
    assert manifest_of(ROWS[:2])[1], "two choices of one request are alone"
    assert manifest_of([]) == ([], False)


def test_a_compilation_is_shown_and_then_what_it_interrupted(page: StatusPage) -> None:
    now = [10_000_000]
    begin, end = compile_phases(page, lambda: now[0])
    page.set_phase("ready", now[0])
    begin()
    now[0] += 9_000_000
    assert page.read(now[0])[1:] == ("compiling", 9)
    end()
    assert page.read(now[0])[1:] == ("ready", 0), "a transfer's thread compiled; no step runs that could be hung"
    page.begin_step(ROWS, now[0])
    begin()
    begin()  # another thread
    end()
    assert page.phase == "compiling"
    end()
    now[0] += 3_000_000
    assert page.read(now[0])[1:] == ("stepping", 3)
