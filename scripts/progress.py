"""A progress bar for the other scripts. On a terminal it is redrawn five times a second, and removed at the end; elsewhere it
prints nothing."""
import sys, time

WIDTH, AGAIN = 30, 0.2      # columns of the bar; seconds


class Progress:
    def __init__(self, total):
        self.total, self.done = max(1, total), 0
        self.begin = self.shown = time.monotonic()
        self.on = sys.stderr.isatty()

    def __enter__(self):
        return self

    def show(self, position, what):
        """position: current position, in the unit of the total; what: a text about the current state, such as "7 documents"."""
        now = time.monotonic()
        if not self.on or now - self.shown < AGAIN:
            return
        self.shown = now
        share = min(1, position / self.total)
        bar = "#" * int(share * WIDTH)
        left = (now - self.begin) * (1 - share) / max(share, 1e-9)
        sys.stderr.write(f"\r[{bar:{WIDTH}}] {share:4.0%}  {what}, {left:.0f} s left\x1b[K")
        sys.stderr.flush()

    def add(self, what, more):
        self.done += more
        self.show(self.done, what)

    def __exit__(self, *_):
        if self.on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
