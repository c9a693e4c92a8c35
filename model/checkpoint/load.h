/* Loads a run, and finds checkpoints. */
#pragma once
#include "model/checkpoint/checkpoint.h"

/* Deletes checkpoints that were saved for rotation (saved_as.h), except those that `c` keeps: by
 * save_num_checkpoints_to_keep and the permanent and ephemeral intervals. Never deletes the target
 * of `latest`, permanent checkpoints, those without a SavedAs, links, or checkpoints whose
 * config.yaml names another save_folder. Rank 0 acts. */
void checkpoint_prune(const Config *c);

/* Loads weights from `folder` (a checkpoint, or a folder written by Hugging Face's save_pretrained:
 * f32, bf16 or f16 safetensors, one file or several) and, if it is our checkpoint, moments with
 * their counts, and state. Returns whether it is. With adapters, `folder` may have adapters, ours
 * or PEFT's: the other weights are then those of lora.base_path. If it has a model, this is the
 * base of new adapters; moments and state are not read. Dies on a missing or unknown tensor, or a
 * wrong shape, naming the tensor. `with_optimizer`: moments too. */
bool checkpoint_load(const char *folder, const Config *c, ParamStore *store, TrainState *s,
                     bool with_optimizer);

/* The checkpoint that save_folder/latest points to; if it is incomplete, the complete one of the
 * highest step; NULL if there is no checkpoint. Dies if all are incomplete. malloc'ed. */
char *checkpoint_latest(const char *save_folder);
