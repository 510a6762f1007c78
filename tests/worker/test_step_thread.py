"""The step thread over a backend that queues: step n + 1 is begun before step n has ended, results stay in order."""

import threading

from relay.clock import MonotonicClock
from relay.engine.runner import Runner
from relay.engine.scheduler import Scheduler
from relay.worker.commands import StartStep
from relay.worker.events import StepFinished
from relay.worker.status_page import StatusPage
from relay.worker.step_thread import StepThread
from tests.engine.driver import limits, work
from tests.engine.hash_backend import LAYERS, HashBackend, oracle, program


class QueueingHash(HashBackend):
    """Draws when it runs, as a device does; ``sample`` hands the draw over. A batch ends when ``gate`` is open."""

    def __init__(self):
        super().__init__()
        self.allocate_kv(64, 16)
        self.gate = threading.Event()
        self.drawn = []  # (batch, tokens) run and not yet sampled
        self.most_waiting = 0

    def run(self, start, stop, batch):
        super().run(start, stop, batch)
        if stop == len(program().ops):
            self.drawn.append((batch, super().sample(batch)))
            self.most_waiting = max(self.most_waiting, len(self.drawn))

    def ended(self, batch):
        return self.gate.is_set()

    def sample(self, batch):
        self.gate.wait(10)
        done, tokens = self.drawn.pop(0)
        assert done is batch
        return tokens


def serve(overlapped):
    backend = QueueingHash()
    bounds = limits(num_blocks=64, max_num_batched_tokens=64)
    scheduler = Scheduler(bounds, "hash")
    items = [work(r, [r] * 20, 6) for r in (1, 2)]
    for item in items:
        scheduler.add(item)
    results: list[StepFinished] = []
    posted = threading.Condition()

    def post(event):
        with posted:
            results.append(event)
            posted.notify()

    thread = StepThread(
        Runner(backend, program(), bounds),
        None,
        LAYERS,
        StatusPage.open(""),
        post,
        MonotonicClock(),
        overlapped=overlapped,
    )
    thread.start()
    tokens = {1: [], 2: []}
    in_flight = 0
    while True:
        while in_flight <= 1 and scheduler.has_work() and (plan := scheduler.plan()) is not None:
            thread.submit(StartStep(plan, {}, 0, []))
            in_flight += 1
        if not in_flight:
            return backend, items, tokens
        if overlapped and in_flight == 2 and not backend.gate.is_set():
            while len(backend.drawn) < 2:  # both steps are queued although the first has not ended
                assert thread._thread.is_alive()
        backend.gate.set()
        with posted:
            assert posted.wait_for(lambda: bool(results), 10)
            event = results.pop(0)
        in_flight -= 1
        for update in scheduler.update(event.result):
            tokens[update.key.request] += [token.token_id for token in update.tokens]


def test_a_step_is_begun_before_the_last_has_ended():
    backend, items, tokens = serve(overlapped=True)
    assert backend.most_waiting == 2
    for item in items:
        assert tokens[item.request] == oracle(item.token_ids, 20, item.params, 0, 256)[0]


def test_a_backend_that_computes_at_once_finishes_each_step_first():
    backend, items, tokens = serve(overlapped=False)
    assert backend.most_waiting == 1
    for item in items:
        assert tokens[item.request] == oracle(item.token_ids, 20, item.params, 0, 256)[0]
