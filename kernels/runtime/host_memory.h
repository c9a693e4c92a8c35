/* Host memory that a process can still allocate. */
#pragma once

/* Bytes that processes of this host, or of this container, can still allocate: MemAvailable, or
 * less if a cgroup (v1 or v2) of this process, or a parent of it, has a limit (memory.max); file
 * cache counts as free. `root` is prefixed to the paths of /proc and /sys; "": the system's.
 * Infinite if unknown. */
double host_memory_left(const char *root);
