/* A checkpoint as other programs take it: ./train --export=CHECKPOINT [--dtype=TYPE] FOLDER [model/config/export_options.h].
 *
 * FOLDER is what save_pretrained would have written of the model: config.json, its weights in the type asked for, in files of up to
 * 5 GB with an index, and, byte for byte, the tokenizer, the chat template and generation_config.json that the checkpoint holds;
 * nothing of the training. Where CHECKPOINT holds adapters, it is the model that they stand beside, with their product added to it:
 * what PEFT's merge_and_unload makes; BASE is that model, if it is not where they say. FOLDER is written as FOLDER.tmp and renamed
 * when it is complete and on disk. */
#pragma once
#include "model/checkpoint/export_files.h"
#include "model/config/export_options.h"

/* Does what the options say, on one rank and without a device; codes are not calibrated. A file holds up to `file_limit` bytes of
 * tensors, or one. Each value is that of the source, rounded to nearest, ties to even, or encoded as coded.h says; W + scale B A
 * where adapters have A and B, in F32 and rounded once; code times scale where the source is quantized. Dies if there is a target,
 * or a <target>.tmp of another kind; if a base is given and the source has no adapters; on options that do not go together, or that
 * the model's shapes do not allow; on a tensor that is missing, left over, of another shape, damaged, not finite, or beyond what the
 * type holds; and if the disk does not take it. What was written by then stays in <target>.tmp, which the next one replaces. */
void export_to(const ExportOptions *o, size_t file_limit);

/* Its three parts. The first opens and checks what there is, and the second creates the files; neither reads weights. Before the
 * last export_write_int4 may bring codes of some matrices. */
Export export_open(const ExportOptions *o);
void   export_begin(Export *x, size_t file_limit);
void   export_complete(Export *x);
