/* save_folder/latest on a file system without symbolic links: a file with one line, the target of
 * the link that it replaces. */
#pragma once

/* Reads the target of the link at `path`, or of the file in place of a link; malloc'ed. NULL:
 * `path` is neither. */
char *pointer_read(const char *path);

/* As pointer_read, but returns a path: relative targets start at the folder of the link. */
char *pointer_target(const char *path);

/* pointer_target of a file (not a link) named `latest` that names a folder; NULL for any other
 * path. */
char *pointer_follow(const char *path);

/* If pointer_follow finds a target of *path, replaces *path by the target. */
void pointer_replace(char **path);
