/* Host memory that a process can still allocate. */
#pragma once

/* Returns the bytes that processes of this host, or of this container, can still allocate. The
 * number is MemAvailable, or less if a cgroup (v1 or v2) of this process, or a parent of this
 * cgroup, has a limit (memory.max). File cache counts as free. `root` is prefixed to the paths of
 * /proc and /sys; "" selects the files of the system. Returns infinity if the number is unknown. */
double host_memory_left(const char *root);
