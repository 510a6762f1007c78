"""Tokens from engines to clients: only the next position of a live attempt counts, so each is delivered exactly once."""

from relay.control.attempts import MAX_AHEAD_TOKENS, Attempt
from relay.control.commands import Deliver
from relay.control.contract import Delivery, RequestFailure
from relay.control.placement import Dispatcher
from relay.control.requests import Choice
from relay.control.state import ClusterState
from relay.control.transitions import AttemptState, AttemptTrigger
from relay.control.workers import Worker
from relay.protocol.messages import SequenceFailed, TokenEntry, Tokens


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
        """P's first token, then what D said earlier than P."""
        if attempt.state is not AttemptState.PREFILLING:
            return
        attempt.move(AttemptTrigger.PREFILL_TOKENS, now_ns)
        self._commit(attempt, worker, entry, now_ns)
        ahead = attempt.ahead
        attempt.ahead = []
        for early in ahead:
            if attempt not in attempt.choice.attempts:
                break
            self._from_decode(attempt, attempt.decode, early, now_ns)

    def _from_decode(self, attempt: Attempt, worker: Worker, entry: TokenEntry, now_ns: int) -> None:
        """D speaks: the handoff is complete, unless P's token has not reached us yet (another connection)."""
        if attempt.state is AttemptState.RUNNING:
            self._commit(attempt, worker, entry, now_ns)
            return
        if attempt.state is AttemptState.RESERVING:
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id} sent tokens before it accepted")
            return
        if entry.position > len(attempt.choice.committed) and attempt.state is AttemptState.PREFILLING:
            attempt.ahead.append(entry)
            if sum(len(early.token_ids) for early in attempt.ahead) > MAX_AHEAD_TOKENS:
                self._dispatcher.reopen(attempt, now_ns, "the first token never came")
            return
        attempt.move(AttemptTrigger.DECODE_TOKENS, now_ns)
        if attempt.prefill is not None:
            attempt.prefill.unbook(attempt)
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
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id}: {problem}")
            return
        committed += token_ids
        if worker.live.get(attempt):
            worker.prefilled(attempt)
        cached = 0
        if position == 0:
            cached = self._first(choice, worker, entry)
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
                ),
            )
        )
        self._state.counters["tokens"] += len(token_ids)
        if entry.finish is not None:
            self._dispatcher.finish(attempt, worker, now_ns)

    def _first(self, choice: Choice, worker: Worker, entry: TokenEntry) -> int:
        """Pin the numerics id; return the prompt tokens that were not computed."""
        choice.numerics_id = worker.numerics_id
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
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id}: position {entry.position} after {position}")
            return None
        known = position - entry.position
        if choice.committed[entry.position : entry.position + len(entry.token_ids)] != entry.token_ids[:known]:
            self._state.counters["token_disagreements"] += 1
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id} disagrees with tokens already delivered")
            return None
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

    def failed(self, worker: Worker, message: SequenceFailed, now_ns: int) -> None:
        """An attempt ended without finishing."""
        request = self._state.requests.get(message.request)
        if request is None or not 0 <= message.choice < len(request.choices):
            return
        attempt = request.choices[message.choice].find(message.attempt)
        if attempt is None or not attempt.on(worker):
            return
        if message.retry:
            if attempt.prefill is not None:
                attempt.choice.transfer_failures += 1
            self._dispatcher.reopen(attempt, now_ns, f"{worker.id}: {message.reason}")
            return
        text = f"the engine could not compute this request: {message.reason}"
        self._dispatcher.fail(request, RequestFailure(500, "engine_error", text), now_ns)
