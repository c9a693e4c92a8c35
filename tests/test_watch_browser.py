#!/usr/bin/env python3
"""The page of scripts/watch.py --serve in a real browser, headless Chromium, which a pipe commands (Chrome DevTools Protocol):
curves are drawn, grow during the run, follow it back, and fit a phone. Without Chromium (apt-get install chromium) skipped.

    python3 tests/test_watch_browser.py --picture data/figures/watch.png RUN...     # what README.md shows
"""
import base64, json, os, select, shutil, subprocess, sys, tempfile, time, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE = 60           # seconds for any single action


class Browser:
    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="coat-chromium-")
        (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self.process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
             "--hide-scrollbars", "--disable-dev-shm-usage", f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.input, self.output, self.text, self.number, self.session, self.problems = ours_in, ours_out, b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self):
        end = time.monotonic() + DEADLINE
        while b"\0" not in self.text:
            if not select.select([self.input], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            more = os.read(self.input, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self.text += more
        message, _, self.text = self.text.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.output, json.dumps(request).encode() + b"\0")
        while True:
            m = self.message()
            if m.get("method") == "Runtime.exceptionThrown":
                self.problems.append(m["params"]["exceptionDetails"])
            elif m.get("method") == "Log.entryAdded" and m["params"]["entry"]["level"] == "error":
                self.problems.append(m["params"]["entry"]["text"])
            if m.get("id") == self.number:
                if "error" in m:
                    raise RuntimeError(m["error"])
                return m["result"]

    def ask(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression, what):
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if (value := self.ask(expression)):
                return value
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {DEADLINE} s: {expression} is {value}")

    def open(self, address, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=address)

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        os.close(self.output)
        os.close(self.input)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


def start_server(*runs):
    """The process, and the address that it prints."""
    server = subprocess.Popen([sys.executable, os.path.join(TOP, "scripts", "watch.py"), *runs, "--serve", "--port", "0"],
                              stdout=subprocess.PIPE, text=True)
    return server, server.stdout.readline().split()[0]


POINTS = "Number((document.querySelector('[data-name=\"%s\"] polyline.curve') || {dataset: {}}).dataset.points || 0)"


@unittest.skipUnless(CHROMIUM, "apt-get install chromium")
class BrowserTest(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-watch-")
        self.addCleanup(shutil.rmtree, self.top)
        self.runs = [os.path.join(self.top, name) for name in ("first", "<i>second")]
        for run in self.runs:
            os.mkdir(run)
            self.append(run, 1, 40)
        self.server, self.address = start_server(*self.runs)
        self.addCleanup(self.server.stdout.close)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.kill)
        self.browser = Browser()
        self.addCleanup(self.browser.close)

    def append(self, run, first, last):
        with open(os.path.join(run, "metrics.jsonl"), "a") as file:
            for step in range(first, last + 1):
                r = {"step": step, "train/CrossEntropyLoss": 10 / step, "optim/total_grad_norm": 1 + 1 / step,
                     "optim/learning_rate_group0": 1e-3, "throughput/total_tokens": 1000 * step,
                     "throughput/device/tokens_per_second": 5000, "System/Peak GPU Memory (MB)": 4000,
                     "router/largest_share": 0.2, "router/ZLoss": 0.1, "router/LoadBalancingLoss": 0.01, "router/idle_experts": 3}
                file.write(json.dumps(r) + "\n")
                if step % 10 == 0:
                    r = {"step": step, "eval/val/CrossEntropyLoss": 5, "quant/x0/0/error": 0.02, "quant/m/0/error": 0.03,
                         "system/gpu_power_watts": 600}
                    file.write(json.dumps(r) + "\n")

    def test_page(self):
        b = self.browser
        b.open(self.address, 1280, 900)
        b.wait_for(POINTS % "loss" + " == 40", "the loss is drawn")
        names = b.ask("[...document.querySelectorAll('.chart')].map(e => e.dataset.name).join()")
        self.assertEqual(names, "loss,eval,norm,lr,speed,memory,share,router,activations:first,activations:<i>second,moments:first,"
                                "moments:<i>second,power")
        self.assertEqual(b.ask("document.querySelectorAll('[data-name=loss] polyline.curve').length"), 2)
        self.assertEqual(b.ask("document.querySelectorAll('[data-name=router] polyline.curve').length"), 4)
        self.assertIn("idle experts", b.ask("document.querySelector('.run').textContent"))
        self.assertEqual(b.ask("document.querySelectorAll('i i, h2 i').length"), 0)         # names are not interpreted as markup

        self.append(self.runs[0], 41, 60)
        b.wait_for(POINTS % "loss" + " == 60", "the curve grows")
        os.truncate(os.path.join(self.runs[0], "metrics.jsonl"), 0)
        self.append(self.runs[0], 1, 20)
        b.wait_for(POINTS % "loss" + " == 20", "the curve follows the run back")

        b.ask("document.querySelector('[data-name=loss] svg').scrollIntoView()")
        x, y = b.ask("(r => [r.left + r.width / 2, r.top + r.height / 2])"
                     "(document.querySelector('[data-name=loss] svg').getBoundingClientRect())")
        b.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tip = b.wait_for("(document.querySelector('[data-name=loss] .tip') || {}).textContent", "values are shown")
        self.assertRegex(tip, r"^step \d+first: [\d.]+.*<i>second: [\d.]+")
        b.ask("document.querySelector('[data-name=loss] input').click()")
        self.assertTrue(b.ask("document.querySelector('[data-name=loss] svg').textContent").startswith("0.313"))  # ticks 0.3, 1, 3
        b.ask("document.querySelector('.run').click()")
        b.wait_for("document.querySelectorAll('[data-name=loss] polyline.curve').length == 1", "a run is hidden")
        self.assertEqual(b.problems, [])

    def test_phone(self):
        """No element is wider than the screen."""
        self.browser.open(self.address, 390, 844, dark=True)
        self.browser.wait_for(POINTS % "memory" + " == 40", "charts are drawn")
        self.assertEqual(self.browser.ask("document.documentElement.scrollWidth"), 390)
        wide = "[...document.querySelectorAll('.chart, .run, svg, #controls')]" \
               ".filter(e => e.getBoundingClientRect().right > 390).length"
        self.assertEqual(self.browser.ask(wide), 0)
        self.assertEqual(self.browser.ask("getComputedStyle(document.body).backgroundColor"), "rgb(14, 18, 23)")
        self.assertEqual(self.browser.problems, [])


def take_picture(path, runs, width=1320, height=1050, dark=False):
    server, address = start_server(*runs)
    browser = Browser()
    try:
        browser.open(address, width, height, dark)
        browser.wait_for(POINTS % "loss" + " > 1", "the loss is drawn")
        browser.picture(path)
    finally:
        browser.close()
        server.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--picture"]:
        take_picture(sys.argv[2], sys.argv[3:])
    else:
        unittest.main()
