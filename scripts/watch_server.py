"""The server of watch.py --serve. It only serves watch.html, and /data, for which watch.html asks at intervals. It only answers
this machine. From another machine: ssh -L 8765:localhost:8765 HOST."""
import gzip, http.server, json, os, sys, threading, time, urllib.parse

POINTS = 512        # a curve has up to twice as many points
LOCAL = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
                               "img-src data:",
}
SHOWN = {
    "train/CrossEntropyLoss", "optim/total_grad_norm", "optim/learning_rate_group0", "throughput/device/tokens_per_second",
    "System/Peak GPU Memory (MB)", "system/gpu_power_watts", "system/gpu_temperature_celsius_max", "system/gpu_sm_clock_mhz_min",
    "system/tokens_per_joule", "router/LoadBalancingLoss", "router/ZLoss", "router/entropy", "router/largest_share",
    "router/idle_experts", "router/dropped_tokens",
}


def is_number(value):
    """Whether sums with the value stay finite. JSON has neither NaN nor infinity: no browser could read an answer that contains
    one."""
    return isinstance(value, (int, float)) and abs(value) < 1e300


def shown(record):
    """The value of each curve on the page. FP8 errors are means over blocks: quant/KIND/error."""
    values, errors = {}, {}
    for name, value in record.items():
        if not is_number(value):
            continue
        if name in SHOWN or name.startswith("eval/") and name.endswith("/CrossEntropyLoss"):
            values[name] = value
        elif name.startswith("quant/") and name.endswith("/error"):
            errors.setdefault(name.split("/")[1], []).append(value)
    values.update((f"quant/{kind}/error", sum(x) / len(x)) for kind, x in errors.items())
    return values


class Curve:
    """Mean, minimum and maximum of every `stride` values. If there are too many buckets, they are merged in pairs."""

    def __init__(self):
        self.stride, self.buckets = 1, []       # a bucket: count, sum of steps, sum of values, least, greatest

    def add(self, step, value):
        if self.buckets and self.buckets[-1][0] < self.stride:
            n, steps, total, low, high = self.buckets[-1]
            self.buckets[-1] = (n + 1, steps + step, total + value, min(low, value), max(high, value))
            return
        if len(self.buckets) == 2 * POINTS:
            self.buckets = [(a[0] + b[0], a[1] + b[1], a[2] + b[2], min(a[3], b[3]), max(a[4], b[4]))
                            for a, b in zip(self.buckets[::2], self.buckets[1::2])]
            self.stride *= 2
        self.buckets.append((1, step, value, value, value))

    def as_json(self):
        short = lambda x: float(f"{x:.6g}")
        curve = {"x": [round(b[1] / b[0], 1) for b in self.buckets], "y": [short(b[2] / b[0]) for b in self.buckets]}
        if self.stride > 1:
            curve.update(low=[short(b[3]) for b in self.buckets], high=[short(b[4]) for b in self.buckets])
        return curve


class Run:
    def __init__(self, follower, name):
        self.follower, self.name, self.version = follower, name, 0
        self.begin()

    def begin(self):
        self.curves, self.step, self.tokens, self.skipped, self.changed = {}, 0, 0, 0, None

    def poll(self):
        """Reads new lines; after a step back all lines, because buckets cannot be split. Returns whether there may be more
        lines."""
        records, void = self.follower.poll()
        if void is not None:
            self.follower.forget_from(0)
            self.begin()
            self.version += 1
            return True
        for record in records:
            self.step = max(self.step, record["step"])
            tokens = record.get("throughput/total_tokens")
            self.tokens = tokens if is_number(tokens) else self.tokens
            self.skipped += bool(record.get("optim/step_skipped"))
            for name, value in shown(record).items():
                self.curves.setdefault(name, Curve()).add(record["step"], value)
        if records:
            self.changed = os.path.getmtime(self.follower.path) if os.path.exists(self.follower.path) else None
            self.version += 1
        return bool(records)

    def as_json(self):
        return {"name": self.name, "step": self.step, "tokens": self.tokens, "skipped": self.skipped, "changed": self.changed,
                "curves": {name: curve.as_json() for name, curve in sorted(self.curves.items())}}


class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "coat.c"

    def do_GET(self):
        """NOTE: another name in Host comes from a site that lets the browser read this page for it (DNS rebinding)."""
        address = urllib.parse.urlsplit(self.path)
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in LOCAL:
            self.answer(403, "text/plain", b"open http://localhost\n")
        elif address.path == "/":
            self.answer(200, "text/html; charset=utf-8", self.server.page)
        elif address.path == "/data":
            self.answer(200, "application/json", self.server.data(address.query))
        else:
            self.answer(404, "text/plain", b"there are / and /data\n")

    def answer(self, status, kind, body):
        body = gzip.compress(body, 1) if "gzip" in self.headers.get("Accept-Encoding", "") else body
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, followers, names, port):
        super().__init__(("127.0.0.1", port), Page)
        self.runs = [Run(follower, name) for follower, name in zip(followers, names)]
        self.lock = threading.Lock()
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "watch.html"), "rb") as file:
            self.page = file.read()

    def data(self, query):
        """All curves; only the time since the last line if the browser already has this version of the curves."""
        with self.lock:
            while any([run.poll() for run in self.runs]):
                pass
            version = ".".join(str(run.version) for run in self.runs)
            answer = {"version": version, "now": time.time()}
            if query != "have=" + version:
                answer["runs"] = [run.as_json() for run in self.runs]
        return json.dumps(answer, separators=(",", ":")).encode()


def serve(followers, names, port):
    try:
        server = Server(followers, names, port)
    except (OSError, OverflowError) as error:
        sys.exit(f"error: port {port}: {getattr(error, 'strerror', error)}; choose another port with --port")
    print(f"http://localhost:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
