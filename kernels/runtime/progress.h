/* The progress of long work of the main thread, one at a time, on stderr. On a terminal it is one
 * line, rewritten at most four times a second, which progress_end removes; the caller prints a
 * summary. Elsewhere it is a line every 30 seconds, without control characters. mpirun reads the
 * stderr of ranks by a pipe, so its terminal counts as elsewhere. */
#pragma once

/* Prints nothing from now on: for ranks other than 0. */
void progress_silence(void);

/* `what`: words such as "loading", valid until progress_end. Nothing is printed in the first
 * second. */
void progress_begin(const char *what);

/* `share` of the work is done, from 0 to 1; negative: unknown. `now`: what is being done, or NULL.
 * Without progress_begin it does nothing. */
void progress_show(double share, const char *now);
void progress_end(void);

/* Removes the line until the next progress_show: call it before other output. die and warn do. */
void progress_clear(void);
