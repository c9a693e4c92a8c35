/* What save_folder/latest is where a file system has no symbolic links: a file of one line, which is what the link would say. */
#pragma once

/* What the link or such a file at `path` says; NULL: there is nothing, or something else. malloc'ed. */
char *pointer_read(const char *path);

/* The path of what a pointer, link or file, leads to: what it says, from the folder on that it is in. NULL as above. malloc'ed. */
char *pointer_target(const char *path);

/* The same of such a file of the name `latest` that leads to a folder, as who opens a path follows a link; NULL for all else. */
char *pointer_follow(const char *path);

/* The path of what it leads to takes the place of such a file's; NULL stays. */
void  pointer_replace(char **path);
