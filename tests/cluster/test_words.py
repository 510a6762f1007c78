"""What is said of an engine reaches whoever is told of its worker's end."""

from relay.cluster.launcher import LaunchExit
from relay.config import WorkerConfig
from relay.ids import WorkerKey
from relay.local.workers import LocalWorkers
from relay.protocol.messages import ComputedRow, EngineExited
from relay.worker.last_word import last_word

KEY = WorkerKey("worker-0", 3)
HUNG = EngineExited(manifest=[ComputedRow(5, 0, 1, 20)], alone=True, hung_ms=10_001)


class Told:
    def __init__(self) -> None:
        self.engines: list[EngineExited | None] = []
        self.workers = LocalWorkers(WorkerConfig(), "pack", "digest", lambda name, line: None)
        self.workers.attach(self)
        self.workers._launcher.start = lambda spec: None  # type: ignore[method-assign]
        self.workers.start(KEY, "both")

    def launcher_exited(self, worker, status, signal, reason, engine) -> None:
        self.engines.append(engine)

    def exit(self, *lines: str) -> None:
        self.workers._launcher._on_exit(LaunchExit("worker-0.3", None, 9, last_lines=lines))


def test_the_word_of_who_has_it_killed_is_told_with_its_end() -> None:
    told = Told()
    told.workers.stop(KEY, kill=True, word=HUNG)
    told.exit()
    assert told.engines == [HUNG]
    told.workers.stop(KEY, kill=True, word=HUNG)  # too late: nothing is kept of it
    assert not told.workers._words


def test_its_agents_own_word_goes_before() -> None:
    told, crash = Told(), EngineExited(None, 11, HUNG.manifest)
    told.workers.stop(KEY, kill=True, word=HUNG)
    told.exit(last_word(crash))
    assert told.engines == [crash]


def test_a_kill_without_a_word_says_nothing() -> None:
    told = Told()
    told.workers.stop(KEY, kill=True)
    told.exit()
    assert told.engines == [None]
