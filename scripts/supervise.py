#!/usr/bin/env python3
"""Starts a training run, and starts it again after a fault: a killed rank, a lost GPU or host, a hang.

    python3 scripts/supervise.py -- mpirun -n 8 ./train mine.yaml --save_folder=runs/8b --try_load_latest_save
    python3 scripts/supervise.py --hosts hosts --nodes 8 -- mpirun --hostfile {hostfile} -n {ranks} ./train mine.yaml \\
        --save_folder=/shared/runs/8b --try_load_latest_save

It ends with the exit status of the run:
- when the run is complete (status 0);
- when the configuration or the data is wrong (2), or the loss has diverged (3), since the next start would fail, too;
- after --failures faults in a row without a newer checkpoint between them;
- after SIGUSR2, SIGUSR1, SIGTERM, SIGINT or SIGHUP. It sends SIGUSR2 to mpirun, so that the run saves and ends.

--hosts FILE has one host per line, as "name slots=8". Each start uses --nodes of the hosts on which --probe succeeds: first those
that fewer faults have named, then in the order of the file. If fewer hosts answer, the run goes on with those.
"""
import argparse, os, re, shlex, signal, subprocess, sys, tempfile, time

import errors

INPUT, DIVERGED = 2, 3          # exit statuses of ./train (kernels/runtime/error.h)
NEVER_AGAIN = {INPUT: "the configuration or the data must be changed", DIVERGED: "the loss diverged"}
STOPPING = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# ./train's watchdog, and mpirun, name the host of a rank that failed
BLAMED = re.compile(r"rank \d+ \(process \d+ on ([^\s)]+)\)|process rank \d+ with PID \d+ on node (\S+) exited")


def say(text):
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def read_hosts(path):
    """The hosts as {name: number of slots}."""
    hosts = {}
    with open(path) as file:
        for number, line in enumerate(file, 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            slots = re.fullmatch(r"slots=([1-9]\d*)", words[-1])
            if len(words) != 2 or not slots or words[0] in hosts:
                raise errors.Bad(f"{path}:{number}: found {line.strip()!r}; expected each host once, as 'name slots=8'")
            hosts[words[0]] = int(slots[1])
    if not hosts:
        raise errors.Bad(f"{path}: names no host; expected lines such as 'name slots=8'")
    return hosts


def save_folder(command):
    """The run's folder. Without --try_load_latest_save, a second start would be refused or would begin anew."""
    folders = [word.split("=", 1)[1] for word in command if word.startswith("--save_folder=")]
    if not folders or not any(word in command for word in ("--try_load_latest_save", "--try_load_latest_save=true")):
        raise errors.Bad("the command needs --save_folder=FOLDER and --try_load_latest_save, so that each start continues the run")
    return folders[-1]


def newest(folder):
    """The step of the newest complete checkpoint; -1: there is none."""
    try:
        steps = [re.fullmatch(r"step(\d+)", name) for name in os.listdir(folder)]
    except OSError:
        return -1
    return max((int(step[1]) for step in steps if step), default=-1)


class Supervisor:
    def __init__(self, args):
        self.args, self.folder = args, save_folder(args.command)
        self.hosts = read_hosts(args.hosts) if args.hosts else {}
        self.blame = dict.fromkeys(self.hosts, 0)
        self.process, self.stopping = None, False
        for number in STOPPING:
            signal.signal(number, self.stop)

    def stop(self, *_):
        self.stopping = True
        if self.process:
            self.process.send_signal(signal.SIGUSR2)

    def healthy(self):
        """The hosts of the next start."""
        found = []
        for host in sorted(self.hosts, key=self.blame.get):
            if len(found) == self.args.nodes:
                break
            probe = subprocess.run(self.args.probe.format(host=shlex.quote(host)), shell=True, stdin=subprocess.DEVNULL)
            if probe.returncode == 0:
                found.append(host)
            else:
                say(f"{host} does not answer (exit status {probe.returncode} of the probe)")
        return found

    def run(self, hostfile):
        """Runs the command once. Counts the faults that its messages attribute to a host. Returns the exit status."""
        hosts = self.healthy() if self.hosts else []
        if self.hosts and not hosts:
            say("no host answers")
            return 1
        with open(hostfile, "w") as file:
            file.writelines(f"{host} slots={self.hosts[host]}\n" for host in hosts)
        ranks, named = sum(self.hosts[host] for host in hosts), set()
        command = [word.replace("{hostfile}", hostfile).replace("{ranks}", str(ranks)) for word in self.args.command]
        # in a session of its own, a Ctrl-C in the terminal reaches the run only through stop()
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True) as self.process:
            if self.stopping:
                self.process.send_signal(signal.SIGUSR2)
            for line in self.process.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                named.update(host for match in BLAMED.findall(line) for host in match if host in self.hosts)
        for host in named:
            self.blame[host] += 1
        status, self.process = self.process.returncode, None
        return 128 - status if status < 0 else status

    def supervise(self):
        failures = 0
        with tempfile.TemporaryDirectory() as folder:
            while True:
                before = newest(self.folder)
                status = self.run(os.path.join(folder, "hosts"))
                if status == 0 or self.stopping:
                    return status
                failures = 1 if newest(self.folder) > before else failures + 1
                why = NEVER_AGAIN.get(status)
                if not why and failures >= self.args.failures:
                    why = f"fault {failures} in a row without a newer checkpoint"
                if why:
                    say(f"exit status {status}: {why}; the run is not started again")
                    return status
                say(f"exit status {status}; the run starts again in {self.args.wait:g} s, from step {max(newest(self.folder), 0)}")
                for _ in range(round(10 * self.args.wait)):
                    if self.stopping:
                        return status
                    time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=3, help="faults in a row without a newer checkpoint; default 3")
    parser.add_argument("--wait", type=float, default=10, help="seconds before a new start; default 10")
    parser.add_argument("--hosts", help="a file with one host per line, such as 'name slots=8'")
    parser.add_argument("--nodes", type=int, help="the number of hosts of a start; default: all that answer")
    parser.add_argument("--probe", default="ssh -o BatchMode=yes -o ConnectTimeout=10 {host} nvidia-smi -L >/dev/null",
                        help="a shell command that tests {host}; default: %(default)s")
    parser.add_argument("command", nargs="+", help="after --: mpirun and its arguments")
    try:
        sys.exit(Supervisor(parser.parse_args()).supervise())
    except errors.Bad as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    errors.run(main, "a file with one host per line, and a program that starts the run")
