#!/usr/bin/env python3
"""scripts/train.sbatch with scripts that pretend to be srun and scontrol: which jobs are requeued. scripts/try-slurm tests a
cluster."""
import os, shutil, signal, struct, subprocess, tempfile, time, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
CONFIG = """
recipe: f32
model: {d_model: 16, n_layers: 1, n_heads: 2, mlp_hidden_size: 64, max_sequence_length: 16, vocab_size: 100, layer_norm_type: rms}
optimizer: {learning_rate: 1.0e-3}
scheduler: {t_warmup: 0}
global_train_batch_size: 4
device_train_microbatch_size: 2
eval_interval: null
data: {paths: [text.npy]}
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class Sbatch(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.write("c.yaml", CONFIG)
        self.write("srun", SRUN, 0o755)
        self.write("scontrol", '#!/bin/bash\necho "scontrol $*"\n', 0o755)
        with open(os.path.join(self.folder, "text.npy"), "wb") as file:         # 40 sequences: an epoch is ten steps
            file.write(struct.pack("<640H", *(i * i % 97 for i in range(640))))
        os.symlink(TRAIN, os.path.join(self.folder, "train"))

    def write(self, name, text, mode=0o644):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, mode)

    def start(self, steps, *more):
        environment = dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}", SLURM_JOB_ID="7")
        script = os.path.join(TOP, "scripts", "train.sbatch")
        return subprocess.Popen(["bash", script, "c.yaml", "run", steps, *more], cwd=self.folder, env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def job(self, steps, *more):
        """Returns the exit status, whether the job was requeued, and the output."""
        job = self.start(steps, *more)
        said = job.communicate(timeout=120)[0]
        return job.returncode, "scontrol requeue 7" in said, said

    def test_complete(self):
        """Each form of max_duration, 10 steps of 64 tokens; also a run that stop_at ends, and a run without a checkpoint."""
        for steps in ("10", "1_0", "1e1", "640T", "6.4e2T", "1ep"):
            for again in range(2):
                status, back, said = self.job(steps)
                self.assertEqual((status, back), (0, False), said)
                self.assertEqual(os.readlink(os.path.join(self.folder, "run", "latest")), "step10")
            shutil.rmtree(os.path.join(self.folder, "run"))
        self.assertEqual(self.job("10", "--stop_at=4")[:2], (0, False))
        self.assertEqual(self.job("10", "--save_num_checkpoints_to_keep=0")[:2], (0, False))

    def lines(self):
        path = os.path.join(self.folder, "run", "metrics.jsonl")
        if not os.path.exists(path):
            return 0
        with open(path) as file:
            return len(file.readlines())

    def wait_for_steps(self, job, lines):
        for _ in range(600):
            if self.lines() > lines:
                return
            time.sleep(0.1)
        job.kill()
        self.fail(f"no step: {job.communicate()[0]}")

    def rank(self):
        """Finds the process of the run: its executable is the program, and its working folder is this folder."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(TRAIN) and os.readlink(f"/proc/{pid}/cwd") == self.folder:
                    return int(pid)
            except OSError:
                pass
        self.fail("no process")

    def test_asked_to_stop(self):
        for _ in range(2):              # starts, then continues
            lines = self.lines()
            job = self.start("1e9")
            self.wait_for_steps(job, lines)
            os.kill(self.rank(), signal.SIGUSR2)
            said = job.communicate(timeout=120)[0]
            self.assertEqual(job.returncode, 0, said)
            self.assertIn("asked to stop at step ", said)
            self.assertIn("scontrol requeue 7", said)
        status, back, said = self.job("1e9", "--model.n_layers=none")
        self.assertEqual((status, back), (2, False), said)

    def test_fault(self):
        """A rank that is killed: the job is requeued if it has saved a checkpoint."""
        for more, requeued in (["--save_interval=1"], True), (["--save_interval=null"], False):
            job = self.start("1e9", *more)
            self.wait_for_steps(job, self.lines() + 5)
            os.kill(self.rank(), signal.SIGKILL)
            said = job.communicate(timeout=120)[0]
            self.assertEqual(("scontrol requeue 7" in said, job.returncode), (requeued, 0 if requeued else 137), said)


if __name__ == "__main__":
    unittest.main()
