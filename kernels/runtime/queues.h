/* Queues and marks of a back end: device.h's functions of the same names without backend_, which ask the watch of operations.h first. */
#pragma once
#include "kernels/runtime/device.h"

void        backend_device_queue (Queue q);
DeviceMark *backend_device_mark  (DeviceMark *reuse);
void        backend_device_wait  (DeviceMark *m);
void        backend_device_unmark(DeviceMark *m);
