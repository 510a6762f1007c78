"""Tokens from engines to clients: only the next position of a live attempt counts, so each is delivered exactly once."""

from relay.control.attempts import Attempt
from relay.control.commands import Deliver
from relay.control.contract import Delivery, RequestFailure
from relay.control.placement import Dispatcher
from relay.control.requests import Choice
from relay.control.state import ClusterState
from relay.control.transitions import AttemptState, AttemptTrigger
from relay.control.workers import Worker
from relay.protocol.messages import SequenceFailed, TokenEntry, Tokens

MAX_DISAGREEMENTS = 2


def first_difference(choice: Choice, entry: TokenEntry) -> int | None:
    """The first position where ``entry``, which begins at or before the committed end, differs from what was committed.

    Tokens are compared, logprobs where both are known, and an end that the committed tokens went past.
    """
    committed = choice.committed
    for index, token in enumerate(entry.token_ids[: len(committed) - entry.position]):
        position = entry.position + index
        if committed[position] != token:
            return position
        at = position - choice.evidence_from
        if entry.logprobs and 0 <= at < len(choice.evidence):
            known = choice.evidence[at]
            if known is not None and known != entry.logprobs[index]:
                return position
    if entry.finish is not None and entry.token_ids and entry.position + len(entry.token_ids) <= len(committed):
        return entry.position + len(entry.token_ids) - 1
    return None


def undecided(choice: Choice) -> RequestFailure:
    """The end of a request whose workers disagree."""
    workers = ", ".join(choice.distrusted)
    text = f"workers {workers} disagree on token {choice.disputed} of choice {choice.index}, and no other agrees with what was sent"
    return RequestFailure(500, "token_disagreement", text)


class TokenPath:
    """The hot path: one call for each engine step."""

    def __init__(self, state: ClusterState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def tokens(self, worker: Worker, message: Tokens, now_ns: int) -> None:
        requests = self._state.requests
        worker.progress_ns = now_ns
        running = AttemptState.RUNNING
        for entry in message.entries:
            request = requests.get(entry.request)
            if request is None:
                continue
            choices = request.choices
            if not 0 <= entry.choice < len(choices):
                continue
            number = entry.attempt
            for attempt in choices[entry.choice].attempts:
                if attempt.number == number:
                    break
            else:
                continue
            if worker is attempt.decode:
                if attempt.state is running:
                    self._commit(attempt, worker, entry, now_ns)
                else:
                    self._from_decode(attempt, worker, entry, now_ns)
            elif worker is attempt.prefill:
                self._from_prefill(attempt, worker, entry, now_ns)

    def _from_prefill(self, attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> None:
        """P's first token, unless D was quicker to report it."""
        if attempt.state is not AttemptState.PREFILLING:
            return
        attempt.move(AttemptTrigger.PREFILL_TOKENS, now_ns)
        self._state.breakers.workers[worker.id].succeeded(now_ns)
        self._commit(attempt, worker, entry, now_ns)

    def _from_decode(self, attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> None:
        """D speaks: the handoff is complete. It reports P's token too, so nothing is missing if P's own report comes later."""
        if attempt.state is AttemptState.RUNNING:
            self._commit(attempt, worker, entry, now_ns)
            return
        if attempt.state is AttemptState.RESERVING:
            self._broken(attempt, worker, "sent tokens before it accepted", now_ns)
            return
        attempt.move(AttemptTrigger.DECODE_TOKENS, now_ns)
        if attempt.prefill is not None:
            self._state.breakers.link_succeeded(attempt.prefill.id, worker.id, now_ns)
            attempt.prefill.unbook(attempt)
            attempt.prefill.has_news()
            attempt.prefill = None
            self._state.changed = True
        self._commit(attempt, worker, entry, now_ns)

    def _commit(self, attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> None:
        choice = attempt.choice
        committed = choice.committed
        position = len(committed)
        if entry.position != position:
            trimmed = self._trim(attempt, worker, entry, now_ns)
            if trimmed is None:
                return
            entry = trimmed
        token_ids = entry.token_ids
        problem = self._check(choice, entry)
        if problem:
            self._broken(attempt, worker, problem, now_ns)
            return
        committed += token_ids
        if worker.live.get(attempt):
            worker.prefilled(attempt)
        cached = 0
        if position == 0:
            cached = self._first(choice, worker, entry)
        if len(choice.attempts) > 1 or choice.disputed is not None:
            choice.evidence += entry.logprobs or [None] * len(token_ids)
        if choice.troubled:
            choice.progressed()
        self._state.commands.append(
            Deliver(
                choice.request.id,
                Delivery(
                    choice.index,
                    position,
                    token_ids,
                    entry.finish,
                    entry.logprobs,
                    cached,
                    entry.logit_digests,
                    entry.kv_digests,
                    worker.numerics_id,
                ),
            )
        )
        self._state.counters["tokens"] += len(token_ids)
        if entry.finish is not None:
            self._dispatcher.finish(attempt, worker, now_ns)
        elif attempt.parks:
            self._dispatcher.parked(attempt, now_ns)
        elif len(choice.attempts) > 1:
            self._race(attempt, now_ns)

    def _race(self, attempt: Attempt, now_ns: int) -> None:
        """``attempt`` of two has committed new tokens: a hedge wins by that, the older one only when nobody doubts it any more."""
        older, hedge = attempt.choice.attempts
        if attempt is hedge:
            self._state.counters["hedges_won"] += 1
            self._dispatcher.close(older, now_ns, f"attempt {hedge.number} is ahead")
        elif not older.doubted:
            older.hedged = False
            self._dispatcher.close(hedge, now_ns, f"attempt {older.number} goes on")

    def _first(self, choice: Choice, worker: Worker, entry: TokenEntry) -> int:
        """Pin the numerics id; return the prompt tokens that were not computed."""
        choice.request.numerics_id = worker.numerics_id
        if len(choice.request.choices) > 1:
            self._state.changed = True  # the others may go elsewhere now
        return max(0, min(entry.cached_tokens, len(choice.request.submission.token_ids)))

    def _check(self, choice: Choice, entry: TokenEntry) -> str:
        token_ids = entry.token_ids
        if not token_ids and entry.finish is None:
            return "an entry without tokens"
        if len(choice.committed) + len(token_ids) > choice.request.submission.params.max_tokens:
            return "more tokens than max_tokens"
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._state.model.vocab_size):
            return "a token outside the vocabulary"
        return ""

    def _trim(self, attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> TokenEntry | None:
        """The part of ``entry`` that is new, or None. What is known already must be equal: anything else is an alarm."""
        choice = attempt.choice
        position = len(choice.committed)
        if entry.position > position or entry.position < 0:
            self._broken(attempt, worker, f"position {entry.position} after {position}", now_ns)
            return None
        known = position - entry.position
        wrong = first_difference(choice, entry)
        if wrong is not None:
            self._disagree(attempt, worker, wrong, now_ns)
            return None
        if attempt.hedge:
            self._state.hedge_budget.spend(min(known, len(entry.token_ids)))
        if len(entry.token_ids) <= known and entry.finish is None:
            return None
        return TokenEntry(
            request=entry.request,
            choice=entry.choice,
            attempt=entry.attempt,
            position=position,
            token_ids=entry.token_ids[known:],
            finish=entry.finish,
            logprobs=entry.logprobs[known:] if entry.logprobs else None,
            cached_tokens=entry.cached_tokens,
            logit_digests=entry.logit_digests[known:] if entry.logit_digests else None,
            kv_digests=entry.kv_digests,
        )

    def _broken(self, attempt: Attempt, worker: Worker, problem: str, now_ns: int) -> None:
        """``worker`` said what no healthy one says."""
        self._state.breakers.workers[worker.id].failed(now_ns)
        self._dispatcher.reopen(attempt, now_ns, f"{worker.id}: {problem}")

    def _disagree(self, attempt: Attempt, worker: Worker, position: int, now_ns: int) -> None:
        """I4 is broken: somebody computes wrongly. A third worker decides once; after that the request ends."""
        state, choice = self._state, attempt.choice
        live = [other.id for each in choice.attempts for other in each.workers]
        parties = list(dict.fromkeys([worker.id, *live, *choice.witnesses]))
        others = ", ".join(parties[1:]) or "itself"
        text = f"{worker.id} and {others} disagree on token {position} of request {choice.request.id}, choice {choice.index}"
        state.counters["token_disagreements"] += 1
        state.alarm = text
        state.story.tell(now_ns, choice.request.id, choice.index, f"ALARM: {text}")
        for party in parties:
            state.breakers.workers[party].failed(now_ns)
        choice.disagreements += 1
        choice.distrusted = tuple(dict.fromkeys([*choice.distrusted, *parties]))
        choice.disputed = min(position, choice.start)
        if choice.disagreements >= MAX_DISAGREEMENTS:
            self._dispatcher.fail(choice.request, undecided(choice), now_ns)
            return
        for other in list(choice.attempts):
            if other is not attempt:
                self._dispatcher.close(other, now_ns, "disagreement")
        self._dispatcher.reopen(attempt, now_ns, "disagreement: a third worker decides")

    def failed(self, worker: Worker, message: SequenceFailed, now_ns: int) -> None:
        """An attempt ended without finishing."""
        request = self._state.requests.get(message.request)
        if request is None or not 0 <= message.choice < len(request.choices):
            return
        attempt = request.choices[message.choice].find(message.attempt)
        if attempt is None or not attempt.on(worker):
            return
        if message.retry and any(each.refuses for each in attempt.workers):
            self._dispatcher.close(attempt, now_ns, f"{worker.id} drains")  # handed back in its drain time-out
            return
        if message.retry:
            self._dispatcher.transfer_failed(attempt, now_ns)
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id}: {message.reason}")
            return
        if len(attempt.choice.attempts) > 1:  # it may be the worker and not the request: the other one will tell
            self._broken(attempt, worker, message.reason, now_ns)
            return
        text = f"the engine could not compute this request: {message.reason}"
        self._dispatcher.fail(request, RequestFailure(500, "engine_error", text), now_ns)
