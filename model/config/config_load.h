/* Turns the command line into a Config. */
#pragma once
#include "model/shape/config.h"

/* Reads the file argv[1], unless argv[1] is a setting, and the settings --a.b=c after it. Returns
 * NULL after printing help, the version or the completion (--help, --help=key, --version or
 * --completion anywhere), or the usage if there is no argument.
 * Errors name file:line, the value found, the values expected, the nearest key. `world`: number of
 * ranks, to check the batch. `latest`: returns the newest checkpoint of a save_folder (malloc'ed;
 * NULL: there is none). A run that continues this checkpoint reads the model's description from
 * it. */
Config *config_load(int argc, char **argv, int world, char *(*latest)(const char *save_folder));
void config_free(Config *c); /* NULL is allowed */
