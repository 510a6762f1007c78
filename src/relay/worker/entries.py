"""What a step brought a sequence, as it is told to the gateway and to D."""

from collections.abc import Callable

from relay.engine.sequence import SequenceUpdate
from relay.ids import SequenceKey
from relay.kernels.backend import SampledToken
from relay.protocol.messages import TokenEntry, Work
from relay.transfer.frame import Handoff

DigestKv = Callable[[list[int], int], list[bytes]]


def token_entry(name: SequenceKey, work: Work, update: SequenceUpdate, digest_kv: DigestKv) -> TokenEntry:
    """The entry of ``update`` as its owner knows it; at the finish of a capturing sequence with digests of its KV."""
    tokens = update.tokens
    logprobs = None
    if work.params.logprobs is not None:
        logprobs = [(_logprob(token), token.top) for token in tokens]
    kv_digests = None
    if update.finish is not None and update.block_table is not None:
        kv_digests = digest_kv(update.block_table, update.num_computed)
    return TokenEntry(
        *name,
        position=update.position,
        token_ids=[token.token_id for token in tokens],
        finish=update.finish,
        logprobs=logprobs,
        cached_tokens=update.cached_tokens,
        logit_digests=update.logit_digests,
        kv_digests=kv_digests,
    )


def _logprob(token: SampledToken) -> float:
    """Raises ValueError for a backend that draws without the logprob it was asked for."""
    if token.logprob is None:
        raise ValueError(f"token {token.token_id} was drawn without its logprob")
    return token.logprob


def handoff_of(update: SequenceUpdate) -> Handoff:
    """P's first token with everything D needs to report it as P did."""
    token = update.tokens[0]
    digests = update.logit_digests
    return Handoff(
        token_id=token.token_id,
        logprob=token.logprob,
        top=token.top,
        cached_tokens=update.cached_tokens,
        logit_digest=digests[0] if digests else None,
    )
