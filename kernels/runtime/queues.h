/* Queues and marks as a back end implements them. device_queue and its like (device.h) call these
 * functions, unless a watch with queues of its own is set (operations.h). */
#pragma once
#include "kernels/runtime/device.h"

void backend_device_queue(Queue q);
DeviceMark *backend_device_mark(DeviceMark *reuse);
void backend_device_wait(DeviceMark *m);
void backend_device_unmark(DeviceMark *m);
