/* ./train --export=CHECKPOINT [--key=value ...] FOLDER */
#pragma once

/* Does what the command line says, on one rank. Dies on arguments that make no sense. A device is used only for calibration. */
void export_run(int argc, char **argv);
