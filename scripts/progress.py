"""A progress bar on a terminal, for the other scripts: rewritten five times a second, gone at the end; nothing elsewhere."""
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
        """position: of the total, in the same unit; what: words for what is done, such as "7 documents"."""
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
