/* ./train --export=CHECKPOINT [--key=value ...] FOLDER */
#pragma once

/* Exports as the command line says, on one rank. Dies on wrong arguments. Only calibration uses a
 * device. */
void export_run(int argc, char **argv);
