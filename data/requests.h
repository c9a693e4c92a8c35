/* A downstream task: questions with choices, as tokens. scripts/prepare_eval.py makes such files
 * and describes their format; scripts/make_choices.py makes files with images. */
#pragma once
#include "data/shown_images.h"

/* A task's own metric is METRIC_ACC, METRIC_LEN_NORM or METRIC_BPB. With METRIC_BPB each question
 * has one choice. Continuations begin with a blank. METRIC_LEN_NORM and METRIC_BPB do not count
 * this blank, but OLMo-core's "v2" metrics do. */
typedef enum {
    METRIC_ACC, /* share of questions whose right choice has the highest log-probability */
    /* as METRIC_ACC, with the log-probability divided by the number of characters */
    METRIC_LEN_NORM,
    METRIC_BPB, /* bits per byte of the right choice, mean over questions */
    METRIC_LEN_NORM_V2,
    METRIC_BPB_V2,
    NUM_METRICS
} Metric;

/* A choice. Context and continuation are tokens [first, first + length) of the task. The last
 * `scored` tokens are the continuation. */
typedef struct {
    size_t first;
    int length, scored;
    int characters, bytes; /* length of the continuation's text without its first blank */
    size_t first_image;    /* image[first_image] is the first image that the choice shows */
    /* the first choice of this question with the same tokens: this choice or an earlier one */
    int same;
} Choice;

/* choices [first, first + count); the right choice is first + gold */
typedef struct {
    int first, count, gold;
} Question;

typedef struct {
    char *name; /* label of the task in OLMo */
    Metric metric;
    int *token;
    uint32_t *image; /* index of each shown image in the folder of features */
    Choice *choice;
    Question *question;
    size_t tokens, images;
    int choices, questions;
} Requests;

/* Reads a request file. Contexts are truncated from the left, so that a choice without its last
 * token fits into limits->most tokens; contexts with images are not truncated. `key`: the
 * configuration's key for messages. Dies with file and line on a missing or truncated file, wrong
 * JSON, a token beyond the vocabulary, a continuation without context or longer than `most`, images
 * that the tokens do not show or that have no features. */
Requests requests_read(const char *key, const char *path, const TokenLimits *limits);
void requests_free(Requests *r);

const char *metric_name(Metric m); /* "acc", "len_norm", "bpb", "len_norm_v2", "bpb_v2" */
