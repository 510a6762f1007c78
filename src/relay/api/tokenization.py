"""Tokenizing off the event loop, in a bounded thread pool (the tokenizer gives up the interpreter lock while it works)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from relay.api.errors import ApiError
from relay.api.validation import ApiLimits

_T = TypeVar("_T")


class TokenizerPool:
    """Runs tokenizer and template work for the endpoints; refuses with 429 rather than queueing without bound."""

    def __init__(self, limits: ApiLimits) -> None:
        self._executor = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="tokenize")
        self._limit = limits.max_tokenizing
        self._waiting = 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """The result of ``work``, done in a thread. Raises ApiError 429 when too many wait already."""
        if self._waiting >= self._limit:
            raise ApiError(
                "Too many requests are waiting to be tokenized.", status=429, code="queue_full", retry_after_s=1
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._executor.shutdown(wait=False, cancel_futures=True)
