/* Checkpoints: stepN/ is a Hugging Face model folder (config.json, safetensors) plus the trainer's
 * state.
 *
 *   stepN/config.json, model.safetensors or model-0000i-of-0000n.safetensors + model.safetensors.index.json
 *        /tokenizer.json, ...            other files of the loaded model (tokenizer_files.h), with images also the frozen tower,
 *                                        model-vision_tower.safetensors
 *        /config.yaml                    the resolved configuration of the run
 *        /optimizer-0000i.states         <name>.<state> of the optimizer's states, AdamW's exp_avg and exp_avg_sq, and
 *                                        the scales of states in groups, <name>.<state>.scale, as stored. In the format of
 *                                        safetensors, with another ending: engines load every *.safetensors of a folder
 *        /trainer.json                   the manifest, written last: step, tokens, loader position, counts of the optimizer's
 *                                        states, bias of routers, columns of the recipe, files and sizes, checksums of all tensors, SavedAs,
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
 * which a run only loads if the user names the folder. */
#pragma once
#include "data/loader.h"
#include "model/store/fsdp.h"
#include "model/update/spikes.h"

/* A source of data.mix, as stored in `mix` of trainer.json. LoaderState stores the source's
 * position under the same index. */
typedef struct {
    char name[MIXTURE_NAME];
    /* weight in the mixture, in units of 1e-9; 0: only an earlier mixture had this source */
    uint64_t weight;
    uint64_t fingerprint;
    DataHashes content;
} MixtureSourceState;

typedef struct {
    long step;   /* number of training steps so far, skipped ones included */
    long tokens; /* number of tokens trained on so far, over all ranks */
    LoaderState loader;
    uint64_t fingerprint; /* hash of the data set: names and sizes of its files */
    DataHashes content;   /* hashes of the files' content */
    /* sources of the present mixture, then sources that only earlier mixtures had */
    MixtureSourceState mix[MIXTURE_MOST];
    int num_mix; /* 0: the data are data.paths */
    /* hash of the adapters' base (base_fingerprint.h); 0: no adapters, or unknown */
    uint64_t base_fingerprint;
    /* losses and norms of the last steps, so that a resumed run detects the same spikes */
    SpikeWindow spikes;
    /* [router_biases] the routers' bias (Experts.bias_gamma), block by block; malloc'ed. NULL:
     * zeros */
    float *router_bias;
    int router_biases;
} TrainState;

enum { CHECKPOINT_VERSION = 1 }; /* format_version of trainer.json */

/* Maximum size of a file of weights or moments in bytes, unless a single unit is larger: the limit
 * of save_pretrained. */
static const size_t CHECKPOINT_FILE_BYTES = 5000000000;
