/* Macros for the kinds of rows of config_keys.c, and words that several rows share. Only
 * config_keys.c includes this file. */
#pragma once
#include <assert.h>
#include <math.h>

#include "model/keys/types.h"

#define C(field) offsetof(Settings, c.field)
#define X(field) offsetof(Settings, field)
#define E(field) offsetof(Evaluator, field)
#define S(field) offsetof(DataSource, field)

#define NUMBER(name, type, default_text, min, max, offset, help) \
    { name, type, default_text, NAN, min, max, NULL, offset, help }
#define OPTION(name, type, default_text, none, min, max, offset, help) \
    { name, type, default_text, none, min, max, NULL, offset, help }
#define WORD(name, type, default_text, words, offset, help) \
    { name, type, default_text, NOT_GIVEN, 0, 0, NULL, offset, help, words }
#define WORDS(...) \
    (const Word[]) \
    { \
        __VA_ARGS__, { NULL, 0 } \
    }
#define OTHER(name, type, default_text, offset, help) \
    { name, type, default_text, NAN, 0, 0, NULL, offset, help }
#define COLUMN(name, formats, offset, help) \
    { name, FORMAT | FOLLOWS, "null", NAN, 0, 0, formats, offset, help }
#define ONLY(name, choices, why) { name, FIXED, "null", NAN, 0, 0, choices, 0, why }

#define WIDE "bf16 or f32"
#define ONE_SCALE "f32, bf16, e4m3 or e5m2"
#define GROUPS "f32, bf16, e4m3, e5m2, or e4m3/16: groups of 16 that share a scale"
#define MOMENT \
    "f32, bf16, or e4m3/128: groups of 128 that share a scale; e4m3/128+: expanded (COAT)"

#define MANY 2147483647.0
#define VOCAB 2147483520.0 /* the largest int that is a multiple of 128 */

static_assert(offsetof(Settings, c) == 0, "a Config is freed as the Settings it lies in");
static_assert(offsetof(Config, num_trainable) == offsetof(Config, trainable) + sizeof(char **),
              "PATTERNS");
static_assert(offsetof(TokenFiles, num_paths) == offsetof(TokenFiles, paths) + sizeof(char **),
              "PATHS");
static_assert(offsetof(TokenFiles, num_label_mask_paths) ==
                  offsetof(TokenFiles, label_mask_paths) + sizeof(char **),
              "PATHS");
static_assert(offsetof(Settings, num_datasets) ==
                  offsetof(Settings, datasets) + sizeof(NamedPaths *),
              "DATASETS");
static_assert(offsetof(Settings, num_lora_modules) ==
                  offsetof(Settings, lora_modules) + sizeof(char **),
              "NAMES");
static_assert(offsetof(Settings, num_batch_warmup) ==
                  offsetof(Settings, batch_warmup) + sizeof(char **),
              "NAMES");
static_assert(offsetof(Config, optimizer.beta2) ==
                  offsetof(Config, optimizer.beta1) + sizeof(double),
              "BETAS");

static const Word packings[] = { { "concat", PACK_CONCAT },
                                 { "best_fit", PACK_BEST_FIT },
                                 { NULL, 0 } };
static const Word boundaries[] = { { "eos", BOUNDARIES_EOS },
                                   { "metadata", BOUNDARIES_METADATA },
                                   { NULL, 0 } };
static const Word host_uses[] = {
    { "never", HOST_NEVER }, { "auto", HOST_AUTO }, { "all", HOST_ALL }, { NULL, 0 }
};
static const Word token_types[] = { { "uint16", UINT16 }, { "uint32", UINT32 }, { NULL, 0 } };
static const Word meshes[] = { { "given", 0 }, { "auto", 1 }, { NULL, 0 } };
static const Word shardings[] = { { "FULL_SHARD", FULL_SHARD },
                                  { "SHARD_GRAD_OP", SHARD_GRAD_OP },
                                  { "NO_SHARD", NO_SHARD },
                                  { "HYBRID_SHARD", HYBRID_SHARD },
                                  { "_HYBRID_SHARD_ZERO2", HYBRID_SHARD_ZERO2 },
                                  { NULL, 0 } };
static const Word schedules[] = { { "1F1B", PIPELINE_1F1B },
                                  { "Interleaved1F1B", PIPELINE_INTERLEAVED },
                                  { "Sequential", PIPELINE_ONE },
                                  { NULL, 0 } };
