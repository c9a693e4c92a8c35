/* What a back end implements: each operation of operation_list.h under the name
 * backend_<operation>, with the parameters and the specification of <operation>. Inside a back end
 * operations call each other by these names. */
#pragma once
#include "kernels/collectives.h"
#include "kernels/experts.h"
#include "kernels/gptq_layer.h"
#include "kernels/kernels.h"
#include "kernels/nf4_map.h"
#include "kernels/runtime/device.h"
#include "kernels/wire.h"

#define OP(name, ...) extern __typeof__(name) backend_##name;
#include "kernels/operation_list.h"
#undef OP
