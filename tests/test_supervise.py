#!/usr/bin/env python3
"""scripts/supervise.py: after which ends a run starts again, on which hosts, and how it is stopped."""
import os, shutil, signal, struct, subprocess, sys, tempfile, time, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
RUN = ["--save_folder=run", "--try_load_latest_save"]
CONFIG = """
recipe: f32
model: {d_model: 16, n_layers: 1, n_heads: 2, mlp_hidden_size: 64, max_sequence_length: 16, vocab_size: 100, layer_norm_type: rms}
optimizer: {learning_rate: 1.0e-3}
scheduler: {t_warmup: 0}
global_train_batch_size: 4
device_train_microbatch_size: 2
eval_interval: null
save_interval: 5
data: {paths: [text.npy]}
"""


class Supervise(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.write("c.yaml", CONFIG)
        with open(os.path.join(self.folder, "text.npy"), "wb") as file:
            file.write(struct.pack("<640H", *(i * i % 97 for i in range(640))))

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w") as file:
            file.write(text)

    def read(self, name):
        with open(os.path.join(self.folder, name)) as file:
            return file.read()

    def start(self, options, command):
        script = os.path.join(TOP, "scripts", "supervise.py")
        return subprocess.Popen([sys.executable, script, "--wait=0.1", *options, "--", *command], cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def supervise(self, options, command):
        process = self.start(options, command)
        said = process.communicate(timeout=120)[1]
        return process.returncode, said

    def shell(self, script, *options):
        """Supervises a shell script that counts its starts. Returns the exit status, the number of starts, and stderr."""
        status, said = self.supervise(options, ["bash", "-c", "echo >>starts; n=$(wc -l <starts); " + script, "bash", *RUN])
        starts = self.read("starts").count("\n")
        os.remove(os.path.join(self.folder, "starts"))
        return status, starts, said

    def test_ends(self):
        """Complete; wrong input; diverged; faults without and with checkpoints between them."""
        self.assertEqual(self.shell("exit 0")[:2], (0, 1))
        for status in (2, 3):
            self.assertEqual(self.shell(f"exit {status}")[:2], (status, 1))
        status, starts, said = self.shell("exit 1")
        self.assertEqual((status, starts), (1, 3))
        self.assertIn("exit status 1: fault 3 in a row without a newer checkpoint; the run is not started again", said)
        self.assertEqual(self.shell("kill -9 $$", "--failures=2")[:2], (137, 2))
        # checkpoints of the first three starts; step9.tmp is not complete
        self.assertEqual(self.shell("[ $n -le 3 ] && mkdir -p run/step$n; mkdir -p run/step9.tmp; exit 1")[:2], (1, 5))

    @unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
    def test_run(self):
        """A real run whose process is killed at its first two starts ends with the bits of an undisturbed run. Wrong input ends it
        at once."""
        train = [TRAIN, "c.yaml", "--max_duration=40"]
        subprocess.run([*train, "--save_folder=whole"], cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        self.write("killed.sh", """
            echo >>starts
            "$@" &
            if [ $(wc -l <starts) -le 2 ]; then
                while [ ! -e run/step$((10 * $(wc -l <starts))) ]; do sleep 0.01; done
                kill -9 $!
            fi
            wait $!
            """)
        status, said = self.supervise([], ["bash", "killed.sh", *train, *RUN])
        self.assertEqual((status, self.read("starts")), (0, "\n" * 3), said)
        self.assertIn("exit status 137; the run starts again in 0.1 s, from step ", said)
        self.assertEqual(subprocess.run(["cmp", "whole/step40/model.safetensors", "run/step40/model.safetensors"],
                                        cwd=self.folder).returncode, 0)
        status, said = self.supervise([], [*train, *RUN, "--model.n_layers=none"])
        self.assertEqual((status, said.count("error: ")), (2, 1), said)

    def test_stop(self):
        """SIGTERM stops the run by SIGUSR2, and no start follows."""
        process = self.start([], ["bash", "-c", "trap 'exit 7' USR2; >started; while :; do sleep 0.1; done", "bash", *RUN])
        for _ in range(100):
            if os.path.exists(os.path.join(self.folder, "started")):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        self.assertEqual((process.communicate(timeout=60)[1], process.returncode), ("", 7))

    def test_hosts(self):
        """b does not answer. The watchdog names a in the first start, mpirun names c in the second."""
        self.write("hosts", "a slots=8\nb slots=8  # comment\nc slots=8\nd slots=4\n")
        script = """
            echo $2 $(cut -d' ' -f1 $1) >>used
            case $n in
            1) echo 'error (rank 1): rank 2 (process 7 on a) has not responded for 60 s, since step 3' >&2; exit 1 ;;
            2) echo 'mpirun noticed that process rank 9 with PID 0 on node c exited on signal 9 (Killed).' >&2; exit 137 ;;
            esac"""
        script = "echo >>starts; n=$(wc -l <starts); " + script
        status, said = self.supervise(["--hosts=hosts", "--nodes=2", "--probe=test {host} != b"],
                                      ["bash", "-c", script, "bash", "{hostfile}", "{ranks}", *RUN])
        self.assertEqual((status, self.read("used")), (0, "16 a c\n12 c d\n12 d a\n"), said)
        self.assertIn("supervise: b does not answer (exit status 1 of the probe)", said)

    def test_errors(self):
        self.write("hosts", "a slots=8\na slots=8\n")
        self.write("none", "# none\n")
        for options, command, message in (
            ([], ["true", RUN[0]], "the command needs --save_folder=FOLDER and --try_load_latest_save"),
            (["--hosts=hosts"], ["true", *RUN], "hosts:2: found 'a slots=8'; expected each host once"),
            (["--hosts=none"], ["true", *RUN], "none: names no host"),
            (["--hosts=missing"], ["true", *RUN], "missing: No such file or directory"),
        ):
            status, said = self.supervise(options, command)
            self.assertEqual(status, 1)
            self.assertIn(f"error: {message}", said)


if __name__ == "__main__":
    unittest.main()
