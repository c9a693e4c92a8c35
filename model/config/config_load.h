/* From the command line to a Config. */
#pragma once
#include "model/shape/config.h"

/* Reads argv[1], unless it is a setting, and the --a.b=c after it. NULL after printing help, the
 * version or the completion, for --help, --help=key, --version or --completion anywhere, or the
 * usage if there is no argument.
 * Errors name file:line, the value found, the values expected, the nearest key. `world`: number of
 * ranks, to check the batch. `latest`: returns the newest checkpoint of a save_folder (malloc'ed;
 * NULL: there is none); a run that continues it takes the model's description from it. */
Config *config_load(int argc, char **argv, int world, char *(*latest)(const char *save_folder));
void config_free(Config *c); /* NULL: nothing */
