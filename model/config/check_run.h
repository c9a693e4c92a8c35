/* Checks of the run. */
#pragma once
#include "model/config/reader.h"

/* runs/<run_name>, if none is given and one is needed */
void check_run_choose_save_folder(Config *c);
void check_run(Reader *r);
