/* What a back end implements: each operation of operation_list.h under the name backend_<operation>, with the parameters and the
 * specification of <operation>. Inside a back end operations call each other by these names. */
#pragma once
#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/gptq.h"
#include "kernels/kernels.h"
#include "kernels/nf4.h"

#define OP(name, ...) extern __typeof__(name) backend_##name;
#include "kernels/operation_list.h"
#undef OP
