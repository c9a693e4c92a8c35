#!/usr/bin/env python3
"""scripts/run-tests: its messages and exit status if tests pass, fail, are skipped because of a package, or test nothing. Also
checks that the tables of README.md name every test."""
import fnmatch, glob, os, re, subprocess, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEAD = "import unittest\nclass Test(unittest.TestCase):\n"
PASSES = "    def test_passes(self): pass\n"
SKIPS = "    @unittest.skip('pip install nothing')\n    def test_skipped(self): pass\n"
FAILS = "    def test_fails(self): self.fail()\n"
REPORTS = """    def test_reports(self):
        import os
        with open(os.environ["BUILD"] + "/test-logs/report.7", "w") as file:
            file.write("data race\\n")
"""


class RunTestsTest(unittest.TestCase):
    def run_tests(self, *bodies, ci=""):
        with tempfile.TemporaryDirectory(prefix="coat-run-tests-") as folder:
            tests = []
            for i, body in enumerate(bodies):
                tests.append(os.path.join(folder, f"test_{i}.py"))
                with open(tests[-1], "w") as file:
                    file.write(HEAD + body + "if __name__ == '__main__': unittest.main()\n")
            result = subprocess.run(["bash", os.path.join(TOP, "scripts", "run-tests"), folder, "", *tests], capture_output=True,
                                    text=True, env=dict(os.environ, CI=ci, GOLDEN_DIR=folder))
            return result.returncode, result.stdout.replace(folder + "/", "")

    def test_passing(self):
        code, output = self.run_tests(PASSES, PASSES + PASSES.replace("passes", "too"), ci="true")
        self.assertEqual((code, output.splitlines()[-1]), (0, "3 passed, 0 failed"))
        self.assertNotIn("SKIPPED", output)

    def test_skipped(self):
        """A skipped part of a test, or a skipped test, is reported, and is a failure if CI is true."""
        for ci in "", "true":
            code, output = self.run_tests(PASSES + SKIPS, SKIPS, ci=ci)
            self.assertEqual(code, ci == "true")
            self.assertIn("SKIPPED test_0.py: 1 tests: pip install nothing\n", output)
            self.assertIn("SKIPPED test_1.py: 1 tests: pip install nothing\n", output)
            self.assertIn("ok      test_0.py: 1 tests", output)
            self.assertNotIn("ok      test_1.py", output)
            self.assertIn("1 passed, 0 failed, 2 SKIPPED\n", output)

    def test_failing(self):
        for bodies, counts in (((PASSES, FAILS), "1 passed, 1 failed"), ((SKIPS + FAILS, PASSES), "1 passed, 1 failed, 1 SKIPPED"),
                               ((PASSES, "    pass\n"), "1 passed, 1 failed")):
            code, output = self.run_tests(*bodies)
            self.assertEqual((code, output.splitlines()[-1]), (1, counts))
            self.assertIn("FAILED  ", output)

    def test_report(self):
        """ThreadSanitizer reports a race in a process that a test started; the test itself passes."""
        code, output = self.run_tests(PASSES, REPORTS)
        self.assertEqual((code, output.splitlines()[-1]), (1, "2 passed, 1 failed"))
        self.assertIn("FAILED  test-logs/report.7:\ndata race", output)

    def test_table(self):
        """tests/README.md names every test, some as patterns, and no test that does not exist."""
        with open(os.path.join(TOP, "tests", "README.md")) as file:
            named = set(re.findall(r"`(test_[\w*]+)(?:\.py)?`", file.read()))
        tests = [os.path.splitext(os.path.basename(path))[0] for path in glob.glob(os.path.join(TOP, "tests", "test_*.*"))]
        self.assertEqual([test for test in sorted(tests) if not any(fnmatch.fnmatchcase(test, name) for name in named)], [])
        self.assertEqual([name for name in sorted(named) if not fnmatch.filter(tests, name)], [])


if __name__ == "__main__":
    unittest.main()
