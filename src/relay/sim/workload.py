"""Requests of a run: prompts that share prefixes, several choices, stop tokens, penalties, deadlines, and now and then a poison."""

from relay.control.contract import Submission
from relay.protocol.sampling import SamplingParams
from relay.sim.backend import LATE, POISON
from relay.sim.swarm import MS
from relay.sim.tape import Tape

NUM_STEMS = 3
STEM_TOKENS = 64
MAX_LATE = 8  # outputs before the token that is poison


class Workload:
    """Draws submissions from the tape."""

    def __init__(self, tape: Tape, max_model_len: int) -> None:
        self._tape = tape
        self._max_model_len = max_model_len
        self._num_keys = 0
        self._stems = [[tape.below(POISON, "stem token") for _ in range(STEM_TOKENS)] for _ in range(NUM_STEMS)]

    def prompt(self) -> list[int]:
        tape = self._tape
        shared = tape.of((0, 8, 16, 33, 48, 64), "shared tokens")
        own = tape.between(1, 24, "own tokens")
        stem = tape.of(self._stems, "stem")
        if shared > 16 and tape.chance(200, "other start"):  # equal units after unequal ones
            stem = tape.of(self._stems, "start stem")[:16] + stem[16:]
        # Own tokens from one draw: what matters is that they differ, and by where.
        first = tape.below(POISON * POISON, "own")
        return stem[:shared] + [(first + index * (1 + first // POISON)) % POISON for index in range(own)]

    def submission(self, now_ns: int, poison: bool) -> Submission:
        tape = self._tape
        prompt = self.prompt()
        late = tape.below(MAX_LATE, "poison output") if poison and tape.chance(500, "late poison") else None
        if poison and late is None:
            prompt.append(POISON)
        room = self._max_model_len - len(prompt)
        max_tokens = min(tape.between(1, 24, "max_tokens"), room)
        if tape.chance(20, "too long"):
            max_tokens = room + 1
        if late is not None:
            max_tokens = min(late + 2, room)  # it is embedded, whatever comes before
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, tape.of((0, 0, 4), "min_tokens")),
            seed=tape.below(LATE, "seed") if late is None else LATE + late,
            logprobs=tape.of((None, None, 0, 2), "logprobs"),
            presence_penalty=tape.of((0.0, 0.0, 0.5), "penalty"),
            eos_token_ids=tape.of(((), (1, 2, 3)), "eos") if late is None else (),
        )
        deadline_ns = now_ns + tape.between(20, 2000, "deadline ms") * MS if tape.chance(100, "deadline") else None
        n = tape.of((1, 1, 1, 2, 3), "n")
        return Submission(prompt, params, n, deadline_ns=deadline_ns, resume_key=self._key())

    def probe(self) -> Submission:
        """Sent after the healing: must finish."""
        params = SamplingParams(max_tokens=4, seed=self._tape.below(1 << 20, "probe seed"))
        return Submission(self.prompt()[: self._max_model_len - 8], params, resume_key=self._key())

    def _key(self) -> bytes:
        self._num_keys += 1
        return self._num_keys.to_bytes(16, "little")
