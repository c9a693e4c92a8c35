/* Queues and marks as a back end implements them. The functions of device.h, such as device_queue,
 * call these functions, unless a watch with its own queues is set (operations.h). */
#pragma once
#include "kernels/runtime/device.h"

void backend_device_queue(Queue q);
DeviceMark *backend_device_mark(DeviceMark *reuse);
void backend_device_wait(DeviceMark *m);
void backend_device_unmark(DeviceMark *m);
