#!/usr/bin/env python3
"""What programs print on a terminal and in other places. On a pseudo-terminal of 80 columns, long work shows a line that is
rewritten and disappears at the end. In a pipe there are no control characters. The header of a run fits on a screen of 24
lines."""
import fcntl, json, os, pty, re, shlex, shutil, struct, subprocess, tempfile, termios, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe"))
TINY = os.path.join(TOP, "configs", "tiny.yaml")
COLUMNS, LINES = 80, 24


def on_terminal(arguments):
    """Returns what the program sends to its terminal: stdout and stderr."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    child = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, cwd=TOP)
    os.close(slave)
    sent = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:         # EIO: the program has ended
            break
        if not part:
            break
        sent += part
    os.close(master)
    if child.wait():
        raise AssertionError(f"{arguments}: {sent.decode()}")
    return sent.decode()


def in_pipe(arguments):
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=TOP)
    if done.returncode:
        raise AssertionError(f"{arguments}: {done.stdout.decode()}")
    return done.stdout.decode()


def screen(sent):
    """Returns the lines that a terminal shows at the end. After a carriage return, characters overwrite others; ESC [ K
    erases."""
    lines, line, column = [], [], 0
    for token in re.findall(r"\x1b\[K|.", sent, re.DOTALL):
        if token == "\x1b[K":
            del line[column:]
        elif token == "\n":
            lines.append("".join(line).rstrip())
            line, column = [], 0
        elif token == "\r":
            column = 0
        else:
            line[column:column + 1] = token
            column += 1
    return lines + ["".join(line).rstrip()]


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class Terminal(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp()
        cls.saved = os.path.join(cls.top, "run")
        cls.printed = in_pipe([*LAUNCH, "-n", "2", TRAIN, TINY, f"--save_folder={cls.saved}", "--max_duration=1",
                               "--eval_interval=null", "--data.packing=best_fit", "--format.moment1=bf16"])

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    def plain(self, text):
        self.assertEqual(re.sub(r"[^\x00-\x1f\x7f]|\n", "", text), "")

    def test_evaluation(self):
        """The progress line was there and is gone. It appears after a second."""
        arguments = [TRAIN, TINY, f"--load_path={self.saved}/latest", "--eval_only"]
        for batches in (8, 16, 32, -1):
            sent = on_terminal([*arguments, f"--eval_subset_num_batches={batches}"])
            if sent.count(" s left: sample") > 1:
                break
        self.assertRegex(sent, r"evaluating \d+ %, \d+ s left: sample *\r")
        self.assertRegex(sent, r"sample *\r +\reval at step 1 ")
        drawn = re.findall(r"[^\r\n]*\r(?!\n)", sent)
        self.assertGreater(len(drawn), 1)
        self.assertLess(max(map(len, drawn)), COLUMNS + 1)      # the return takes no column
        for line in screen(sent):
            self.assertNotRegex(line, r"\d s left|, \d+ s:")
        self.plain(in_pipe([*arguments, "--eval_subset_num_batches=2"]))

    def test_header(self):
        self.plain(self.printed)
        header = self.printed[:self.printed.index("\nstep 1/")].split("\n")
        header = [line.replace(self.top, "") for line in header if not line.startswith("warning: ")]
        self.assertLessEqual(len(header), LINES)
        self.assertLessEqual(max(map(len, header)), COLUMNS, header)
        for line, start in zip(header, ("coat.c ", "model: 7.226 M parameters, 4 blocks of width 128", "memory: ")):
            self.assertTrue(line.startswith(start), line)
        self.assertIn("2 x cpu; recipe f32 (changed), optimizer adamw", header[0])
        self.assertIn("run: 1 step of 8 x 128 tokens; each of 2 ranks: 2 micro-batches of 2", header)

    def test_many_evaluators(self):
        """Five sets are one line: 5 x 17,435 tokens of 5 x 1 files."""
        evaluators = json.dumps([{"label": f"v{i}", "data": {"paths": ["data/sample-val.npy"]}} for i in range(5)])
        printed = in_pipe([TRAIN, TINY, f"--load_path={self.saved}/latest", "--eval_only", "--eval_subset_num_batches=1",
                           f"--evaluators={evaluators}"])
        self.assertEqual(re.findall("^validation: .*", printed, re.MULTILINE), ["validation: 5 sets, 87175 tokens from 5 files"])

    def test_export(self):
        """The work ends with a summary, also on a terminal."""
        for i, how in enumerate((on_terminal, in_pipe)):
            sent = how([TRAIN, f"--export={self.saved}/latest", "--dtype=int4", "--group=32", os.path.join(self.top, f"int4-{i}")])
            self.assertRegex(screen(sent)[-2], r"^exported .* in \d+\.\d s")
        self.plain(sent)

    def test_mpirun(self):
        """Ranks write to mpirun, which has the terminal, so there is no line that is rewritten."""
        sent = on_terminal([*LAUNCH, "-n", "2", TRAIN, TINY, f"--load_path={self.saved}/latest", "--eval_only",
                            "--eval_subset_num_batches=2"])
        self.plain(sent.replace("\r\n", "\n"))


if __name__ == "__main__":
    unittest.main()
