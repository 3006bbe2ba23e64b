"""Signals that ask for an end, heard between two steps."""

from __future__ import annotations

import signal
import sys
from typing import Any


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """Turns the first SIGINT or SIGTERM into a note that the loop reads between steps; a second one acts at once."""

    def __init__(self, *signals: signal.Signals) -> None:
        """`signals`: which to catch; both by default."""
        self.signum, self.signals = 0, signals or (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Stop:
        self.before = {s: signal.signal(s, self._note) for s in self.signals}
        return self

    def __exit__(self, *_: Any) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def _note(self, signum: int, _frame: Any) -> None:
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        if signal.SIGINT in self.signals:  # not in a worker, whose parent has said it
            print("\ntoymha: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raises Interrupted when a signal has arrived."""
        if self.signum:
            raise Interrupted(self.signum)
