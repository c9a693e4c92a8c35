/* Checkpoints: stepN/ is a Hugging Face model folder (config.json, safetensors) plus the trainer's state.
 *
 *   stepN/config.json, model.safetensors or model-0000i-of-0000n.safetensors + model.safetensors.index.json
 *        /tokenizer.json, ...            what the run began with beside the model (companions.h)
 *        /config.yaml                    the resolved configuration of the run
 *        /optimizer-0000i.safetensors    <name>.<state> of the optimizer's states, AdamW's exp_avg and exp_avg_sq, and
 *                                        the scales of those in groups, <name>.<state>.scale, as stored
 *        /trainer.json                   step, tokens, loader position, columns of the recipe, files and sizes, checksums of all
 *                                        tensors, what it was saved as, of adapters a hash of the base; written last: the manifest
 *
 * Of a run with adapters, without copies of what they stand beside, as PEFT saves them:
 *
 *   stepN/adapter_config.json, adapter_model.safetensors
 *        /tokenizer.json, config.yaml, optimizer-0000i.safetensors, trainer.json as above
 *
 * The layout of the files depends on the architecture alone, not on the number of ranks: every rank writes the bytes
 * of its own shards into the places where they belong, so any number of ranks can read them back.
 * Written as stepN.tmp, fsynced, renamed; then the link `latest` moves, or a file that says the same (pointer.h). stepN-aborted is
 * the state of a run that could not go on: the same files, which nothing goes on from unless it is named. */
#pragma once
#include "data/loader.h"
#include "model/fsdp.h"
#include "model/spikes.h"

typedef struct {
    long   step;               /* training steps done, skipped ones included */
    long   tokens;             /* trained on so far, over all ranks */
    long   updates;            /* of the moments: t of AdamW's bias correction. A step with a loss or gradient that is not
                                  finite makes none, and moments that are loaded bring theirs along */
    LoaderState loader;
    uint64_t fingerprint;      /* of the data set: names and sizes of its files */
    DataSample sample;         /* and of their content */
    uint64_t base_sample;      /* of what adapters stand beside (base_sample.h); 0: there are none, or it is not known */
    SpikeWindow spikes;        /* a run that goes on must see the same spikes */
} TrainState;

enum { CHECKPOINT_VERSION = 1 };       /* format_version of trainer.json */

/* Bytes of weights or moments that a file holds at most, unless one unit alone has more: as save_pretrained's files. */
static const size_t CHECKPOINT_FILE_BYTES = 5000000000;

/* Saving, beside training. All ranks call all three.
 * begin: waits for an earlier save, creates files of up to `file_limit` bytes, copies this rank's part of weights and moments to
 *     host memory, and returns while a thread writes it to save_folder/step<N>.tmp. `c` must stay until the save is complete; `s` is
 *     copied.
 * poll: if a save is under way and all ranks have written their parts: completes it and returns true. Else returns
 *     false at once. Completing: step<N>.tmp becomes step<N>, save_folder/latest points to it, older ones are pruned.
 * finish: waits until a save that is under way is complete.
 * drop: a save that is under way leaves nothing behind.
 * They die if the disk does not take it, leaving the last complete checkpoint as it was; begin also if a weight or moment is not
 * finite, naming it: that is no checkpoint. */
void checkpoint_begin (const Config *c, const Fsdp *f, const TrainState *s, size_t file_limit);
bool checkpoint_poll  (void);
void checkpoint_finish(void);
void checkpoint_drop  (void);

/* For a run that cannot go on: saves what it has, finite or not, as step<N>-aborted beside its checkpoints, which stay as they are.
 * Returns its path, malloc'ed, when it is on disk. */
char *checkpoint_set_aside(const Config *c, const Fsdp *f, const TrainState *s, size_t file_limit);

/* Deletes what was saved for rotation (saved_as.h) and save_num_checkpoints_to_keep and the permanent and ephemeral intervals of
 * `c` do not keep. Never deletes what `latest` points to, what was saved to stay or by a program that did not say, links, or
 * checkpoints whose config.yaml names another save_folder. Rank 0 acts. */
void checkpoint_prune(const Config *c);

/* Loads weights from `folder` (a checkpoint, or a folder written by Hugging Face's save_pretrained: f32, bf16 or f16
 * safetensors, one file or several) and, if it is a checkpoint of ours, moments and state. Returns whether it was.
 * With adapters, `folder` may hold them, ours or PEFT's: the other weights are then those of lora.base_path. If it holds a model,
 * that is the base of new adapters, whose training begins: moments and state are not read.
 * Dies on a tensor that is missing, left over or of another shape, naming it. `with_optimizer`: moments too. */
bool checkpoint_load(const char *folder, const Config *c, Fsdp *f, TrainState *s, bool with_optimizer);

/* The checkpoint that save_folder/latest points to; if that is incomplete, the complete one of the highest step; NULL
 * if there is none. Dies if there are only incomplete ones. malloc'ed. */
char *checkpoint_latest(const char *save_folder);
