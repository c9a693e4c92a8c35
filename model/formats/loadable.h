/* Checks whether the folder of a model can be read. */
#pragma once

/* Dies unless load_path is a folder that can be read. The message says what load_path is (a name on
 * the hub, another format) and gives the command that converts the model. `where`: where load_path
 * was given; NULL: unknown. */
void loadable_check(const char *where, const char *load_path);

/* As loadable_check, for lora.base_path, which must be a whole model. */
void loadable_check_base(const char *where, const char *base_path);
