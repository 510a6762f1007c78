"""The life of attempts: placing, accepting, refusing, reopening and ending them."""

from itertools import islice

from relay.config import SECOND
from relay.control.admission import cannot_fit
from relay.control.attempts import Attempt
from relay.control.commands import Ended, Fail, Quiesced, SendToEngine
from relay.control.contract import RequestFailure
from relay.control.parking import Parking
from relay.control.refusals import choice_delay_ns, hint_ns
from relay.control.requests import Choice, Request
from relay.control.router import Placement, Router
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import AttemptState, AttemptTrigger, ChoiceState, Trigger, WorkerState
from relay.control.workers import Worker
from relay.protocol.messages import Accept, Cancel, Prefill, Refuse, Reserve, Run

SCAN_LIMIT = 128  # waiting choices looked at for one change of the cluster


class Dispatcher:
    """Moves choices between the queue and the workers."""

    def __init__(self, state: ClusterState, router: Router, parking: Parking) -> None:
        self._state = state
        self._parking = parking
        self._router = router

    def submit(self, request: Request) -> None:
        self._state.changed = True
        for choice in request.choices:
            self._state.queue.add_new(choice)

    def pump(self, now_ns: int) -> None:
        """Place what can be placed, in order. A choice that cannot go now does not hold up those behind it."""
        queue = self._state.queue
        self._state.changed = False
        progress = True
        while progress and len(queue) and self._router.any_room():
            progress = False
            crowded = self._router.crowded()
            for choice in list(islice(queue, SCAN_LIMIT)):
                if choice.not_before_ns > now_ns or choice.state is not ChoiceState.WAITING:
                    continue
                if crowded and choice.numerics_id is None:
                    continue
                if choice.resumes and now_ns < self._state.resumes_wait_until_ns:
                    continue
                placement = self._router.choose(choice, now_ns)
                if placement is not None and self._pays(choice, placement, now_ns):
                    self._place(choice, placement, now_ns)
                    progress = True
                    crowded = self._router.crowded()

    def _pays(self, choice: Choice, placement: Placement, now_ns: int) -> bool:
        """Take a resume from the retry budget. With too little left, it and all resumes behind it wait."""
        if not choice.resumes:
            return True
        state = self._state
        budget, retry = state.retry_budget, state.config.retry
        budget.pass_time(now_ns)
        if budget.affords(placement.uncached):
            budget.spend(placement.uncached)
            state.counters["recomputed_tokens"] += placement.uncached
            return True
        wait_ns = max(int(retry.backoff_s * SECOND), budget.wait_ns(placement.uncached))
        state.resumes_wait_until_ns = now_ns + min(wait_ns, int(retry.max_backoff_s * SECOND))
        state.counters["resumes_delayed"] += 1
        return False

    def _place(self, choice: Choice, placement: Placement, now_ns: int) -> None:
        state = self._state
        submission = choice.request.submission
        failure = cannot_fit(state, len(submission.token_ids) + submission.params.max_tokens)
        if failure is not None:
            self.fail(choice.request, failure, now_ns)
            return
        state.queue.remove(choice)
        choice.move(Trigger.PLACE)
        choice.resumes = False
        self._open(choice, placement, now_ns)

    def hedge(self, attempt: Attempt, placement: Placement, now_ns: int) -> None:
        """Open a second attempt beside ``attempt``, whose worker is doubted."""
        choice = attempt.choice
        attempt.hedged = True
        self._state.counters["hedges"] += 1
        self._state.counters["hedge_tokens"] += placement.uncached
        doubted = " and ".join(worker.id for worker in attempt.workers if worker.doubted)
        self._tell(choice, now_ns, f"attempt {attempt.number} gets a hedge: {doubted} is doubted")
        choice.keep_evidence(attempt)
        self._open(choice, placement, now_ns).hedge = True

    def _open(self, choice: Choice, placement: Placement, now_ns: int) -> Attempt:
        """One more live attempt, at ``placement``."""
        state = self._state
        decode, prefill = placement.decode, placement.prefill
        transfer = 0
        if prefill is not None:
            transfer = state.next_transfer
            state.next_transfer += 1
        solo_until = choice.request.suspicion.solo_until(state.config.retry.max_blames)
        attempt = choice.begin(decode, prefill, transfer, solo_until, now_ns)
        hashes = choice.hashes(decode.numerics_id)
        decode.expect(attempt, hashes)
        if prefill is None:
            attempt.parks = attempt.hedged = placement.parks
            if not placement.parks:
                self._parking.leave(choice, decode)
            decode.orphans.pop((choice.request.submission.resume_key, choice.index), None)
            decode.book(attempt, placement.uncached_decode, now_ns)
            how = "park" if placement.parks else "run"
            text = f"attempt {attempt.number}: {how} on {decode.id}, {placement.uncached_decode} tokens uncached"
            self._tell(choice, now_ns, text)
            park_ms = int(state.config.retry.park_lease_s * 1000) if placement.parks else 0
            state.commands.append(SendToEngine(decode.key, Run(attempt.work(), park_ms)))
            return attempt
        prefill.expect(attempt, hashes)
        prefill.book(attempt, placement.uncached_prefill, now_ns)
        decode.book(attempt, 0, now_ns)
        decode.reserving += 1
        text = f"attempt {attempt.number}: {prefill.id} → {decode.id}, {placement.uncached_prefill} tokens uncached"
        self._tell(choice, now_ns, text)
        reserve = Reserve(attempt.work(), transfer, prefill.id, prefill.incarnation)
        state.commands.append(SendToEngine(decode.key, reserve))
        return attempt

    def accepted(self, worker: Worker, message: Accept, now_ns: int) -> None:
        """D made room: P may start."""
        attempt = self._placed(worker, message)
        if attempt is None or attempt.state is not AttemptState.RESERVING or worker is not attempt.decode:
            return
        if message.transfer != attempt.transfer or not 0 <= message.cached_tokens <= attempt.num_tokens:
            self.reopen(attempt, now_ns, f"{worker.id} accepted something else")
            return
        prefill = attempt.prefill
        assert prefill is not None
        assert worker.engine is not None
        worker.reserving -= 1
        worker.tight = False
        worker.reserving_refused.taken(attempt.started_ns)
        self._state.changed = True
        attempt.move(AttemptTrigger.ACCEPT, now_ns)
        self._parking.leave(attempt.choice, prefill)
        order = Prefill(
            work=attempt.work(),
            transfer=attempt.transfer,
            first_token=message.cached_tokens,
            addresses=worker.engine.kv_addresses,
            target=worker.id,
            target_incarnation=worker.incarnation,
        )
        self._state.commands.append(SendToEngine(prefill.key, order))

    def refused(self, worker: Worker, message: Refuse, now_ns: int) -> None:
        """The work was not taken: try elsewhere, wait, or give up if it never can be."""
        attempt = self._placed(worker, message)
        if attempt is None:
            return
        choice = attempt.choice
        self._state.counters[f"refused_{message.reason}"] += 1
        if message.reason == "too_long" and len(choice.attempts) == 1:
            text = f"{worker.id} cannot hold this request in its KV cache"
            self.fail(choice.request, RequestFailure(400, "kv_cache_exceeded", text), now_ns)
            return
        if message.reason == "full":
            self._full(attempt, worker, hint_ns(message.retry_after_ms), now_ns)
            return
        if message.reason in ("draining", "too_long"):
            self.close(attempt, now_ns, f"{worker.id} refused: {message.reason}")
            return
        choice.transfer_failures += 1
        self._state.breakers.workers[worker.id].failed(now_ns)
        self.reopen(attempt, now_ns, f"{worker.id} refused: {message.reason}")

    def _full(self, attempt: Attempt, worker: Worker, hint_ns: int, now_ns: int) -> None:
        """``worker`` has no room for ``attempt`` now. The choice waits for another place, or for room here."""
        choice, retry = attempt.choice, self._state.config.retry
        only = len(choice.attempts) == 1
        if only:
            choice.troubled = True
            choice.refusals += 1
        again_ns = now_ns + choice_delay_ns(choice.refusals, retry)
        if attempt.parks:
            self._parking.refused(choice, max(again_ns, now_ns + (hint_ns or int(retry.backoff_s * SECOND))))
            self.close(attempt, now_ns, f"{worker.id} keeps enough KV of others", refused_by=worker)
            return
        reserving = attempt.prefill is not None and worker is attempt.decode
        self.close(attempt, now_ns, f"{worker.id} is full", refused_by=worker)
        if reserving:
            worker.reserving_refused.refused(hint_ns, retry, now_ns)
            worker.tight = True
        else:
            worker.queueing_refused.refused(hint_ns, retry, now_ns)
        if not only:
            return
        choice.full_since_ns = choice.full_since_ns or now_ns
        if reserving:
            choice.reserve_after_ns = again_ns
        else:
            choice.not_before_ns = max(choice.not_before_ns, again_ns)

    def reopen(self, attempt: Attempt, now_ns: int, cause: str, *, innocent: bool = False) -> None:
        """The attempt failed: the next one starts from prompt and committed tokens, before new requests; or the choice goes on
        with its other one.

        ``innocent``: its worker was lost. That is no failure of the attempt, waits for nothing, and is bounded far higher: only
        because nobody can tell a request that makes the kernel kill its engine from bad luck.
        """
        retry = self._state.config.retry
        choice = attempt.choice
        choice.troubled = True
        if innocent:
            choice.losses += 1
        else:
            choice.failures += 1
        if choice.failures > retry.max_failures or choice.losses > retry.max_losses:
            text = f"gave up after {choice.failures + choice.losses} attempts without a new token; the last: {cause}"
            self.fail(choice.request, RequestFailure(500, "retries_exhausted", text), now_ns)
            return
        if len(choice.attempts) > 1:
            self.close(attempt, now_ns, cause)
            return
        if attempt.state is AttemptState.PREFILLING:
            self._leave_behind(attempt)
        self._state.counters["resumed"] += 1
        choice.resumes = True
        if choice.failures > 1 and not innocent:  # the first failover waits for nothing
            delay_s = min(retry.max_backoff_s, retry.backoff_s * 2 ** (choice.failures - 2))
            choice.not_before_ns = now_ns + int(delay_s * 1e9)
        self.close(attempt, now_ns, cause)

    def _leave_behind(self, attempt: Attempt) -> None:
        """``attempt`` ends for a reason that says nothing of the step in which it may be computed meanwhile."""
        computing = attempt.prefill or attempt.decode
        if attempt.state is not AttemptState.RESERVING and computing.state in LIVE:
            computing.linger(attempt.choice.request)

    def close(self, attempt: Attempt, now_ns: int, cause: str, *, refused_by: Worker | None = None) -> None:
        """End one attempt. Its choice goes on with the other one if there is one, else it waits for a new place."""
        choice = attempt.choice
        self._tell(choice, now_ns, f"attempt {attempt.number} ended after {len(choice.committed)} tokens: {cause}")
        self._cancel(attempt)
        self._leave(attempt, now_ns, stays_on=refused_by)
        computing = attempt.prefill or attempt.decode
        if choice.request.suspicion.blames and computing.state in LIVE:
            computing.watch(choice.request)
        for survivor in choice.attempts:
            survivor.hedge = False
        if not choice.attempts:
            choice.move(Trigger.REOPEN)
            self._state.queue.add_resumed(choice)

    def relocate(self, worker: Worker, now_ns: int) -> None:
        """Move what ``worker`` decodes to ready workers, as far as they have room now: each after its last committed token.

        What it prefills for others ends there by itself.
        """
        for attempt in list(worker.live):
            choice = attempt.choice
            if attempt.decode is not worker or attempt not in choice.attempts or choice.request.suspicion.blames:
                continue  # a suspect may hang what it computes on: it is not to go on to the next meanwhile
            if len(choice.attempts) > 1:
                self._leave_behind(attempt)
                self.close(attempt, now_ns, f"{worker.id} drains")
                continue
            placement = self._router.choose(choice, now_ns)
            if placement is None or placement.decode.state is not WorkerState.READY:
                continue
            self._state.counters["moved"] += 1
            self._leave_behind(attempt)
            self.close(attempt, now_ns, f"{worker.id} drains")
            self._place(choice, placement, now_ns)

    def parked(self, attempt: Attempt, now_ns: int) -> None:
        """P has drawn the first token and keeps the KV: the choice waits for room on D."""
        choice = attempt.choice
        self._tell(choice, now_ns, f"attempt {attempt.number} is parked on {attempt.decode.id}")
        self._state.breakers.workers[attempt.decode.id].succeeded(now_ns)
        self._parking.park(attempt, now_ns)
        self._leave(attempt, now_ns, stays_on=attempt.decode)
        choice.move(Trigger.REOPEN)
        self._state.queue.add_resumed(choice)

    def transfer_failed(self, attempt: Attempt, now_ns: int) -> None:
        """KV of ``attempt`` did not reach D, or nobody knows whether it did. Counts against the link, if there is one."""
        if attempt.prefill is None:
            self._state.breakers.workers[attempt.decode.id].failed(now_ns)
            return
        attempt.choice.transfer_failures += 1
        self._state.breakers.link_failed(attempt.prefill.id, attempt.decode.id, now_ns)

    def finish(self, attempt: Attempt, worker: Worker, now_ns: int) -> None:
        """The engine's last token of this choice was committed. Others that hold it are told."""
        choice = attempt.choice
        self._state.breakers.workers[worker.id].succeeded(now_ns)
        for other in attempt.workers:
            if other is not worker or attempt.prefill is not None:
                self._cancel_at(attempt, other)
        self._leave(attempt, now_ns)
        self._end(choice, now_ns)

    def stop(self, choice: Choice, now_ns: int, cause: str) -> None:
        """A stop string matched: nothing more of this choice is wanted."""
        self._tell(choice, now_ns, cause)
        for attempt in choice.attempts:
            if attempt.state is AttemptState.RUNNING:
                self._state.breakers.workers[attempt.decode.id].succeeded(now_ns)
        self._end(choice, now_ns)

    def fail(self, request: Request, failure: RequestFailure | None, now_ns: int) -> None:
        """End every choice; ``failure`` None: the client is gone, nobody is told."""
        for choice in request.choices:
            if choice.state is not ChoiceState.ENDED:
                self._abandon(choice, now_ns)
                choice.move(Trigger.END)
        if self._state.requests.pop(request.id, None) is None:
            return
        if failure is None:
            self._state.counters["requests_cancelled"] += 1
        else:
            self._state.story.tell(now_ns, request.id, 0, f"failed: {failure.code}: {failure.message}")
            self._state.counters["requests_failed"] += 1
            self._state.commands.append(Fail(request.id, failure))
        self.check_quiesced()

    def check_quiesced(self) -> None:
        if self._state.draining and not self._state.requests:
            self._state.commands.append(Quiesced())

    # --- parts ----------------------------------------------------------------------------------------------------

    def _placed(self, worker: Worker, message: Accept | Refuse) -> Attempt | None:
        """The live attempt that ``message`` of ``worker`` is about."""
        request = self._state.requests.get(message.request)
        if request is None or not 0 <= message.choice < len(request.choices):
            return None
        attempt = request.choices[message.choice].find(message.attempt)
        return attempt if attempt is not None and attempt.on(worker) else None

    def _end(self, choice: Choice, now_ns: int) -> None:
        self._abandon(choice, now_ns)
        choice.move(Trigger.END)
        request = choice.request
        request.open_choices -= 1
        if request.open_choices == 0:
            del self._state.requests[request.id]
            self._state.counters["requests_finished"] += 1
            self._state.commands.append(Ended(request.id))
            self.check_quiesced()

    def _abandon(self, choice: Choice, now_ns: int) -> None:
        """Cancel every live attempt and take the choice out of the queue."""
        for attempt in list(choice.attempts):
            self._cancel(attempt)
            self._leave(attempt, now_ns)
        self._state.changed = True
        self._state.queue.remove(choice)
        self._parking.leave(choice)
        choice.request.suspicion.clear(choice.index)

    def _leave(self, attempt: Attempt, now_ns: int, *, stays_on: Worker | None = None) -> None:
        """Take the attempt off its workers: it is live no more. They may have room then, but not one that it ``stays_on``."""
        self._state.changed = True
        reserving = attempt.state is AttemptState.RESERVING
        if reserving:
            attempt.decode.reserving -= 1
        for worker in attempt.workers:
            worker.unbook(attempt)
            if worker is not stays_on and not (reserving and worker is attempt.prefill):  # which it never was on
                worker.has_news()
        attempt.move(AttemptTrigger.END, now_ns)
        attempt.choice.attempts.remove(attempt)

    def _cancel(self, attempt: Attempt) -> None:
        for worker in attempt.workers:
            if attempt.state is AttemptState.RESERVING and worker is attempt.prefill:
                continue  # it knows nothing of this attempt, and may keep KV of an earlier one
            self._cancel_at(attempt, worker)

    def _cancel_at(self, attempt: Attempt, worker: Worker) -> None:
        if worker.state in LIVE:
            choice = attempt.choice
            cancel = Cancel(choice.request.id, choice.index, attempt.number)
            self._state.commands.append(SendToEngine(worker.key, cancel))

    def _tell(self, choice: Choice, now_ns: int, text: str) -> None:
        self._state.story.tell(now_ns, choice.request.id, choice.index, text)
