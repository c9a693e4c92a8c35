/* Checks the settings of the run: batches, schedule, folders, ranks. */
#pragma once
#include "model/config/reader.h"

/* sets save_folder to runs/<run_name> if the run needs a folder and none is given */
void check_run_choose_save_folder(Config *c);
void check_run(Reader *r);
