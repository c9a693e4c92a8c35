"""Sends metrics.jsonl of runs to other programs, for watch.py."""
import array, bisect, importlib, json, math, os, secrets, sys, time

import metrics


def need(module, package):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"error: {error}: pip install {package}")


def numbers(record):
    """The metrics of a record that are numbers. Lists, which are counts of groups, are left out; null (not finite) becomes NaN."""
    return {name: math.nan if value is None else float(value) for name, value in record.items()
            if name not in ("step", "time") and (value is None or isinstance(value, (bool, int, float)))}


def read_config(folder):
    try:
        import yaml         # wandb and trackio install it
        with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (ImportError, OSError, ValueError):
        return {}


class TensorBoard:
    """Writes event files with TensorBoard's own writer."""
    takes_late = True       # accepts later metrics of a step that was sent already

    def __init__(self):
        need("tensorboard", "tensorboard")
        self.writer = need("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter
        self.event = need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self.summary = need("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary

    def open(self, sender, new):
        """NOTE: readers take files in the order of their names, which begin with the time in seconds. Events that a killed
        process wrote but did not record in watch.index are purged."""
        while any(name >= f"events.out.tfevents.{int(time.time())}"
                  for name in os.listdir(sender.folder) if name.startswith("events.")):
            time.sleep(0.1)
        file = self.writer(sender.folder)
        self.purge(file, sender.next_step)
        return file

    def purge(self, file, step):
        """Makes readers drop earlier events of this step and of later steps."""
        start = self.event.SessionLog(status=self.event.SessionLog.START)
        file.add_event(self.event.Event(wall_time=time.time(), step=step, session_log=start))

    def rewind(self, sender, file, step):
        self.purge(file, step)
        return file

    def write(self, file, step, seconds, values):
        summary = self.summary(value=[self.summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        file.add_event(self.event.Event(wall_time=seconds, step=step, summary=summary))

    def flush(self, file):
        file.flush()

    def close(self, file):
        file.close()

    def last_step(self, sender, file):
        return None


class InParts:
    """Programs whose runs only go forward: steps that a run writes again, after going back, become a separate run."""

    def rewind(self, sender, run, step):
        self.close(run)
        sender.begin_part(f"{sender.name}-from-{step}")
        return self.open(sender, True)

    def flush(self, run):
        pass

    def close(self, run):
        run.finish()


class WeightsAndBiases(InParts):
    takes_late = False

    def __init__(self):
        self.wandb = need("wandb", "wandb")

    def open(self, sender, new):
        return self.wandb.init(
            project=sender.options.project, name=sender.part["name"], id=sender.part["id"], group=sender.name, resume="allow",
            dir=sender.folder, config=read_config(sender.run), reinit="create_new",
            mode="offline" if sender.options.offline else None, settings=self.wandb.Settings(x_disable_stats=True, console="off"))

    def write(self, run, step, seconds, values):
        run.log(values, step=step)

    def last_step(self, sender, run):
        """Offline, each process has its own folder, without the data of earlier processes."""
        return None if run.offline or run.starting_step == 0 else run.starting_step - 1


class Trackio(InParts):
    takes_late = True

    def __init__(self):
        self.trackio = need("trackio", "trackio")

    def open(self, sender, new):
        """Opens a run outside any context: a context would belong to an earlier run of this process, and end that run."""
        import contextvars
        return contextvars.Context().run(
            self.trackio.init, project=sender.options.project, name=sender.part["name"], group=sender.name,
            config=read_config(sender.run), resume="never" if new else "allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, run, step, seconds, values):
        run.log(values, step=step)

    def last_step(self, sender, run):
        """The last step in the program, which writes in its own process: after this process was killed, it may have less than
        was sent."""
        from trackio.sqlite_storage import SQLiteStorage
        return SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.id)


WRITERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


class Sender:
    """Sends one run to one program. Its folder records what was sent: watch.index has end, step and CRC of each line of
    metrics.jsonl; watch.json has the name and id of the run in the program."""

    def __init__(self, writer, run, name, options):
        self.writer, self.run, self.name, self.options = writer, run, name, options
        self.folder = os.path.join(options.folder, name) if options.folder else os.path.join(run, options.to)
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            sys.exit(f"error: {self.folder}: {error.strerror}; --folder writes elsewhere")
        self.follower = metrics.Follower(run)
        self.waiting = []               # records of the last step
        self.saved = 0                  # number of lines in watch.index
        new = not self.load()
        self.next_step = self.follower.steps[-1] + 1 if self.follower.steps else 0
        self.target = writer.open(self, new)
        last = writer.last_step(self, self.target)
        if last is not None and last + 1 < self.next_step:
            self.follower.forget_step(last + 1)
            self.next_step = last + 1
            self.save_index()
        self.done = max(self.next_step - 1, -1 if last is None else last)           # the last step that the program has
        # the same step, if watch.index does not record it
        self.unnoted = self.done if self.done >= self.next_step else -1

    def path(self, name):
        return os.path.join(self.folder, name)

    def begin_part(self, name):
        self.part = {"name": name, "id": secrets.token_hex(4)}
        with open(self.path("watch.json.tmp"), "w", encoding="utf-8") as file:
            json.dump(self.part, file)
        os.replace(self.path("watch.json.tmp"), self.path("watch.json"))

    def load(self):
        """Returns false if no data was sent before."""
        f = self.follower
        try:
            with open(self.path("watch.json"), encoding="utf-8") as file:
                self.part = json.load(file)
            with open(self.path("watch.index"), "rb") as file:
                whole = array.array("q", (text := file.read())[:len(text) // 24 * 24])
            f.ends, f.steps, f.sums = whole[0::3], whole[1::3], whole[2::3]
            self.saved = len(f.ends)
            return True
        except FileNotFoundError:
            self.begin_part(self.name)
            return False

    def save_index(self, lines=None):
        """`lines`: number of lines that were sent; default: all lines that were read."""
        f = self.follower
        lines = len(f.ends) if lines is None else lines
        with open(self.path("watch.index"), "ab") as file:
            file.truncate(24 * min(self.saved, lines))
            for i in range(min(self.saved, lines), lines):
                array.array("q", (f.ends[i], f.steps[i], f.sums[i])).tofile(file)
        self.saved = lines

    def send(self):
        """Sends new records, except those of the last step. Returns whether there may be more."""
        records, void = self.follower.poll()
        if void is not None:
            self.go_back(void)
        for record in records:
            if self.waiting and record["step"] != self.waiting[0]["step"]:
                self.send_step()
            self.waiting.append(record)
        if records:
            self.writer.flush(self.target)
            self.save_index(len(self.follower.ends) - len(self.waiting))
        return bool(records)

    def send_step(self):
        step, values = self.waiting[0]["step"], {}
        for record in self.waiting:
            values.update(numbers(record))
        if step > self.done or (self.writer.takes_late and step > self.unnoted):
            self.writer.write(self.target, step, self.waiting[0].get("time", time.time()), values)
            self.done = max(self.done, step)
        self.waiting = []

    def go_back(self, step):
        """Declares that records of `step` and of later steps, which were sent, are void."""
        self.waiting = [record for record in self.waiting if record["step"] < step]
        if step <= self.done:
            print(f"{self.name}: the run went back to step {step - 1}", flush=True)
            self.target = self.writer.rewind(self, self.target, step)
            self.done, self.unnoted = step - 1, -1
        self.saved = min(self.saved, bisect.bisect_left(self.follower.steps, step))

    def close(self):
        if self.waiting:
            self.send_step()
        self.writer.flush(self.target)
        self.writer.close(self.target)
        self.save_index()
        print(f"{self.name}: sent up to step {self.done}", flush=True)
