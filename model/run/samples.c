#include "model/run/samples.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/runtime/agree.h"
#include "model/run/inputs.h"
#include "model/sampling.h"
#include "model/parallel/stages.h"

struct Samples {
    const Config *config;
    Prompts prompts;
    int *text;   /* (prompts, T): prompts with their continuations */
    int *length; /* length of each text */
    bool *over;  /* whether each text is complete */
    float *logits;
};

Samples *samples_open(const Config *c)
{
    if (!c->samples.prompts)
        return NULL;
    Samples *s = xcalloc(1, sizeof *s);
    s->config = c;
    inputs_read_prompts(&s->prompts, c->samples.prompts, &c->model,
                        "samples.prompts takes only text; ./train --generate takes images too");
    const size_t count = (size_t)s->prompts.count;
    s->text = xmalloc(sizeof *s->text * count * (size_t)c->model.max_sequence_length);
    s->length = xmalloc(sizeof *s->length * count);
    s->over = xmalloc(sizeof *s->over * count);
    s->logits = xmalloc(sizeof *s->logits * (size_t)c->model.vocab_size);
    return s;
}

void samples_close(Samples *s)
{
    if (!s)
        return;
    prompts_free(&s->prompts);
    free(s->text), free(s->length), free(s->over), free(s->logits);
    free(s);
}

static int *text_of(const Samples *s, int i)
{
    return s->text + (size_t)i * (size_t)s->config->model.max_sequence_length;
}

static void begin(Samples *s)
{
    memset(s->text, 0,
           sizeof *s->text * (size_t)s->prompts.count *
               (size_t)s->config->model.max_sequence_length);
    for (int i = 0; i < s->prompts.count; i++) {
        s->length[i] = prompts_length(&s->prompts, i);
        s->over[i] = false;
        memcpy(text_of(s, i), s->prompts.token + s->prompts.start[i],
               sizeof *s->text * (size_t)s->length[i]);
    }
}

/* Adds a token to text i. token < 0 (a logit was not finite) ends the text; training itself detects
 * such a model. */
static void add_token(Samples *s, int i, const int token)
{
    const Config *c = s->config;
    s->over[i] = token < 0 || token == c->model.eos_token_id;
    if (token >= 0)
        text_of(s, i)[s->length[i]++] = token;
    s->over[i] |= s->length[i] - prompts_length(&s->prompts, i) == c->samples.max_new_tokens ||
                  s->length[i] == c->model.max_sequence_length;
}

/* Returns the token after this rank's row `row`, on ranks that have the head. All ranks of a shard
 * group must call this, because they gather the head's weights; the text's last token is on only
 * one of these ranks. */
static int next_token(Samples *s, Model *m, ParamStore *store, int row)
{
    static const Sampling greedy = { .temperature = 0, .top_p = 1 };
    if (!m->has_head)
        return -1;
    model_logits(m, store, row, s->logits);
    return sample_token(s->logits, m->text.config->vocab_size, &greedy, 0);
}

/* Adds a token to texts first .. first + count - 1 (at most attn.B), as sequences of a micro-batch.
 * Attention is causal, so tokens after a text's end have no effect. Returns whether any text got a
 * token. */
static bool pass(Samples *s, Model *m, ParamStore *store, int first, int count, int *batch)
{
    const int T = m->text.T, own = m->text.attn.T;
    bool any = false;
    for (int i = first; i < first + count; i++)
        any |= !s->over[i];
    if (!any)
        return false;
    memcpy(batch, text_of(s, first), sizeof *batch * (size_t)count * (size_t)T);
    watchdog_mark("writing samples", -1);
    stages_enter(store);
    model_put_sequences(m, batch);
    pass_forward(m, store);
    watchdog_set_stage(-1);
    for (int i = first; i < first + count; i++) {
        if (s->over[i])
            continue;
        /* rows are counted over all tensor ranks */
        const int last = s->length[i] - 1, row = (i - first) * own + last % own;
        const int owner =
            stages_head_rank(store) + last / own * row_parts(&m->text) + row / m->text.N;
        stages_enter(store);
        int token = next_token(s, m, store, row % m->text.N);
        watchdog_set_stage(-1);
        comm_broadcast(&token, sizeof token, owner);
        add_token(s, i, token);
    }
    return true;
}

static json_t *tokens_of(const Samples *s, int i, int from, int to)
{
    json_t *list = json_array();
    for (int t = from; t < to; t++)
        json_array_append_new(list, json_integer(text_of(s, i)[t]));
    return list;
}

static void write_log(const Samples *s, Log *l, long step)
{
    json_t *list = json_array();
    for (int i = 0; i < s->prompts.count; i++) {
        const int length = prompts_length(&s->prompts, i);
        printf("sample %d:", i);
        for (int t = length; t < s->length[i]; t++)
            printf(" %d", text_of(s, i)[t]);
        putchar('\n');
        json_array_append_new(list, json_pack("{s:o, s:o}", "prompt", tokens_of(s, i, 0, length),
                                              "tokens", tokens_of(s, i, length, s->length[i])));
    }
    fflush(stdout);
    log_object(l, json_pack("{s:I, s:o}", "step", (json_int_t)step, "samples", list));
}

bool samples_write(Samples *s, Model *m, ParamStore *store, Log *l, long step,
                   const atomic_int *stop)
{
    if (!s)
        return false;
    const int B = m->text.attn.B;
    bool cut = false;
    int *batch = xcalloc((size_t)B * (size_t)m->text.T, sizeof *batch);
    log_pause(l);
    begin(s);
    for (int first = 0; first < s->prompts.count && !cut; first += B)
        while (!cut && pass(s, m, store, first,
                            s->prompts.count - first < B ? s->prompts.count - first : B, batch))
            cut = agree_any(*stop);
    log_resume(l);
    free(batch);
    if (comm_rank() == 0 && !cut)
        write_log(s, l, step);
    return cut;
}
