/* Exports a checkpoint for other programs: ./train --export=CHECKPOINT [--dtype=TYPE] FOLDER
 * [model/config/export_options.h].
 *
 * FOLDER has the files of save_pretrained: config.json, the weights in the requested type, in files
 * of up to 5 GB with an index, and unchanged copies of the checkpoint's tokenizer, chat template
 * and generation_config.json; no training state. If CHECKPOINT has adapters, they are merged into
 * their base, as by PEFT's merge_and_unload. FOLDER is written as FOLDER.tmp and renamed when it is
 * complete and on disk.
 *
 * An average of models [Wortsman et al. 2022, arXiv 2203.05482: uniform soups] has w_1 W_1 + w_2
 * W_2 + ... in place of W. The sum is computed in F64 and rounded once to F32. This F32 value is
 * then rounded or encoded like the weights of a single model. */
#pragma once
#include "model/export/export_files.h"
#include "model/config/export_options.h"

/* Exports without calibration, on one rank and without a device. A file has up to `file_limit`
 * bytes of tensors, or one larger tensor. Each value is the source's value, rounded to nearest,
 * ties to even, or encoded as in coded.h. With adapters A and B, the value is W + scale B A,
 * computed in F32 and rounded once; a quantized source has the value code times scale. Dies if the
 * target exists, or a <target>.tmp that is no unfinished export; if a base is given and the source
 * has no adapters; on options that cannot be combined, or that the model's shapes do not allow; on
 * a tensor that is missing, unknown, of a wrong shape, damaged, not finite, or out of the range of
 * the type; and if the disk fails. Then <target>.tmp stays, and the next export replaces it. */
void export_to(const ExportOptions *o, size_t file_limit);

/* export_to in three parts. export_open opens and checks the source; export_begin creates the
 * files; neither reads weights. Before export_complete, export_write_int4 may write the codes of
 * some matrices. */
Export export_open(const ExportOptions *o);
void export_begin(Export *x, size_t file_limit);
void export_complete(Export *x);
