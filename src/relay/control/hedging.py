"""Second attempts on suspicion: which choices get one, and what it may cost (decision 0010)."""

from relay.control.attempts import Attempt
from relay.control.placement import Dispatcher
from relay.control.requests import MAX_ATTEMPTS
from relay.control.router import Router
from relay.control.state import LIVE, ClusterState
from relay.control.workers import Worker


class Hedger:
    """Runs once a tick, after the detector has said which workers are doubted."""

    def __init__(self, state: ClusterState, router: Router, dispatcher: Dispatcher) -> None:
        self._state = state
        self._router = router
        self._dispatcher = dispatcher
        self._earned = 0  # tokens whose share both budgets have got

    def tick(self, now_ns: int) -> None:
        self._earn(now_ns)
        beating = [worker for worker in self._state.workers.values() if worker.state in LIVE]
        doubted = [worker for worker in beating if worker.doubted]
        # Half of several peers doubted at once: more likely our network or machine than all of them.
        if not doubted or (len(doubted) > 1 and 2 * len(doubted) >= len(beating)):
            return
        for worker in doubted:
            for attempt in list(worker.live):
                if self._deserves_one(attempt, worker):
                    self._hedge(attempt, now_ns)

    def _earn(self, now_ns: int) -> None:
        """Both budgets get their share of what was accepted and committed since the last tick."""
        counters = self._state.counters
        done = counters["tokens"] + counters["prompt_tokens"]
        for budget in (self._state.hedge_budget, self._state.retry_budget):
            budget.earn(done - self._earned)
            budget.pass_time(now_ns)
        self._earned = done

    @staticmethod
    def _deserves_one(attempt: Attempt, worker: Worker) -> bool:
        """Once an attempt, and never what may cost an engine after the other (decision 0012).

        The long step of ``worker`` itself does not speak against what is in it: that may go to one more engine, and if it hangs
        there too, the two do. So several choices of one request do not go to several engines for a long step, and not at all
        while none has a token.
        """
        if attempt.hedged or len(attempt.choice.attempts) >= MAX_ATTEMPTS:
            return False
        request = attempt.choice.request
        if request.suspicion.total + request.suspicion.lingering - (request in worker.long_step) > 0:
            return False
        choices = request.choices
        if len(choices) == 1:
            return True
        if not any(choice.committed for choice in choices):
            return False
        return not worker.slow or not any(each.hedge for choice in choices for each in choice.attempts)

    def _hedge(self, attempt: Attempt, now_ns: int) -> None:
        budget = self._state.hedge_budget
        if budget.tokens <= 0:
            return
        placement = self._router.choose_hedge(attempt, now_ns)
        if placement is None or placement.uncached > budget.tokens:
            return
        budget.spend(placement.uncached)
        self._dispatcher.hedge(attempt, placement, now_ns)
