/* Queues and marks of a back end: what the functions of device.h without backend_ call, unless a
 * watch (operations.h) has queues. */
#pragma once
#include "kernels/runtime/device.h"

void backend_device_queue(Queue q);
DeviceMark *backend_device_mark(DeviceMark *reuse);
void backend_device_wait(DeviceMark *m);
void backend_device_unmark(DeviceMark *m);
