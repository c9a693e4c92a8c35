/* Threads that work for the main one, which watchdog.h knows. */
#pragma once

typedef enum { NO_WORKER, WORKER_DATA, WORKER_VALIDATION, WORKER_SAVE, NUM_WORKERS } Worker;

enum { OPERATION_NAME = 96 }; /* bytes of what a thread says that it does, with the final 0 */
