/* How much of the host's memory a process can still take. */
#pragma once

/* Bytes that processes of this host, or of this container, can still allocate: what the kernel calls available, or less where a
 * cgroup (v1 or v2) that holds this process, or one above it, has a limit (memory.max); file cache counts as free. `root` is put
 * before the paths of /proc and /sys; "" are the system's. Infinite if nothing is known. */
double host_memory_left(const char *root);
