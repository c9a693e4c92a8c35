#include "data/requests.h"

#include "kernels/runtime/error.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const metric_names[NUM_METRICS] = { "acc", "len_norm", "bpb", "len_norm_v2",
                                                       "bpb_v2" };

const char *metric_name(Metric m)
{
    return metric_names[m];
}

#define MAKERS "scripts/prepare_eval.py and make_choices.py"

/* A file being read: its position, limits of its tokens, and allocated capacities. */
typedef struct {
    const char *key, *path;
    FILE *file;
    long line;
    const TokenLimits *limits;
    size_t token_capacity;
    int choice_capacity, question_capacity;
} Reader;

_Noreturn static void bad(const Reader *f, const char *found)
{
    fclose(f->file);
    die("%s: %s:%ld: %s; " MAKERS " make such files, for the model's own tokenizer", f->key,
        f->path, f->line, found);
}

/* Reads a key of the object: an integer >= low. */
static int number(const Reader *f, const json_t *o, const char *name, int low)
{
    const json_t *n = json_object_get(o, name);
    if (!json_is_integer(n) || json_integer_value(n) < low || json_integer_value(n) > INT_MAX)
        bad(f, xasprintf("\"%s\": expected an integer from %d on", name, low));
    return (int)json_integer_value(n);
}

static json_t *parse(const Reader *f, const char *line, size_t bytes)
{
    json_error_t error;
    json_t *o = json_loadb(line, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(o))
        bad(f, o ? "expected an object" : xasprintf("no JSON (%s)", error.text));
    return o;
}

/* Reads the first line. Returns the number of questions that follow. */
static int read_header(Requests *r, const Reader *f, const json_t *o)
{
    const char *name = json_string_value(json_object_get(o, "task")),
               *metric = json_string_value(json_object_get(o, "metric"));
    if (!name || !*name || !metric)
        bad(f, "expected {\"task\": ..., \"metric\": ..., \"questions\": ...}");
    int m = 0;
    while (m <= METRIC_BPB && strcmp(metric, metric_names[m]) != 0)
        m++;
    if (m > METRIC_BPB)
        bad(f, xasprintf("\"metric\" %s: expected acc, len_norm or bpb", metric));
    r->name = xstrdup(name);
    r->metric = (Metric)m;
    return number(f, o, "questions", 1);
}

/* Keeps the last max_length + 1 tokens: the very last token is predicted but not read. */
static void add_tokens(Requests *r, Reader *f, Choice *c, const json_t *tokens)
{
    const size_t all = json_array_size(tokens), most = (size_t)f->limits->most + 1,
                 skipped = all > most ? all - most : 0;
    if (r->tokens + all > f->token_capacity) {
        f->token_capacity = 2 * (r->tokens + all);
        r->token = xrealloc(r->token, sizeof *r->token * f->token_capacity);
    }
    c->first = r->tokens;
    c->length = (int)(all - skipped);
    for (size_t i = 0; i < all; i++) {
        const json_t *id = json_array_get(tokens, i);
        const json_int_t x = json_integer_value(id);
        if (!json_is_integer(id) || x < 0 || x >= f->limits->vocab)
            bad(f, json_is_integer(id)
                       ? xasprintf("token %lld is beyond the vocabulary: model.vocab_size is %d",
                                   (long long)x, f->limits->vocab)
                       : "\"tokens\": expected integers");
        if (i >= skipped)
            r->token[r->tokens++] = (int)x;
    }
}

static int first_same(const Requests *r, int from, const Choice *c)
{
    for (int i = from; i < r->choices; i++) {
        const Choice *d = &r->choice[i];
        if (d->length == c->length && d->scored == c->scored &&
            memcmp(r->token + d->first, r->token + c->first,
                   sizeof *r->token * (size_t)c->length) == 0)
            return i;
    }
    return r->choices;
}

/* Adds the images of a choice: it shows the images of its question, which are the last ones of
 * r->image. */
static void add_images(const Requests *r, const Reader *f, Choice *c, size_t tokens, size_t images)
{
    char *wrong = shown_images_wrong(r->token + c->first, (size_t)c->length, images, f->limits);
    if (images > 0 && (size_t)c->length < tokens)
        bad(f, xasprintf("a choice with images has %zu tokens; expected at most "
                         "model.max_sequence_length %d and one more",
                         tokens, f->limits->most));
    if (wrong)
        bad(f, wrong);
    for (int i = c->length - c->scored; i < c->length && f->limits->image_rows > 0; i++)
        if (r->token[c->first + (size_t)i] == f->limits->image_id)
            bad(f, xasprintf("token %d of a continuation is %d (model.image_token_id); expected "
                             "images in the context only",
                             i - c->length + c->scored, f->limits->image_id));
    c->first_image = r->images - images;
}

static void add_choice(Requests *r, Reader *f, const Question *q, const json_t *o, size_t images)
{
    const json_t *tokens = json_object_get(o, "tokens");
    if (!json_is_array(tokens))
        bad(f, "a choice: expected {\"tokens\": [...], \"continuation\": ..., \"characters\": ..., "
               "\"bytes\": ...}");
    Choice c = { .scored = number(f, o, "continuation", 1),
                 .characters = number(f, o, "characters", 1),
                 .bytes = number(f, o, "bytes", 1) };
    if (json_array_size(tokens) <= (size_t)c.scored)
        bad(f, "a choice has no context before its continuation");
    if (c.scored > f->limits->most) {
        fclose(f->file);
        die("%s: %s:%ld: a continuation of %d tokens does not fit model.max_sequence_length %d: "
            "increase it, or leave this "
            "task out",
            f->key, f->path, f->line, c.scored, f->limits->most);
    }
    add_tokens(r, f, &c, tokens);
    add_images(r, f, &c, json_array_size(tokens), images);
    c.same = first_same(r, q->first, &c);
    if (r->choices == f->choice_capacity) {
        f->choice_capacity = 2 * f->choice_capacity + 64;
        r->choice = xrealloc(r->choice, sizeof *r->choice * (size_t)f->choice_capacity);
    }
    r->choice[r->choices++] = c;
}

static void add_question(Requests *r, Reader *f, const json_t *o)
{
    const json_t *choices = json_object_get(o, "choices");
    Question q = { .first = r->choices,
                   .count = (int)json_array_size(choices),
                   .gold = number(f, o, "gold", 0) };
    if (r->metric == METRIC_BPB ? q.count != 1 : q.count < 2)
        bad(f, xasprintf("%d choices; expected %s with the metric %s", q.count,
                         r->metric == METRIC_BPB ? "one" : "two or more", metric_name(r->metric)));
    const size_t images = r->images;
    char *wrong = shown_images_read(&r->image, &r->images, json_object_get(o, "images"));
    if (wrong)
        bad(f, wrong);
    if (q.gold >= q.count)
        bad(f, xasprintf("\"gold\" %d: there are %d choices, numbered from 0", q.gold, q.count));
    for (int i = 0; i < q.count; i++)
        add_choice(r, f, &q, json_array_get(choices, (size_t)i), r->images - images);
    if (r->questions == f->question_capacity) {
        f->question_capacity = 2 * f->question_capacity + 64;
        r->question = xrealloc(r->question, sizeof *r->question * (size_t)f->question_capacity);
    }
    r->question[r->questions++] = q;
}

Requests requests_read(const char *key, const char *path, const TokenLimits *limits)
{
    Requests r = { 0 };
    Reader f = { .key = key, .path = path, .limits = limits };
    char *line = NULL;
    size_t size = 0;
    ssize_t bytes;
    int expected = 0;
    check_regular(path);
    FILE *file = f.file = fopen(path, "re");
    if (!file)
        die("%s: %s: cannot open: %s; " MAKERS " make request files", key, path, strerror(errno));
    while ((bytes = getline(&line, &size, file)) > 0) {
        f.line++;
        json_t *o = parse(&f, line, (size_t)bytes);
        if (f.line == 1)
            expected = read_header(&r, &f, o);
        else
            add_question(&r, &f, o);
        json_decref(o);
    }
    if (f.line > 0 && !ferror(file) && (r.questions != expected || expected == 0))
        bad(&f, xasprintf("the file ends after %d questions; its first line promises %d",
                          r.questions, expected));
    const int failed = ferror(file) ? errno : 0;
    fclose(file);
    free(line);
    if (failed)
        die("%s: %s: cannot read: %s", key, path, strerror(failed));
    if (f.line == 0)
        die("%s: %s is empty; expected a request file: " MAKERS " make them", key, path);
    return r;
}

void requests_free(Requests *r)
{
    free(r->name);
    free(r->token);
    free(r->image);
    free(r->choice);
    free(r->question);
    *r = (Requests){ 0 };
}
