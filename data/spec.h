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
    double ratio;          /* ratio / (sum of all ratios) is the source's share of the instances */
    double max_repetition; /* maximum of the mean number of uses per instance */
    /* number of the source's tokens in use, the same in each repetition; 0: all */
    long tokens;
} MixtureSource;

typedef struct {
    /* for messages: the configuration's name of `paths`; NULL: data.paths */
    const char *key;
    char **paths; /* shard files or glob patterns, in order */
    int num_paths;
    char **label_mask_paths; /* one file of bytes 0 or 1 per shard; NULL: no masks */
    int num_label_mask_paths;
    char **image_paths; /* one index of images per shard (images.h); NULL: no images */
    int num_image_paths;
    const char *image_features; /* folder with the features of these images */
    /* rows and columns of an image's features; rows 0: the model reads only text */
    int image_rows, image_cols;
    int image_token_id;   /* the token that stands for a row of features; never a target */
    uint64_t image_tower; /* hash of the vision tower in the folder image_model; 0: unknown */
    const char *image_model;
    /* mixture: sources that replace paths, masks and images, and are shuffled; NULL: no mixture */
    const MixtureSource *mix;
    int num_mix;
    int itemsize;        /* bytes of a token in headerless files: 2 or 4 (memmap_dtype) */
    int sequence_length; /* T, in tokens */
    int vocab_size;      /* an id >= vocab_size is an error */
    int eos_token_id;    /* token that ends a document; -1: none */
    int pad_token_id;    /* -1: none; a padded token is never a target */
    bool mask_padding;
    bool shuffle;  /* whether epochs are shuffled; false: file order (evaluation) */
    uint64_t seed; /* seed of the shuffle: epoch e uses seed + e */
    /* true: an incomplete step at the end of an epoch is not used. false: the last step may be
     * short or, if shuffled, is filled with empty sequences, which have no targets */
    bool drop_last;
    bool reopened; /* the data were opened before: do not repeat warnings */
    /* true: whole documents are packed into sequences, and no target crosses from one document to
     * the next. false: files are cut into sequences of T tokens */
    bool best_fit;
    /* best_fit: a document longer than T is split; false: it is truncated */
    bool split;
    /* best_fit: documents 2i and 2i + 1 of a file are the sides of a preference pair, which stays in
     * one sequence */
    bool pairs;
    int value_bytes; /* size of a stored value (loader_use_values); 0: the data have no values */
    /* the values lie next to each file, with this name instead of its ending; NULL: loader_use_values
     * gives them */
    const char *value_suffix;
    /* metadata next to the files gives the documents; false: documents end after an eos */
    bool metadata;
    /* reports progress to the watchdog: the working thread calls beat with the name of its work
     * whenever it makes progress, and with NULL when the work is done. beat NULL: nothing is
     * reported */
    void (*beat)(const char *doing);
    /* OLMo's instance_filter: if an n-gram of min_period .. max_period tokens occurs max_count
     * times in a row, all labels of the instance (packed: document) are masked; 0: no filter */
    int max_period, min_period, max_count;
} DataSpec;

/* Result of best-fit packing. */
typedef struct {
    /* documents: number of documents in the files. pieces: number of pieces in the sequences, which
     * is larger if long documents are split. tokens, labels: number of tokens and targets in the
     * pieces, without padding */
    uint64_t documents, pieces, tokens, labels;
} PackedData;
