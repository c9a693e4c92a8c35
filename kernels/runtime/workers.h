/* The threads that work for the main thread, as watchdog.h knows them. */
#pragma once

typedef enum { NO_WORKER, WORKER_DATA, WORKER_VALIDATION, WORKER_SAVE, NUM_WORKERS } Worker;

enum { OPERATION_NAME = 96 }; /* bytes of a thread's text on its work, with the final 0 */
