/* Description of data: files, and how sequences are made from their tokens. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A source of a mixture. */
typedef struct {
    char *name;
    char **paths;
    int num_paths;
    char **label_mask_paths;
    int num_label_mask_paths;
    char **image_paths;
    int num_image_paths;
    const char *image_features;
    double ratio;          /* its share of the instances, of the sum of all ratios */
    double max_repetition; /* maximum of how often an instance is used, on average */
    /* number of its tokens that are used, the same in each repetition; 0: all */
    long tokens;
} MixtureSource;

typedef struct {
    /* the configuration's name of `paths`, for messages; NULL: data.paths */
    const char *key;
    char **paths; /* shard files or glob patterns, in order */
    int num_paths;
    char **label_mask_paths; /* one file of bytes 0 or 1 per shard; or NULL */
    int num_label_mask_paths;
    char **image_paths; /* one index of images per shard (images.h); or NULL */
    int num_image_paths;
    const char *image_features; /* the folder with the features of these images */
    int image_rows, image_cols; /* size of an image's features; rows 0: the model reads only text */
    int image_token_id;         /* the token that stands for a row of features; never a target */
    uint64_t image_tower;       /* hash of the vision tower of the folder image_model; 0: unknown */
    const char *image_model;
    /* sources, instead of paths, masks and images; they are shuffled. NULL: no mixture */
    const MixtureSource *mix;
    int num_mix;
    int itemsize;        /* bytes of a token in headerless files: 2 or 4 (memmap_dtype) */
    int sequence_length; /* T */
    int vocab_size;      /* ids from here on are an error */
    int eos_token_id;    /* -1: none */
    int pad_token_id;    /* -1: none; a padded token is never a target */
    bool mask_padding;   /* targets equal to pad_token_id are masked */
    bool shuffle;        /* false: file order (evaluation) */
    uint64_t seed;       /* seed of the shuffle: epoch e uses seed + e */
    /* an incomplete step at the end of an epoch is not used. false: the last step may be short, or,
     * if shuffled, is filled with empty sequences, which have no targets */
    bool drop_last;
    bool reopened; /* the data were opened before: do not repeat warnings */
    /* whole documents are packed into sequences, no target crosses from one to the next; false:
     * files are cut into sequences of T tokens */
    bool best_fit;
    /* best_fit: a document longer than T is split; false: it is truncated */
    bool split;
    /* documents are given by metadata next to the files; false: they end after an eos */
    bool metadata;
    /* called by the working thread whenever it makes progress, with what it does; with NULL: it is
     * done for now. beat NULL: not called */
    void (*beat)(const char *doing);
    /* OLMo's instance_filter: an n-gram of min .. max tokens that occurs max_count times in a row
     * masks all labels of the instance (packed: document); 0: off */
    int max_period, min_period, max_count;
} DataSpec;

/* Result of best-fit packing: documents in the files; pieces in the sequences, more if long
 * documents are split; tokens and targets in the pieces, without padding. */
typedef struct {
    uint64_t documents, pieces, tokens, labels;
} PackedData;
