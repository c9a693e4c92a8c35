/* The matrices of blocks that are frozen beside adapters and stored in E4M3 or NF4: the region BASE of a unit. They are gathered as
 * stored; what GEMMs read is made from that for each use (the table in fsdp_plan.c).
 *
 * E4M3 is stored as the codes and with the scale of an FP8 operand: forward reads them as they are, backward a transposed copy; of
 * an operand in E5M2 they are rounded once more, with the same scale, in which all of them are in its range. NF4
 * is stored tensor by tensor in whole groups (nf4.h); where GEMMs are in FP8, codes and transposed codes come from it in one pass
 * each, with the scale of the matrix's largest magnitude. Recipes without FP8 operands read either in the stream's format.
 * Two blocks' operands exist at a time, on one rank one's, besides those of the units that stay gathered (fsdp.h). */
#pragma once
#include "model/fsdp_plan.h"

/* Stores a matrix, of which this rank keeps its part. whole: (rows, cols) in F32 or BF16, device memory; all ranks have the same. */
void   base_store(Fsdp *f, int unit, const Param *p, Tensor whole);

/* The same of a matrix in NF4, param_nf4_groups of host memory: Nf4PlainGroups if f->plain_nf4. */
void   base_store_nf4(Fsdp *f, int unit, const Param *p, const void *groups);
