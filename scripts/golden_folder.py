"""How the scripts start that compute reference results of tests with torch: the folder for these, and results that repeat."""
import argparse

import torch
import transformers


def golden_folder(doc, default):
    """The folder of the command line; doc: the script's help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=default)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return parser.parse_args().folder
