"""Messages between gateway, agents and engines. msgspec MessagePack, one struct a message, tagged by ``type``.

Sizes are bounded by the framing (``framing.py``); every number is validated by the receiving core, not trusted.
Direction is in the section headings. (request, choice, attempt) is a ``SequenceKey`` spread out; anything carrying an
attempt older than the receiver's is dropped.
"""

from typing import Literal

import msgspec

from relay.protocol.sampling import SamplingParams

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

RefuseReason = Literal["full", "too_long", "numerics", "draining", "unknown_model"]
FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode", "both"]


class Message(msgspec.Struct, tag_field="type", omit_defaults=True):
    """Base of all messages."""


# --- any worker process → gateway, first on every connection -------------------------------------------------------


class Hello(Message, tag="hello"):
    """Who is calling. ``process`` tells which of a worker's two connections this is."""

    process: Literal["agent", "engine"]
    worker: str
    incarnation: int
    pid: int
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    role: Role = "both"
    host: str = ""  # boot id + network and ipc namespace: shared memory only where it can work
    kv_addresses: list[str] = []  # "tcp://127.0.0.1:port"
    transports: tuple[str, ...] = ("tcp",)  # how KV can reach this engine, best first; as in ``kv_addresses``
    tensor_parallel: int = 1
    rank: int = 0
    devices: list[str] = []  # what the engine computes on, by rank; empty: processors
    model_digest: str = ""
    numerics_id: str = ""
    kv_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 0
    max_num_seqs: int = 0
    authentication: bytes = b""  # empty until the security work fills it
    orphans: list[tuple[bytes, int]] = []  # engine: as in ``Orphans``


class Welcome(Message, tag="welcome"):
    """Gateway's answer to an accepted hello. ``epoch`` grows with every life of ``gateway``: older ones have nothing to say."""

    protocol: int
    gateway: str = ""
    epoch: int = 0


class Rejected(Message, tag="rejected"):
    """Gateway's answer to a hello it refuses; names both fingerprints where they differ."""

    reason: str


# --- gateway → engine -----------------------------------------------------------------------------------------------


class Work(msgspec.Struct, omit_defaults=True):
    """One attempt at one choice: everything an engine needs, resume included. ``token_ids`` = prompt + committed tokens."""

    request: int
    choice: int
    attempt: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    cache_salt: str = ""
    capture: bool = False  # report logits digests with tokens and KV digests at the finish (relay verify)
    resume_key: bytes = b""  # names the request over gateways; empty: nobody can ask for it again
    solo_until: int = (
        0  # positions before this are computed in steps that hold nothing else: it may be what kills engines
    )


class Run(Message, tag="run"):
    """Prefill and decode on this worker (colocated, short or cached prompts, or no other worker left).

    If the worker holds an orphan of this resume key and choice, the orphan gets this name and owner, and its tokens from
    ``work``'s position on are reported.

    ``park_ms`` > 0: no decode worker has room. Draw the first token only, and keep the KV pinned for so long, or until Cancel or a
    newer attempt, which then finds the prompt computed.
    """

    work: Work
    park_ms: int = 0


class Reserve(Message, tag="reserve"):
    """To D: make room for ``work``; KV will come from ``source``. Answer: Accept or Refuse."""

    work: Work
    transfer: int  # unique over all gateways and their lives
    source: str  # worker id of P
    source_incarnation: int


class Prefill(Message, tag="prefill"):
    """To P: compute ``work``'s prompt, stream KV from ``first_token`` on to D, sample the first token, hand off."""

    work: Work
    transfer: int
    first_token: int  # D already holds positions before this one
    addresses: list[str]
    target: str
    target_incarnation: int


class Cancel(Message, tag="cancel"):
    """Stop and free; idempotent, legal in every state, unknown keys are ignored. ``attempt`` and every older one."""

    request: int
    choice: int
    attempt: int


class Drain(Message, tag="drain"):
    """Take no new work; finish or hand back what runs, then exit 0."""


# --- engine → gateway -----------------------------------------------------------------------------------------------


class Accept(Message, tag="accept"):
    """D's room is made. ``cached_tokens``: positions D's prefix cache already holds (P need not send them)."""

    request: int
    choice: int
    attempt: int
    transfer: int
    cached_tokens: int


class Refuse(Message, tag="refuse"):
    """The work was not taken; nothing is held for it."""

    request: int
    choice: int
    attempt: int
    reason: RefuseReason
    retry_after_ms: int = 0


class TokenEntry(msgspec.Struct, array_like=True, omit_defaults=True):
    """Tokens of one sequence from one step. ``position`` counts generated tokens before the first of ``token_ids``,
    committed ones of earlier attempts included."""

    request: int
    choice: int
    attempt: int
    position: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None  # per token: (logprob, top alternatives)
    cached_tokens: int = 0  # prompt tokens not computed; on the first entry of an attempt
    logit_digests: list[bytes] | None = None
    kv_digests: list[bytes] | None = None  # on the finish: one a full 16-token unit, over all layers


class Tokens(Message, tag="tokens"):
    """All tokens of one engine step."""

    entries: list[TokenEntry]


HANDED_BACK = "draining"  # reason of a sequence that was not finished in the engine's drain time-out


class SequenceFailed(Message, tag="failed"):
    """This attempt ended without finishing. ``retry``: the fault lay in the transfer or the peer, not in the request."""

    request: int
    choice: int
    attempt: int
    reason: str
    retry: bool


class CacheChanged(Message, tag="cache"):
    """Prefix-cache contents for the router, by unit hash; ``sequence`` is gap-checked, ``reset`` drops all that came before."""

    sequence: int
    added: list[bytes] = []
    removed: list[bytes] = []
    reset: bool = False


class Load(Message, tag="load"):
    """What the engine holds; sent when it changes, at most every 50 ms."""

    kv_used: int
    kv_total: int
    running: int
    waiting: int
    waiting_tokens: int
    counters: dict[str, float] = {}  # monotonic, for /metrics


class Orphans(Message, tag="orphans"):
    """All (resume key, choice) of sequences that have lost their gateway and can be taken over by a ``Run``; the whole list."""

    keys: list[tuple[bytes, int]] = []


class Drained(Message, tag="drained"):
    """Nothing is held any more; the process is about to exit 0."""


# --- agent → gateway ------------------------------------------------------------------------------------------------


class ComputedRow(msgspec.Struct, array_like=True, frozen=True):
    """What a step was computing of one sequence, by its owner's name for it: positions before ``end``."""

    request: int
    choice: int
    attempt: int
    end: int


class Heartbeat(Message, tag="heartbeat"):
    """From the agent, every 100–250 ms. ``step`` moves while the engine computes; ``phase`` is what it declares.

    ``manifest``: when a step takes long, its rows, other gateways' too; ``alone``: it holds those of one request and no others.
    """

    step: int
    phase: Literal["starting", "loading", "ready", "stepping", "draining", "compiling"]
    phase_age_ms: int  # of "stepping": without the time the engine was stopped or waited for a processor
    engine_state: str  # kernel process state letter; "X": it is dying, how will be told
    manifest: list[ComputedRow] = []
    alone: bool = False


GATEWAY_LOST_STATUS = 8  # exit status of an engine that ended because its gateway's connection did: no crash of its own


class EngineExited(Message, tag="engine_exited"):
    """The engine of this worker is gone. ``signal`` or ``status``, as waitid tells.

    ``manifest`` and ``alone`` are those of the step it died in, as in a heartbeat. ``hung_ms``: a gateway had it killed because
    that step had not ended after so long; then it says neither of the others.
    """

    status: int | None = None
    signal: int | None = None
    manifest: list[ComputedRow] = []
    alone: bool = False
    hung_ms: int = 0


GatewayToEngine = Welcome | Rejected | Run | Reserve | Prefill | Cancel | Drain
EngineToGateway = Hello | Accept | Refuse | Tokens | SequenceFailed | CacheChanged | Load | Orphans | Drained
AgentToGateway = Hello | Heartbeat | EngineExited
GatewayToAgent = Welcome | Rejected | Drain
