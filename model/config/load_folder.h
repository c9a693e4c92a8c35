/* Settings that follow from the folder of load_path, also for runs without a configuration file. */
#pragma once
#include "model/config/reader.h"

/* Settings of a run without a file, but with load_path: full fine-tuning of the model in load_path.
 * The caller owns the tree. */
YamlNode *load_folder_without_file(void);
/* Checks the command line of a run without a file. first: the first argument. */
void load_folder_check_command_line(const Reader *r, const char *first);
/* dies if generate or eval_only has no load_path */
void load_folder_check_given(const Reader *r, const char *where);
/* Dies if load_path is a URL or empty. */
void load_folder_check_path(const Reader *r);
/* Sets settings to values that follow from the model in Config.load_folder. */
void load_folder_complete(Reader *r);

/* config.yaml of the run that saved the checkpoint in `folder`; NULL: `folder` holds no checkpoint.
 * The caller owns the path */
YamlNode *load_folder_config(const char *folder);
/* The value of `key` in that config.yaml; NULL: the file has no such key. The caller owns the
 * text */
char *load_folder_trained_with(const char *folder, const char *key);
