#!/usr/bin/env python3
"""scripts/watch.py: sends and serves metrics.jsonl. The writers of TensorBoard, Weights & Biases and Trackio run if they are
installed (pip install tensorboard wandb trackio); the test reads back what they wrote. test_metrics.py tests reading."""
import array, glob, gzip, http.client, importlib.util, itertools, json, math, os, shutil, signal, subprocess, sys
import tempfile, threading, time, types, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WATCH = os.path.join(TOP, "scripts", "watch.py")
sys.path.insert(0, os.path.join(TOP, "scripts"))
sys.dont_write_bytecode = True

import metrics
import watch
import watch_server
import watch_to

LOSS = "train/CrossEntropyLoss"


def record(step, salt=0, **more):
    """Writes lines as the program does. salt: makes the values of a step that is trained again differ."""
    return {"step": step, LOSS: 10 / step + salt, "optim/step_skipped": False, "throughput/total_tokens": 1024 * step,
            "time": 1000 + step, **more}


def as_lines(records):
    return "".join(json.dumps(r) + "\n" for r in records).encode()


class Folder(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-watch-")
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.run_folder = self.make_run("run")

    def make_run(self, name):
        os.makedirs(folder := os.path.join(self.top, name))
        return folder

    def append(self, records, folder=None):
        with open(os.path.join(folder or self.run_folder, "metrics.jsonl"), "ab") as file:
            file.write(records if isinstance(records, bytes) else as_lines(records))

    def cut(self, step):
        """Deletes later steps in the same file, as model/run/log.c does at a resume."""
        path = os.path.join(self.run_folder, "metrics.jsonl")
        with open(path, "rb") as file:
            lines = file.readlines()
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
        os.truncate(path, len(b"".join(kept)))


class FakeWriter:
    """Returns the values by step that a program should have at the end, for each of its runs."""
    takes_late = False

    def __init__(self):
        self.written, self.opened = {}, []

    def open(self, sender, new):
        self.opened.append(sender.part["name"])
        return self.written.setdefault(sender.part["name"], [])

    def write(self, run, step, seconds, values):
        run.append((step, seconds, values))

    def flush(self, run):
        pass

    close = flush
    rewind = watch_to.InParts.rewind

    def last_step(self, sender, run):
        return None


class SenderTest(Folder):
    def setUp(self):
        super().setUp()
        self.writer = FakeWriter()

    def sender(self, folder=None, name="run"):
        options = types.SimpleNamespace(to="fake", folder=None)
        return watch_to.Sender(self.writer, folder or self.run_folder, name, options)

    def steps(self, name="run"):
        return [step for step, _, _ in self.writer.written[name]]

    def test_names_and_values(self):
        more = {"step": 1, "time": 7, "eval/val/CrossEntropyLoss": None, "list": [1, 2]}
        self.append([record(1), more, record(2)])
        sender = self.sender()
        sender.send()
        (step, seconds, values), = self.writer.written["run"]       # the last step may be incomplete
        self.assertTrue(math.isnan(values.pop("eval/val/CrossEntropyLoss")))
        self.assertEqual((step, seconds, values), (1, 1001, {LOSS: 10, "optim/step_skipped": 0, "throughput/total_tokens": 1024}))
        sender.close()
        self.assertEqual(self.steps(), [1, 2])

    def test_stopped_and_started(self):
        for last in range(1, 9):
            self.append([record(last)])
            sender = self.sender()
            sender.send()
            sender.close()
        self.assertEqual(self.steps(), list(range(1, 9)))
        self.assertEqual(set(self.writer.opened), {"run"})

    def test_killed_between_steps(self):
        """No line is sent twice, and no line is lost that had not been sent."""
        for last in range(2, 9):
            self.append([record(2 * last), record(2 * last + 1)])
            self.sender().send()
        self.assertEqual(self.steps(), list(range(4, 17)))

    def test_back_while_watching(self):
        self.append([record(i) for i in range(1, 7)])
        sender = self.sender()
        sender.send()
        self.cut(3)
        self.append([record(i, 1) for i in range(4, 7)])
        sender.send()
        sender.close()
        self.assertEqual((self.steps(), self.steps("run-from-4")), ([1, 2, 3, 4, 5], [4, 5, 6]))
        self.assertEqual(self.noted(), [1, 2, 3, 4, 5, 6])

    def test_back_to_what_was_not_sent(self):
        """Step 6 waits for its evaluation. The run that writes step 6 again is the same run."""
        self.append([record(i) for i in range(1, 7)])
        sender = self.sender()
        sender.send()
        self.cut(5)
        self.append([record(i, 1) for i in range(6, 8)])
        sender.send()
        sender.close()
        self.assertEqual(self.steps(), [1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(self.writer.written["run"][5][2][LOSS], 10 / 6 + 1)

    def test_back_while_away(self):
        self.append([record(i) for i in range(1, 7)])
        sender = self.sender()
        sender.send()
        sender.close()
        self.cut(2)
        self.append([record(i, 1) for i in range(3, 30)])
        for _ in range(2):              # the second time there is nothing new
            sender = self.sender()
            sender.send()
            sender.close()
        self.assertEqual((self.steps(), self.steps("run-from-3")), (list(range(1, 7)), list(range(3, 30))))
        self.assertEqual(self.noted(), list(range(1, 30)))

    def noted(self):
        """Returns the steps of the lines in watch.index. The line ends there must be those in the file."""
        with open(os.path.join(self.run_folder, "fake", "watch.index"), "rb") as file:
            numbers = array.array("q", file.read())
        with open(os.path.join(self.run_folder, "metrics.jsonl"), "rb") as file:
            lines = file.readlines()
        self.assertEqual(list(numbers[0::3]), list(itertools.accumulate(map(len, lines)))[:len(numbers) // 3])
        return list(numbers[1::3])

    def test_several(self):
        other = self.make_run("other")
        self.append([record(1)])
        self.append([record(1, 5), record(2, 5)], other)
        senders = [self.sender(), self.sender(other, "other")]
        for sender in senders:
            sender.send()
            sender.close()
        self.assertEqual((self.steps(), self.steps("other")), ([1], [1, 2]))
        self.assertEqual(self.writer.written["other"][0][2][LOSS], 15)

    def test_names_of_runs(self):
        self.assertEqual(watch.name_runs(["a/x", "b/y/"]), ["x", "y"])
        self.assertEqual(watch.name_runs(["a/x", "b/x"]), ["a/x", "b/x"])
        with self.assertRaises(SystemExit):
            watch.name_runs(["a/x", "a/../a/x"])


class ServerTest(Folder):
    def setUp(self):
        super().setUp()
        self.other = self.make_run("<b>other")
        self.server = watch_server.Server([metrics.Follower(f) for f in (self.run_folder, self.other)], ["run", "<b>other"], 0)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def get(self, path, host="localhost", method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=10)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"{host}:{self.server.server_address[1]}")
        connection.putheader("Accept-Encoding", "gzip")
        connection.endheaders()
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, gzip.decompress(body) if response.getheader("Content-Encoding") == "gzip" else body

    def data(self, have=""):
        response, body = self.get("/data?have=" + have)
        self.assertEqual(response.status, 200)
        return json.loads(body)

    def test_here_alone(self):
        self.assertEqual(self.server.server_address[0], "127.0.0.1")
        self.assertEqual(self.get("/", "evil.example")[0].status, 403)
        for path in ("/watch.py", "/../scripts/watch.py", "/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd", "/data/../x", "/."):
            response, body = self.get(path)
            self.assertEqual((response.status, body), (404, b"there are / and /data\n"), path)
        self.assertEqual(self.get("/", method="POST")[0].status, 501)

    def test_page(self):
        """The page names no other address: it can request only local files, and its policy forbids others."""
        response, body = self.get("/")
        self.assertEqual(response.status, 200)
        self.assertIn("default-src 'none'", response.getheader("Content-Security-Policy"))
        text = body.decode().replace("http://www.w3.org/${", "")        # namespaces, not addresses
        for sign in ("http:", "https:", "src=", "@import", "url("):
            self.assertNotIn(sign, text)

    def test_curves(self):
        self.append([record(1), record(2, **{LOSS: None}), record(3, **{"optim/step_skipped": True})])
        self.append([{"step": 3, "eval/val/CrossEntropyLoss": 4, "eval/val/Perplexity": 54, "quant/x0/0/error": 0.01,
                      "quant/x0/1/error": 0.03, "quant/x0/1/underflow": 1,
                      "quant/v/head/error": 0.5, "router/largest_share": 0.25, "router/tokens_per_expert": [[6, 2]],
                      "router/dropped_tokens": 0}])
        first, second = self.data()["runs"]
        self.assertEqual((first["name"], first["step"], first["tokens"], first["skipped"]), ("run", 3, 3072, 1))
        self.assertEqual(first["curves"], {
            LOSS: {"x": [1, 3], "y": [10, 3.33333]}, "eval/val/CrossEntropyLoss": {"x": [3], "y": [4]},
            "quant/x0/error": {"x": [3], "y": [0.02]}, "quant/v/error": {"x": [3], "y": [0.5]},
            "router/largest_share": {"x": [3], "y": [0.25]}, "router/dropped_tokens": {"x": [3], "y": [0]}})
        self.assertEqual((second["name"], second["curves"], second["changed"]), ("<b>other", {}, None))

    def test_not_finite(self):
        """Values that JSON cannot express are left out, although Python's JSON reads and writes them."""
        self.append([record(1), record(2)])
        for text in ("NaN", "-Infinity", "1e999", "1.7e308", "1" + "0" * 400):
            values = ", ".join(f'"{name}": {text}' for name in (LOSS, "quant/x0/0/error", "throughput/total_tokens"))
            self.append(f'{{"step": 3, {values}}}\n'.encode())
        self.append([{"step": 3, "quant/x0/1/error": 0.5}], self.other)
        refuse = lambda name: self.fail(f"{name} is not JSON")
        first, second = json.loads(self.get("/data?have=")[1], parse_constant=refuse)["runs"]
        self.assertEqual((first["step"], first["tokens"], first["curves"]), (3, 2048, {LOSS: {"x": [1, 2], "y": [10, 5]}}))
        self.assertEqual(second["curves"], {"quant/x0/error": {"x": [3], "y": [0.5]}})

    def test_live(self):
        self.append([record(1)])
        version = self.data()["version"]
        self.assertNotIn("runs", self.data(version))
        self.append([record(2)], self.other)
        self.append([record(2)])
        new = self.data(version)
        self.assertEqual([run["step"] for run in new["runs"]], [2, 2])
        self.cut(1)
        self.append([record(2, 1), record(3, 1)])
        curve = self.data(new["version"])["runs"][0]["curves"][LOSS]
        self.assertEqual(curve, {"x": [1, 2, 3], "y": [10, 6, 4.33333]})

    def test_many_points(self):
        curve = watch_server.Curve()
        n = 100000
        for i in range(n):
            curve.add(i, i % 7)
        drawn = curve.as_json()
        self.assertTrue(watch_server.POINTS <= len(drawn["x"]) <= 2 * watch_server.POINTS)
        self.assertEqual(sum(bucket[0] for bucket in curve.buckets), n)
        self.assertEqual(sum(bucket[2] for bucket in curve.buckets), sum(i % 7 for i in range(n)))
        self.assertEqual((drawn["low"][0], drawn["high"][0], drawn["x"]), (0, 6, sorted(drawn["x"])))


def installed(module):
    return importlib.util.find_spec(module) is not None


def send(*arguments, **environment):
    return subprocess.run([sys.executable, WATCH, *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment})


def read_log(path):
    """Reads the records of a .wandb file: seven bytes, then LevelDB's log format, blocks of 32 KiB with whole records (1) or
    parts of records (2, 3, 4). wandb has no reader that Python can call."""
    with open(path, "rb") as file:
        text = file.read()
    at, record = 7, b""
    while at + 7 <= len(text):
        left = -at % 32768
        if 0 < left < 7:
            at += left
            continue
        length, kind = int.from_bytes(text[at + 4:at + 6], "little"), text[at + 6]
        record += text[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class WriterTest(Folder):
    """The same for each program: a run that was stopped and continued; then one that went back to step 3; then together with
    another run."""

    def check_program(self, target, *options, **environment):
        other = self.make_run("other")
        self.append([record(1, 5)], other)
        self.append([record(i) for i in range(1, 4)] + [{"step": 3, "eval/val/CrossEntropyLoss": 4.5}])
        first = send(self.run_folder, other, "--to", target, "--once", *options, **environment)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.append([record(i) for i in range(4, 7)])
        self.assertEqual(send(self.run_folder, other, "--to", target, "--once", *options, **environment).returncode, 0)
        self.cut(3)
        self.append([record(i, 1) for i in range(4, 10)])
        last = send(self.run_folder, other, "--to", target, "--once", *options, **environment)
        self.assertEqual(last.returncode, 0, last.stderr)
        self.assertIn("run: the run went back to step 3\n", last.stdout)

    def test_without_the_package(self):
        for target, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")):
            hidden = os.path.join(self.top, "hidden")
            os.makedirs(hidden, exist_ok=True)
            with open(os.path.join(hidden, f"{package}.py"), "w") as file:
                file.write(f"raise ImportError('no {package}')\n")
            result = send(self.run_folder, "--to", target, PYTHONPATH=hidden)
            self.assertEqual((result.returncode, result.stderr), (1, f"error: no {package}: pip install {package}\n"))

    @unittest.skipUnless(installed("tensorboard"), "pip install tensorboard")
    def test_tensorboard(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        self.check_program("tensorboard")
        events = EventAccumulator(os.path.join(self.run_folder, "tensorboard"))
        events.Reload()
        found = [(e.step, e.value, e.wall_time) for e in events.Scalars(LOSS)]
        expected = [record(i, i > 3) for i in range(1, 10)]
        self.assertEqual([(step, seconds) for step, _, seconds in found], [(r["step"], r["time"]) for r in expected])
        for (_, value, _), r in zip(found, expected):
            self.assertAlmostEqual(value, r[LOSS], delta=2 ** -23 * r[LOSS])       # it stores floats
        self.assertEqual([(e.step, e.value) for e in events.Scalars("eval/val/CrossEntropyLoss")], [(3, 4.5)])
        events = EventAccumulator(os.path.join(self.top, "other", "tensorboard"))
        events.Reload()
        self.assertEqual([(e.step, e.value) for e in events.Scalars(LOSS)], [(1, 15)])

    @unittest.skipUnless(installed("tensorboard"), "pip install tensorboard")
    def test_live_and_stopped(self):
        """watch.py is killed at any time and started again, and finally stopped by SIGTERM: every step is sent once."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        index, step = os.path.join(self.run_folder, "tensorboard", "watch.index"), 0
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            process = subprocess.Popen([sys.executable, WATCH, self.run_folder, "--to", "tensorboard"], stdout=subprocess.DEVNULL)
            for _ in range(2):
                self.append([record(step + i) for i in (1, 2, 3)])
                step += 3
                for _ in range(300):
                    if os.path.exists(index) and os.path.getsize(index) >= 24 * (step - 1):
                        break
                    time.sleep(0.1)
            process.send_signal(number)
            self.assertEqual(process.wait(30), 0 if number == signal.SIGTERM else -number)
        events = EventAccumulator(os.path.join(self.run_folder, "tensorboard"))
        events.Reload()
        self.assertEqual([e.step for e in events.Scalars(LOSS)], list(range(1, step + 1)))

    @unittest.skipUnless(installed("wandb"), "pip install wandb")
    def test_wandb(self):
        from wandb.proto import wandb_internal_pb2
        self.check_program("wandb", "--offline", WANDB_SILENT="true")
        found, ids = {}, {}
        for path in sorted(glob.glob(os.path.join(self.run_folder, "wandb", "wandb", "offline-run-*", "*.wandb"))):
            for data in read_log(path):
                r = wandb_internal_pb2.Record()
                r.ParseFromString(data)
                if r.WhichOneof("record_type") == "run":
                    name = r.run.display_name
                    ids.setdefault(name, set()).add(r.run.run_id)
                    self.assertEqual(r.run.run_group, "run")
                elif r.WhichOneof("record_type") == "history":
                    row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
                    found.setdefault(name, []).append((row["_step"], row[LOSS], row.get("eval/val/CrossEntropyLoss")))
        expect = lambda steps, salt: [(i, 10 / i + salt, 4.5 if i == 3 else None) for i in steps]
        self.assertEqual(found, {"run": expect(range(1, 7), 0), "run-from-4": expect(range(4, 10), 1)})
        self.assertTrue(all(len(i) == 1 for i in ids.values()))     # a stopped run continued as the same run

    @unittest.skipUnless(installed("trackio"), "pip install trackio")
    def test_trackio(self):
        self.check_program("trackio", "--project", "test", TRACKIO_DIR=os.path.join(self.top, "trackio"))
        reader = "import json\nfrom trackio.sqlite_storage import SQLiteStorage as S\n" \
                 "runs = S.get_run_records('test')\n" \
                 "print(json.dumps([[r['name'], S.get_logs('test', r['name'], run_id=r['id'])] for r in runs]))"
        text = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, check=True,
                              env={**os.environ, "TRACKIO_DIR": os.path.join(self.top, "trackio")}).stdout
        found = {name: [(row["step"], row[LOSS], row.get("eval/val/CrossEntropyLoss")) for row in rows]
                 for name, rows in json.loads(text.splitlines()[-1])}
        expect = lambda steps, salt: [(i, 10 / i + salt, 4.5 if i == 3 else None) for i in steps]
        self.assertEqual(found, {"run": expect(range(1, 7), 0), "run-from-4": expect(range(4, 10), 1), "other": [(1, 15, None)]})


if __name__ == "__main__":
    unittest.main()
