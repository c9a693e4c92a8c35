/* save_folder/latest on a file system without symbolic links: a file of one line, the target of the
 * link. */
#pragma once

/* The target written in the link or such a file at `path`; NULL: it is neither. malloc'ed. */
char *pointer_read(const char *path);

/* The same target as a path: relative targets start at the pointer's folder. NULL as above.
 * malloc'ed. */
char *pointer_target(const char *path);

/* The same for a file (not a link) named `latest` that points to a folder; NULL for all else. */
char *pointer_follow(const char *path);

/* If *path is such a file, replaces it by the path of the target. */
void pointer_replace(char **path);
