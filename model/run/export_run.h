/* ./train --export=CHECKPOINT [--key=value ...] FOLDER */
#pragma once

/* Runs the export of the command line, on one rank. Dies on wrong arguments. Only calibration uses
 * a device. */
void export_run(int argc, char **argv);
