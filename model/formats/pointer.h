/* save_folder/latest on a file system without symbolic links: a file of one line, the target of the
 * link. */
#pragma once

/* Reads the target of the link, or of the file in place of a link, at `path`. NULL: `path` is
 * neither. malloc'ed. */
char *pointer_read(const char *path);

/* The same target as a path: relative targets start at the pointer's folder. NULL as above.
 * malloc'ed. */
char *pointer_target(const char *path);

/* pointer_target of a file named `latest`, not a link, that names a folder; NULL for any other
 * path. */
char *pointer_follow(const char *path);

/* If pointer_follow finds a target of *path, replaces *path by the target. */
void pointer_replace(char **path);
