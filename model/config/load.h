/* From the command line to a Config. */
#pragma once
#include "model/config.h"

/* Reads argv[1], unless that is a setting already, and the --a.b=c after it; NULL after printing what was asked for: help or the
 * version, by --help, --help=key or --version anywhere, or without an argument how the program is called. Errors: file:line, what
 * was found, what was expected, the nearest key. `world`: ranks, to check the batch against. `latest`: tells the newest checkpoint
 * of a save_folder (malloc'ed; NULL: there is none), whose description of the model counts where a run goes on from it. */
Config *config_load(int argc, char **argv, int world, char *(*latest)(const char *save_folder));
void    config_free(Config *c);             /* NULL: nothing */
