"""Every invariant: what it says, why it is wanted, and where it is asserted. ``docs/invariants.md`` is made from this."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invariant:
    """``asserted``: "file: symbol", files below src/relay or tests."""

    name: str
    statement: str
    why: str
    asserted: tuple[str, ...]


INVARIANTS = (
    Invariant(
        "I1",
        "the client's stream is a gap-free prefix of the oracle's tokens and ends once",
        "It is what Relay promises: the tokens of a calm run, whatever dies.",
        ("sim/clients.py: Client.deliver", "sim/clients.py: Client.end"),
    ),
    Invariant(
        "I2",
        "the committed position never goes back and is what the client was sent",
        "A resumed attempt starts from the committed tokens; were they not the client's, it would continue another text.",
        ("sim/checkers.py: Checkers._committed",),
    ),
    Invariant(
        "I3",
        "nothing from an old attempt, incarnation or owner changes state",
        "Suspicion is enough to move on only if those who were wrongly suspected can do no harm when they come back.",
        ("sim/checkers.py: Checkers.before_gateway", "sim/checkers.py: Checkers.after_gateway"),
    ),
    Invariant(
        "I4",
        "attempts agree on every position, token and logprobs; a disagreement is an alarm, never silently resolved",
        "Hedges and resumes rest on exactness, so a machine that computes wrongly must be heard of and not outvoted.",
        (
            "sim/agreement.py: Agreement.heard",
            "sim/agreement.py: Agreement.delivered",
            "sim/checkers.py: Checkers.after_gateway",
        ),
    ),
    Invariant(
        "I5",
        "every accepted request ends: finished, cancelled, deadline, quarantined or numerics_changed; never lost",
        "A stream that hangs is worse than one that fails: nobody can retry it.",
        ("sim/judge.py: judge", "sim/world.py: World.settle", "sim/bounds.py: bounded"),
    ),
    Invariant(
        "I6",
        "a choice has one live attempt, two with a hedge; an attempt runs on one worker, and P and D of it are one each",
        "More would compute for nobody, and would have to be fenced from each other.",
        ("control/invariants.py: violations", "sim/checkers.py: Checkers.audit"),
    ),
    Invariant(
        "I7",
        "decode reads a block only if complete, verified, of the right fingerprint and epoch",
        "KV that is partly there, damaged or somebody else's gives fluent garbage that nothing later can notice.",
        ("sim/checkers.py: Checkers._received", "sim/forgery.py: admitted"),
    ),
    Invariant(
        "I8",
        "every held block, sequence and transfer has a live owner",
        "What nobody owns is never freed; pools fill up and the cluster stands still though nothing has failed.",
        ("sim/checkers.py: Checkers.audit", "sim/leaks.py: no_leaks"),
    ),
    Invariant(
        "I9",
        "blocks: free + used + cached = total",
        "A block counted twice is written by two sequences; one not counted is lost until the restart.",
        ("engine/scheduler.py: Scheduler.check", "sim/checkers.py: Checkers.worker_event"),
    ),
    Invariant(
        "I10",
        "every queue and buffer is bounded, and so are the attempts of a request that gets no token",
        "Overload has to be refused at the door, with a time to come back, not found out by the kernel's OOM killer.",
        (
            "sim/checkers.py: Checkers._bounds",
            "sim/bounds.py: within_budget",
            "sim/bounds.py: bounded",
            "sim/bounds.py: AttemptRate.audit",
        ),
    ),
    Invariant(
        "I11",
        "a poison request kills at most three engines, and no innocent is quarantined",
        "A router that retries takes one malformed request to every worker it has.",
        ("sim/judge.py: judge", "sim/poison.py: taken"),
    ),
    Invariant(
        "I12",
        "after the faults end every worker is ready again and serves",
        "Capacity that does not come back by itself is lost at the first bad minute of the night.",
        ("sim/world.py: World.settle", "sim/leaks.py: no_leaks", "sim/bounds.py: bounded"),
    ),
    Invariant(
        "I13",
        "KV crosses only between equal numerics ids; a stream never mixes them",
        "Other kernels give other last bits, and other bits another token sooner or later.",
        ("sim/checkers.py: Checkers._core_state", "transfer/handshake.py: mismatch"),
    ),
    Invariant(
        "I14",
        "jumps of the wall clock, and where the monotonic clock begins, change nothing",
        "NTP steps, suspended machines and leap seconds must not look like silence.",
        (
            "tests/sim/test_clocks.py: test_the_wall_clock_may_jump",
            "tests/test_purity.py: test_pure_module_imports_nothing_impure",
        ),
    ),
    Invariant(
        "I15",
        "the gateway's own stall is not others' death",
        "A monitor that slept hears nobody; if it trusts that, one long garbage collection replaces the cluster.",
        ("sim/checkers.py: Checkers._rightly_killed",),
    ),
    Invariant(
        "I16",
        "any gateway can continue any stream, exactly where its client stopped reading",
        "Exactness is the log: what a dead gateway knew can be computed again, or taken over from the worker that goes on.",
        ("sim/clients.py: Client.deliver", "sim/scenarios/gateways.py: SCENARIOS"),
    ),
    Invariant(
        "I17",
        "a drain takes nothing new, loses nothing and ends in time",
        "Upgrades are the commonest of all faults; nobody may notice them.",
        ("sim/drains.py: Drains",),
    ),
    Invariant(
        "I18",
        "strangers get nowhere: whatever they send, nothing changes",
        "Ports are scanned, old processes come back, and clusters share networks.",
        ("sim/strangers.py: StrangerWatch", "sim/scenarios/hostile.py: SCENARIOS"),
    ),
    Invariant(
        "scenario",
        "what a directed scenario demands of its own",
        "Some promises are about one situation: how soon, how often, by whom.",
        ("sim/scenarios/stage.py: Stage.require",),
    ),
    Invariant(
        "detection",
        "silence, late answers and dead transfers are noticed within their deadlines",
        "What is not noticed is not mended.",
        ("sim/checkers.py: Checkers._deadlines", "sim/checkers.py: Checkers._transfers"),
    ),
    Invariant(
        "core",
        "the cores' own invariants hold and no core raises",
        "An exception in a core ends the process that everybody depends on.",
        ("control/invariants.py: violations", "sim/run.py: run_tape"),
    ),
)

STATEMENTS = {invariant.name: invariant.statement for invariant in INVARIANTS}
