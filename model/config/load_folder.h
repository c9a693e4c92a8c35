/* Runs without a configuration file, and settings that follow from the model of load_path. */
#pragma once
#include "model/config/reader.h"

/* Settings of a run without a file, but with load_path: full fine-tuning of that model. The caller
 * owns it. */
YamlNode *load_folder_without_file(void);
/* Checks the command line of a run without a file. first: its first argument. */
void load_folder_check_command_line(const Reader *r, const char *first);
/* generate and eval_only need a load_path */
void load_folder_check_given(const Reader *r, const char *where);
/* Dies if load_path is a URL or empty. */
void load_folder_check_path(const Reader *r);
/* Sets the settings that follow from the model in Config.load_folder. */
void load_folder_complete(Reader *r);

/* config.yaml of the run that saved this checkpoint; NULL: no checkpoint. The caller owns it */
YamlNode *load_folder_config(const char *folder);
/* The value of `key` in that config.yaml; NULL: it has none. The caller owns the text */
char *load_folder_trained_with(const char *folder, const char *key);
