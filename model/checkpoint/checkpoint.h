/* Checkpoints: stepN/ is a Hugging Face model folder (config.json, safetensors) plus the trainer's
 * state.
 *
 *   stepN/config.json, model.safetensors or model-0000i-of-0000n.safetensors + model.safetensors.index.json
 *        /tokenizer.json, ...            other files of the loaded model (tokenizer_files.h), with images also the frozen tower,
 *                                        model-vision_tower.safetensors
 *        /config.yaml                    the resolved configuration of the run
 *        /optimizer-0000i.states         <name>.<state> of the optimizer's states, AdamW's exp_avg and exp_avg_sq, and
 *                                        the scales of those in groups, <name>.<state>.scale, as stored. In the format of
 *                                        safetensors, with another ending: engines load every *.safetensors of a folder
 *        /trainer.json                   the manifest, written last: step, tokens, loader position, counts of the optimizer's
 *                                        states, columns of the recipe, files and sizes, checksums of all tensors, SavedAs,
 *                                        and for adapters a hash of the base
 *
 * With adapters, as PEFT saves them, without a copy of the base:
 *
 *   stepN/adapter_config.json, adapter_model.safetensors
 *        /tokenizer.json, config.yaml, optimizer-0000i.states, trainer.json as above
 *
 * The layout of the files depends only on the architecture, not on the number of ranks: every rank
 * writes the bytes of its own shards at their offsets, so any number of ranks can read them back.
 * Written as stepN.tmp, fsynced, renamed; then the link `latest`, or a file in its place
 * (pointer.h), moves. stepN-aborted is the state of a run that could not continue: the same files,
 * which are only loaded if they are named. */
#pragma once
#include "data/loader.h"
#include "model/store/fsdp.h"
#include "model/update/spikes.h"

/* A source of data.mix, as in `mix` of trainer.json. Its position is that of the same index in
 * LoaderState. */
typedef struct {
    char name[MIX_NAME];
    uint64_t weight; /* of the mixture, in 1e-9; 0: an earlier mixture had the source */
    uint64_t fingerprint;
    DataHashes content;
} MixedSource;

typedef struct {
    long step;   /* training steps done, skipped ones included */
    long tokens; /* trained on so far, over all ranks */
    LoaderState loader;
    uint64_t fingerprint;      /* of the data set: names and sizes of its files */
    DataHashes content;        /* of the files' content */
    MixedSource mix[MIX_MOST]; /* those of the mixture first, then those of earlier ones */
    int num_mix;               /* 0: data.paths */
    /* of the base of adapters (base_fingerprint.h); 0: no adapters, or unknown */
    uint64_t base_fingerprint;
    SpikeWindow spikes; /* so that a resumed run detects the same spikes */
} TrainState;

enum { CHECKPOINT_VERSION = 1 }; /* format_version of trainer.json */

/* Maximum bytes of a file of weights or moments, unless a single unit has more: the limit of
 * save_pretrained. */
static const size_t CHECKPOINT_FILE_BYTES = 5000000000;

/* Saving, overlapped with training. All ranks call all four. begin: waits for an earlier save,
 * creates files of up to `file_limit` bytes, copies this rank's part of weights and moments to
 *     host memory, and returns while a thread writes it to save_folder/step<N>.tmp. `c` must stay until the save is complete;
 *     `s` is copied.
 * poll: if a save is in progress and all ranks have written their parts, completes it and returns
 * true. Otherwise returns
 *     false at once. Completing: step<N>.tmp becomes step<N>, save_folder/latest points to it, older ones are pruned.
 * finish: waits until a save in progress is complete. drop: discards a save in progress and its
 * files. They die if the disk fails; the last complete checkpoint is then unchanged. begin also
 * dies if a weight or moment is not finite, naming it. */
void checkpoint_begin(const Config *c, const ParamStore *store, const TrainState *s,
                      size_t file_limit);
bool checkpoint_poll(void);
void checkpoint_finish(void);
void checkpoint_drop(void);

/* For a run that cannot continue: saves its state, finite or not, as step<N>-aborted next to its
 * checkpoints, which do not change. Returns the path, malloc'ed, when it is on disk. */
char *checkpoint_set_aside(const Config *c, const ParamStore *store, const TrainState *s,
                           size_t file_limit);

/* Saves only the weights, as step<N>-average: a folder for other programs, with average.json, which
 * describes the average. Replaces one of an earlier process. Dies as the others do; there must be
 * no save in progress. */
void checkpoint_write_average(const Config *c, const ParamStore *store, const TrainState *s,
                              size_t file_limit);

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
