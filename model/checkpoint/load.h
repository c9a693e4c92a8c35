/* Loads a run, and finds checkpoints. */
#pragma once
#include "model/checkpoint/checkpoint.h"

/* Deletes checkpoints that were saved for rotation (saved_as.h), except the ones that `c` keeps by
 * save_num_checkpoints_to_keep and by the permanent and ephemeral intervals. Never deletes the
 * target of `latest`, permanent checkpoints, checkpoints without a SavedAs, links, or checkpoints
 * whose config.yaml names another save_folder. Only rank 0 calls this. */
void checkpoint_prune(const Config *c);

/* Loads weights from `folder`: a checkpoint, or a folder written by Hugging Face's save_pretrained
 * with F32, BF16 or F16 safetensors, one file or several. If `folder` is our checkpoint, also loads
 * the state and, with `with_optimizer`, the moments with their counts. Returns whether `folder` is
 * our checkpoint. With adapters, `folder` may have adapters, ours or PEFT's; all other weights are
 * then read from lora.base_path. If `folder` has a model instead, it is the base of new adapters,
 * and moments and state are not read. Dies on a missing or unknown tensor, or a wrong shape; the
 * message names the tensor. */
bool checkpoint_load(const char *folder, const Config *c, ParamStore *store, TrainState *s,
                     bool with_optimizer);

/* Returns the checkpoint to which save_folder/latest points or, if it is incomplete, the complete
 * one of the highest step; malloc'ed. NULL: there is no checkpoint. Dies if all checkpoints are
 * incomplete. */
char *checkpoint_latest(const char *save_folder);
