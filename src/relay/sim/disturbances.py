"""What disturbs whom, and since when nobody is: checks with deadlines excuse the disturbed. What lasts waits here for its end."""

from collections.abc import Callable

from relay.sim.kernel import Kernel


class Disturbances:
    """The part of a world that keeps account of harm. ``struck(host)`` is called before each."""

    def __init__(self, kernel: Kernel, struck: Callable[[str], None]) -> None:
        self.kernel = kernel
        self._struck = struck
        self._calm_ns: dict[str, int] = {}
        self._heals: dict[int, tuple[Callable[[], None], tuple[str, ...]]] = {}
        self._next_heal = 1

    def harm(self, host: str, text: str) -> None:
        """Something happens to ``host`` ("": to all of them)."""
        self._struck(host)
        self.kernel.tell("{}: {}", host or "everybody", text)
        self._calm(host)

    def _calm(self, host: str) -> None:
        self._calm_ns[host] = self.kernel.now_ns

    def calm_since_ns(self, host: str) -> int:
        """Since when nothing disturbs ``host``; now, if something does."""
        if any(host in hosts or "" in hosts for _, hosts in self._heals.values()):
            return self.kernel.now_ns
        return max(self._calm_ns.get(host, 0), self._calm_ns.get("", 0))

    def undisturbed_ns(self, host: str) -> int:
        """For how long nothing has happened to ``host`` in particular."""
        if any(host in hosts for _, hosts in self._heals.values()):
            return 0
        return self.kernel.now_ns - self._calm_ns.get(host, 0)

    def until_healed(self, duration_ns: int, host: str, undo: Callable[[], None], other: str | None = None) -> None:
        """Undo a lasting fault after ``duration_ns`` or when the world heals, whichever is first."""
        number = self.lasting(undo, (host,) if other is None else (host, other))
        self.kernel.after(duration_ns, self.recover, number)

    def lasting(self, undo: Callable[[], None], hosts: tuple[str, ...]) -> int:
        """A fault that disturbs ``hosts`` until ``recover`` is called with its number, or the world heals."""
        number = self._next_heal
        self._next_heal += 1
        self._heals[number] = (undo, hosts)
        return number

    def recover(self, number: int) -> None:
        undo, hosts = self._heals.pop(number, (None, ()))
        if undo is not None:
            undo()
            for host in hosts:
                self.harm(host, "recovers")

    def recover_all(self) -> None:
        """End everything that lasts."""
        for number in list(self._heals):
            self.recover(number)
