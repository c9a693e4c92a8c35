/* A checkpoint as other programs take it: ./train --export=CHECKPOINT [--dtype=bf16|f16|f32] [--lora.base_path=BASE] FOLDER.
 *
 * FOLDER is what save_pretrained would have written of the model: config.json, its weights in the type asked for, in files of up to
 * 5 GB with an index, and, byte for byte, the tokenizer, the chat template and generation_config.json that the checkpoint holds;
 * nothing of the training. Where CHECKPOINT holds adapters, it is the model that they stand beside, with their product added to it:
 * what PEFT's merge_and_unload makes; BASE is that model, if it is not where they say. FOLDER is written as FOLDER.tmp and renamed
 * when it is complete and on disk. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Whether the command line asks for it, and not for help. */
bool export_is_asked(int argc, char **argv);

/* Does it, on one rank and without a device. Dies on arguments that make no sense. */
void export_run(int argc, char **argv);

/* The same. source: a checkpoint, the save folder of a run (its latest one), or a folder of save_pretrained; base: the folder that
 * its adapters stand beside, NULL: where they say, or it has none; dtype: "BF16", "F16" or "F32"; a file holds up to `file_limit`
 * bytes of tensors, or one. Each value is that of the source, rounded to the nearest, ties to even; W + scale B A where adapters
 * have A and B, in F32 and rounded once. Dies if there is a `target`, or a <target>.tmp of another kind; if base is given and source
 * has no adapters; on a tensor that is missing, left over, of another shape, damaged, not finite, beyond what the type holds, or
 * stored in 4 bits; and if the disk does not take it. What was written by then stays in <target>.tmp, which the next one
 * replaces. */
void export_folder(const char *source, const char *base, const char *target, const char *dtype, size_t file_limit);
