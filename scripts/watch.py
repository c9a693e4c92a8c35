#!/usr/bin/env python3
"""Shows runs while they train: as a page in the browser, or in TensorBoard, Weights & Biases or Trackio.

    python3 scripts/watch.py runs/tiny runs/coat --serve [--port 8765]
    python3 scripts/watch.py runs/tiny --to tensorboard             # then: tensorboard --logdir runs
    python3 scripts/watch.py runs/tiny --to wandb [--offline]
    python3 scripts/watch.py runs/tiny --to trackio                 # then: trackio show

Each RUN is a save_folder; its metrics.jsonl is followed and need not exist yet. --serve needs only Python. --to sends all numbers
under their names in the file (OLMo's names) until it is stopped (Ctrl-C, SIGTERM); with --once it sends what is in the file and
ends. Started again, it continues where it stopped. It sends a step when a later one begins, since statistics and evaluations may
follow; stopping sends the last step too. If a run goes back to an earlier step, TensorBoard drops the steps that are written again.
Weights & Biases and Trackio cannot do this, and get a new run of the same group, RUN-from-STEP.
"""
import argparse, os, signal, sys, threading

import metrics
import watch_server
import watch_to

POLL_SECONDS = 1


def name_runs(folders):
    """The last component of each path, or as many components as make the names different."""
    parts = [os.path.abspath(folder).split(os.sep) for folder in folders]
    if len(set(map(tuple, parts))) < len(parts):
        sys.exit("error: the same RUN is given twice")
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-n:]) for part in parts]
        if len(set(names)) == len(names):
            return names


def send(options, names):
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    writer = watch_to.WRITERS[options.to]()
    runs = [watch_to.Sender(writer, folder, name, options) for folder, name in zip(options.runs, names)]
    while not stop.is_set():
        more = [run.send() for run in runs]
        if options.once and not any(more):
            break
        if not any(more):
            stop.wait(POLL_SECONDS)
    for run in runs:
        run.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="save_folder of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--serve", action="store_true", help="a page at http://localhost:PORT")
    what.add_argument("--to", choices=sorted(watch_to.WRITERS))
    parser.add_argument("--port", type=int, default=8765, help="port of --serve; 0: any free port")
    parser.add_argument("--once", action="store_true", help="--to: send what is in the file, and end")
    parser.add_argument("--folder", help="--to: where a folder for each run is made; without it RUN/tensorboard and so on")
    parser.add_argument("--project", default="coat", help="project in wandb and trackio")
    parser.add_argument("--offline", action="store_true", help="wandb: store the run here; `wandb sync` uploads it later")
    options = parser.parse_args()
    for folder in options.runs:
        if os.path.exists(folder) and not os.path.isdir(folder):
            sys.exit(f"error: {folder} is not a folder; give the save_folder of a run")
        if options.once and not os.path.exists(os.path.join(folder, "metrics.jsonl")):
            sys.exit(f"error: {folder} has no metrics.jsonl; give the save_folder of a run")
    names = name_runs(options.runs)
    if options.serve:
        watch_server.serve([metrics.Follower(folder) for folder in options.runs], names, options.port)
    else:
        send(options, names)


if __name__ == "__main__":
    main()
