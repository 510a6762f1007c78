"""Whether a request is taken at all: limits first, then room in the queue, then somebody to serve it."""

from relay.control.contract import RequestFailure, Submission
from relay.control.state import ClusterState


def refusal(state: ClusterState, submission: Submission) -> RequestFailure | None:
    """Why ``submission`` is not taken, or None. Every answer is final and at once: what is taken is never shed for load."""
    return _impossible(state, submission) or _unavailable(state) or _overload(state, submission)


def _impossible(state: ClusterState, submission: Submission) -> RequestFailure | None:
    num_prompt = len(submission.token_ids)
    if num_prompt == 0:
        return RequestFailure(400, "invalid_prompt", "the prompt has no tokens")
    total = num_prompt + submission.params.max_tokens
    if total > state.model.max_model_len:
        text = (
            f"this model's maximum context length is {state.model.max_model_len} tokens, but {total} were requested "
            f"({num_prompt} in the prompt, {submission.params.max_tokens} for the completion)"
        )
        return RequestFailure(400, "context_length_exceeded", text)
    return cannot_fit(state, total)


def cannot_fit(state: ClusterState, total: int) -> RequestFailure | None:
    """400 if no known worker's whole KV pool holds ``total`` tokens; before any worker was seen nothing is known."""
    pools = [worker.kv_tokens for worker in state.workers.values() if worker.kv_tokens]
    if not pools or total <= max(pools):
        return None
    text = f"prompt and completion need {total} KV-cache tokens, but the largest KV cache holds {max(pools)}"
    return RequestFailure(400, "kv_cache_exceeded", text)


def _unavailable(state: ClusterState) -> RequestFailure | None:
    retry_after_s = state.config.admission.retry_after_s
    if state.draining or state.stopped:
        return RequestFailure(503, "shutting_down", "the server is shutting down", retry_after_s)
    if state.ready_workers() or any(state.coming(worker) for worker in state.workers.values()):
        return None
    return RequestFailure(503, "no_workers", "no worker can serve this request and none is starting", retry_after_s)


def _overload(state: ClusterState, submission: Submission) -> RequestFailure | None:
    admission = state.config.admission
    queue = state.queue
    tokens = len(submission.token_ids) * submission.n
    if queue.num_new + submission.n <= admission.max_num_queued_reqs and (
        queue.num_new_tokens + tokens <= admission.max_num_queued_tokens
    ):
        return None
    text = f"the queue is full: {queue.num_new} sequences with {queue.num_new_tokens} tokens wait"
    return RequestFailure(429, "queue_full", text, admission.retry_after_s)
