/* A downstream task: questions with choices, as tokens. Files are made by scripts/prepare_eval.py, which says what is in them. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* The share of questions whose right choice has the highest log-probability, or the highest per character; bits per byte of the
 * right choices, the mean over questions. Continuations begin with a blank, which the latter two do not count; with it they are
 * OLMo-core's "v2". A task has one of the first three as the metric that counts; with bpb its questions have one choice. */
typedef enum { METRIC_ACC, METRIC_LEN_NORM, METRIC_BPB, METRIC_LEN_NORM_V2, METRIC_BPB_V2, NUM_METRICS } Metric;

/* Context and continuation: tokens [first, first + length) of the task, of which the last `scored` are the continuation. */
typedef struct {
    size_t first;
    int    length, scored;
    int    characters, bytes;      /* of the continuation's text without the blank in front of it */
    int    same;                   /* the first choice of this question with the same tokens: itself, or an earlier one */
} Choice;

typedef struct { int first, count, gold; } Question;       /* choices [first, first + count), of which first + gold is right */

typedef struct {
    char     *name;                /* OLMo's label */
    Metric    metric;
    int      *token;
    Choice   *choice;
    Question *question;
    size_t    tokens;
    int       choices, questions;
} Requests;

/* Reads a request file. Contexts are cut from the left, so that a choice, all but its last token, fits into `max_length` tokens.
 * `key`: where the configuration names the file. Dies with file and line of what is wrong: missing or cut short, no such JSON, a
 * token >= vocab_size, a continuation without context or longer than max_length. */
Requests requests_read(const char *key, const char *path, int max_length, int vocab_size);
void     requests_free(Requests *r);

const char *metric_name(Metric m);     /* "acc", "len_norm", "bpb", "len_norm_v2", "bpb_v2" */
