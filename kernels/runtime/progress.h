/* The progress of a long task of the main thread, on stderr. There is one task at a time. On a
 * terminal the progress is one line, rewritten at most four times a second; progress_end removes
 * it, and the caller prints a summary. Elsewhere a new line appears every 30 seconds, without
 * control characters. mpirun reads the stderr of ranks through a pipe, so ranks under mpirun never
 * have a terminal. */
#pragma once

/* Prints nothing from now on. Ranks other than 0 call this function. */
void progress_silence(void);

/* `what`: words such as "loading", which must stay valid until progress_end. Nothing is printed in
 * the first second. */
void progress_begin(const char *what);

/* `share`: the share of the task that is done, from 0 to 1; negative: unknown. `now`: what is being
 * done, or NULL. Before progress_begin this function does nothing. */
void progress_show(double share, const char *now);
void progress_end(void);

/* Removes the line until the next progress_show. Call this function before other output; die and
 * warn do. */
void progress_clear(void);
