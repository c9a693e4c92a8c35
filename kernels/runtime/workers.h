/* Threads that work for the main one, which watchdog.h knows. */
#pragma once

typedef enum { NO_WORKER, WORKER_DATA, WORKER_VALIDATION, WORKER_SAVE, NUM_WORKERS } Worker;
